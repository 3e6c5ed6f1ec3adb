"""The benchmark of the api: it measures a real api between an engine's pace and real clients, and notices when not."""

import math
from pathlib import Path

import pytest

from services.tools.bench_api import address, measure, process
from services.tools.stack import StackError


def test_every_figure_is_measured() -> None:
    rows = {name: value for name, value, _, _ in measure(streams=2, silent=3, tokens=15, rate=100)}
    times = ["api.token_ms_p50", "api.token_ms_p95", "api.straight_ms_p50", "api.token_one_ms_p50"]
    assert list(rows) == ["api.overhead_ms_p50", *times, "api.silent_ratio"]
    assert all(math.isfinite(value) for value in rows.values())
    assert all(rows[name] > 0 for name in times)
    assert rows["api.token_ms_p50"] <= rows["api.token_ms_p95"]
    assert rows["api.overhead_ms_p50"] == rows["api.token_ms_p50"] - rows["api.straight_ms_p50"]


def test_a_refused_stream_is_no_measurement() -> None:
    with pytest.raises(StackError, match="400"):
        measure(streams=1, silent=0, tokens=0, rate=100)


def test_a_process_that_does_not_start_is_told(tmp_path: Path) -> None:
    wrong = {"THIMBLE_API_PORT": "none"}
    with process("services.api", folder=tmp_path, **wrong) as api, pytest.raises(StackError, match="THIMBLE_API_PORT"):
        address(api)
