"""The command's own part: finding subcommands, usage, exit statuses."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from services.engine.errors import DiskError
from services.tools import cli


def fake(run: object) -> SimpleNamespace:
    return SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--x"), run=run)


@pytest.fixture
def subcommand(monkeypatch: pytest.MonkeyPatch):
    def install(run: object) -> None:
        monkeypatch.setitem(cli.SUBCOMMANDS, "fake", cli.Subcommand("fake_module", "for the test"))
        monkeypatch.setitem(sys.modules, "fake_module", fake(run))

    return install


def test_arguments_reach_the_subcommand_and_its_status_comes_back(subcommand) -> None:
    subcommand(lambda args: int(args.x))
    assert cli.main(["fake", "--x", "7"]) == 7


def test_a_named_error_is_a_sentence(subcommand, capsys: pytest.CaptureFixture[str]) -> None:
    def run(args: object) -> int:
        raise DiskError("/x: full")

    subcommand(run)
    assert cli.main(["fake"]) == 1
    assert capsys.readouterr().err == "thimble fake: /x: full\n"


def test_a_bug_keeps_its_traceback(subcommand) -> None:
    def run(args: object) -> int:
        raise ZeroDivisionError

    subcommand(run)
    with pytest.raises(ZeroDivisionError):
        cli.main(["fake"])


def test_an_interrupt_is_130(subcommand) -> None:
    def run(args: object) -> int:
        raise KeyboardInterrupt

    subcommand(run)
    assert cli.main(["fake"]) == 130


@pytest.mark.parametrize(("words", "status"), [([], 2), (["--help"], 0), (["nonsense"], 2)])
def test_usage_lists_every_subcommand(words: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == status
    shown = "".join(capsys.readouterr())
    assert all(f"  {name} " in shown for name in cli.SUBCOMMANDS)


@pytest.mark.parametrize("name", cli.SUBCOMMANDS)
def test_every_subcommand_is_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(cli.SUBCOMMANDS[name].module)
    assert callable(module.run)
    with pytest.raises(SystemExit) as exit_:
        cli.main([name, "--help"])
    assert exit_.value.code == 0
    assert f"thimble {name}" in capsys.readouterr().out


def test_the_dispatcher_does_not_wait_for_torch() -> None:
    code = "import sys, services.tools.cli as c; c.main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
