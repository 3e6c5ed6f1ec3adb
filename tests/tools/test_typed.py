"""Whatever a person types is answered in words: no traceback, the right exit status, and what to do about it.

The whole of the command, subcommand by subcommand: numbers that no option can have, places that cannot be had, output
that nobody takes, addresses that are none. What each subcommand does with what is right is in its own tests.
"""

import argparse
import contextlib
import importlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.tools.bench import BENCHMARKS
from services.tools.cli import SUBCOMMANDS, main
from services.tools.complaints import refused

ROOT = Path(__file__).parents[2]
MODULES = {name: one.module for name, one in SUBCOMMANDS.items()}
MODULES |= {f"bench {name}": module for name, (module, _) in BENCHMARKS.items()}
WORDS = {
    "demo": ["demo", "{place}"],
    "synth": ["synth", "{place}", "--shape", "small"],
    "up": ["up", "--run-dir", "{place}"],
    "repack": ["repack", "{demo}", "{place}"],
    "verify": ["verify", "{place}", "{store}"],
    "spread": ["spread", "{store}", "{place}"],
    "record": ["record", "{store}", "{place}"],
    "plan": ["plan", "--gpu", "rtx5060", "--ram", "32", "--dram", "60", "--disk", "7", "--record", "{place}/x.csv"],
    "doctor": ["doctor", "{place}"],
    "simulate": ["simulate", "{place}"],
    "perplexity": ["perplexity", "{place}", "{place}"],
    "score": ["score", "{place}"],
    "curve": ["train-demo", "curve", "{place}"],
    "teach": ["teach", "{demo}", "{fresh}", "--from", "{place}"],
}


READING = ("verify", "doctor", "simulate", "perplexity", "score", "curve", "teach")  # the others make a folder
PLACES = [(name, place) for name in WORDS for place in ("a file", "a file/below", "/dev/full", "/proc/none")]
PLACES += [(name, "nö such/ plàce\udcff") for name in READING]


def options(module: str) -> Iterator[argparse.Action]:
    parser = argparse.ArgumentParser()
    importlib.import_module(module).add_arguments(parser)
    yield from parser._actions


@pytest.mark.parametrize("name", MODULES)
def test_no_number_is_taken_that_no_option_can_have(name: str) -> None:
    for action in options(MODULES[name]):
        assert action.type not in (int, float), f"{action.dest}: would take -1 or nan; see amounts.py"
        if callable(action.type) and not isinstance(action.type, type):
            for text in ("-1", "nan", "inf", "x", "", "1e99", "9" * 30):
                with pytest.raises(argparse.ArgumentTypeError):
                    action.type(text)


@pytest.fixture
def places(tmp_path: Path, demo_checkpoint: Path, demo_store: object) -> dict[str, str]:
    (tmp_path / "a file").write_text("x")
    store = demo_store.folder  # type: ignore[attr-defined]
    return {"demo": str(demo_checkpoint), "store": str(store), "fresh": str(tmp_path / "new")}


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_place_that_cannot_be_had_is_named(
    name: str, place: str, places: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = str(tmp_path / place)
    if name in ("plan",) and place == "/dev/full":
        where = "/dev/full/below"
    words = [word.format(place=where, **places) for word in WORDS[name]]
    try:
        status: object = main(words)
        said = capfd.readouterr().err
    except SystemExit as ended:
        status, said = 1, f"{ended.code}"
    assert status == 1
    assert place.strip("/").partition("\udcff")[0] in said
    assert f"thimble {words[0]}: " in said
    assert "Errno" not in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "words",
    ["verify", "verify demo", "simulate", "health", "see http://127.0.0.1:9/v1 demo --sets x",
     "score http://127.0.0.1:9/v1", "train-demo prepare run", "fetch a/b/c", "fetch ../x",
     "teach demo new --width 50", "teach demo new --device cuda", "train-demo pretrain run --device cuda",
     "plan --ram 32 --record x.csv", "doctr"],
)  # fmt: skip
def test_a_command_given_wrongly_is_status_2(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words.split()) == 2
    assert capsys.readouterr().err.startswith("thimble")


ADDRESSES = ["nonsense", "http://[::1", "http://127.0.0.1:9", "http://127.0.0.1:99999", "ftp://127.0.0.1", "http://",
             "http://127.0.0.1:x"]  # fmt: skip


ASKING = ["chat hello --url URL", "chat --url URL", "top --once --every 0.01 --engine URL", "health --api URL",
          "health --engine URL", "see --drawings 1 --sets plain URL demo", "fetch a/b new --endpoint URL"]  # fmt: skip
ASKED = [(words, address) for words in ASKING for address in ADDRESSES]
# Of others `score` would think that they are folders.
ASKED += [("score URL demo", address) for address in ADDRESSES if address.startswith("http")]


@pytest.mark.parametrize(("words", "address"), ASKED)
def test_an_address_where_nothing_is_is_told(words: str, address: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(words.replace("URL", address).split()) == 1
    told = capfd.readouterr().err
    assert address.removeprefix("http://") in told
    assert "Traceback" not in told


@pytest.fixture(scope="module")
def no_web_server() -> Iterator[str]:
    """Answers like the engine's gRPC port: in bytes that are no HTTP, and no letters."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(4096)
                        connection.sendall(b"\x00\x00\x18\x04\x00\x1b[31m\x00\x04")
                        connection.shutdown(socket.SHUT_WR)
                        while connection.recv(4096):  # else what was not read would reset it
                            pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize(
    "words",
    ["chat hello --url URL", "top --once --every 0.01 --engine URL", "health --api URL", "score URL/v1 demo",
     "see --drawings 1 --sets plain URL/v1 demo"],
)  # fmt: skip
def test_what_is_no_web_server_is_told_in_letters(
    words: str, no_web_server: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(words.replace("URL", no_web_server).split()) == 1
    told = capfd.readouterr().err
    assert "answers, but is no web server" in told
    assert told.strip().isprintable()


def test_a_full_disk_behind_a_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = tmp_path / "here.csv"
    full.symlink_to("/dev/full")
    assert main(["cards", "--card", "rtx5060", "--record", str(full)]) == 1
    assert f"thimble cards: {full}: No space left on device; free space there" in capsys.readouterr().err


def command(words: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, as its output is what matters; buffered, as in a person's shell."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = f"{sys.executable} -m services.tools.cli {words}"
    return subprocess.run(["bash", "-c", line], env=environ, capture_output=True, text=True, **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("words", ["--help", "settings", "up --help", "doctor", "synth {folder} --shape small"])
def test_output_that_cannot_be_written_is_a_failure_with_a_word(words: str, tmp_path: Path) -> None:
    ended = command(f"{words.format(folder=tmp_path)} >/dev/full")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "No space left on device; free space there" in ended.stderr


IMPORTING = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from services.tools.cli import main
sys.exit(main(["repack", "none", "none"]))
"""


def test_an_interrupt_while_modules_come_along_is_130_too() -> None:
    ended = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "thimble: interrupted\n")


@pytest.mark.parametrize("words", ["--help", "settings", "up --help", "doctor"])
def test_a_reader_that_has_gone_is_not_worth_a_word(words: str) -> None:
    ended = command(f"{words} > >(exec true); wait $!; exit 0")
    assert ended.stderr == ""


@pytest.mark.parametrize("words", ["--help", "settings", "doctor"])
def test_no_output_at_all_is_no_trouble(words: str) -> None:
    assert command(f"{words} >&-").returncode == 0


@pytest.mark.parametrize("environ", ["LC_ALL=C", "PYTHONIOENCODING=ascii", "-i PATH=$PATH", "COLUMNS=1"])
def test_what_a_terminal_cannot_show_does_not_end_a_command(environ: str, tmp_path: Path) -> None:
    line = f"env {environ} {sys.executable} -m services.tools.cli synth $'{tmp_path}/ключ und\\xff' --shape small"
    ended = subprocess.run(["bash", "-c", line], capture_output=True, text=True, errors="replace")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "ключ und\udcff" / "manifest.json").exists()


def test_the_system_s_refusals_say_what_to_do() -> None:
    assert refused(FileNotFoundError(2, "No such file or directory", "x")).startswith("x: No such file or directory; ")
    assert refused(OSError(28, "No space left on device"), "there") == (
        "there: No space left on device; free space there, or give another place"
    )
    assert refused(OSError("odd")) == "odd"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tests/vision/fuzz_decoder.py", "arguments are required: minutes"),
        ("tests/vision/fuzz_decoder.py x", "invalid float value: 'x'"),
        ("tests/vision/invoice.py http://127.0.0.1:9/v1 demo-doc --invoices 1", "http://127.0.0.1:9/v1: no answer: "),
        ("tests/vision/invoice.py nonsense demo-doc --invoices 1", "nonsense: no answer: "),
    ],
)
def test_the_readme_s_scripts_say_what_is_wrong(words: str, said: str) -> None:
    """By their own folders, as the README calls them."""
    ended = subprocess.run([sys.executable, *words.split()], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode in (1, 2)
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
