"""Prometheus' own tool accepts our configuration, and each alert fires when it should (alerts*_test.yml)."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).parent / "alerts_test.yml"
DAYS = CASES.with_name("alerts_days_test.yml")

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool here: apt install prometheus")


def promtool(*words: str | Path) -> tuple[int, str]:
    done = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_configuration_is_accepted() -> None:
    status, said = promtool("check", "config", ROOT / "grafana/prometheus.yml")
    assert status == 0, said
    assert "FAILED" not in said


def test_alerts_fire_when_they_should() -> None:
    status, said = promtool("test", "rules", CASES, DAYS)
    assert status == 0, said


@pytest.mark.parametrize(
    ("cases", "right", "wrong", "alert"),
    [
        (CASES, "waiting > 4", "waiting > 3", "ThimbleQueueLong"),
        (DAYS, "0.9 * sum", "0.7 * sum", "ThimbleSnapshotDiskBudget"),
    ],
    ids=["minutes", "days"],
)
def test_a_wrong_rule_would_be_noticed(cases: Path, right: str, wrong: str, alert: str, tmp_path: Path) -> None:
    rules = (ROOT / "grafana/alerts.yml").read_text()
    assert right in rules
    (tmp_path / "alerts.yml").write_text(rules.replace(right, wrong))
    (tmp_path / "cases.yml").write_text(cases.read_text().replace("../../grafana/alerts.yml", "alerts.yml"))
    status, said = promtool("test", "rules", tmp_path / "cases.yml")
    assert status != 0
    assert alert in said
