"""The report: what its parts print is in it, and nothing that says whose machine it is."""

import argparse
import getpass
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from services.engine.experts.store import Store
from services.tools import report
from services.tools.cli import main
from services.tools.ram_ledger import RamWanted
from services.tools.report import Part

PRIVATE = (
    ("/home/ada/models/super: not found", "(path): not found"),
    ('File "/srv/x/y.py", line 3', 'File "(path)", line 3'),
    ("see ~/models or ./models/a", "see (path) or (path)"),
    ("listening on 192.168.1.17:8000", "listening on (address):8000"),
    ("mail ada@example.org", "mail (address)"),
    ("link 00:1a:2B:3c:4d:5e up", "link (address) up"),
    ("host tower of ada", "host (name) of (name)"),
    ("store=/mnt/c/Users/ada", "store=(path)"),
)
PUBLIC = (
    "3.25 GB/s at 16 reads, 1/2 of them; 47 us and/or more",
    "driver 580.95.05, torch 2.13.0, 2026-11-29",
    "experts on the processor: adapted",
    "12.5 ms/token",
)


@pytest.mark.parametrize(("text", "scrubbed"), PRIVATE)
def test_private_words_go(text: str, scrubbed: str) -> None:
    assert report.scrub(text, ["tower", "ada"]) == scrubbed


@pytest.mark.parametrize("text", PUBLIC)
def test_public_words_stay(text: str) -> None:
    assert report.scrub(text, ["tower", "ada"]) == text


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    return parser.parse_args(words)


def test_what_cannot_run_is_said(tmp_path: Path) -> None:
    found = {part.title: part.missing for part in report.parts(arguments(), tmp_path / "x.csv")}
    assert found["verify"] == "no --store was given"
    assert found["disk"] == ""
    given = {part.title: part for part in report.parts(arguments("--store", "S", "--checkpoint", "C"), tmp_path)}
    assert given["verify"].words == ("verify", "C", "S")
    assert given["verify"].missing == ""


def test_with_experts_missing(demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in RAM as a machine of this size would keep there, from the store's own drive."""
    monkeypatch.setattr(report, "_has_card", lambda: True)
    args = arguments("--store", str(demo_store.folder))
    [part] = [part for part in report.parts(args, tmp_path / "x.csv") if part.title == "decode with experts missing"]
    assert part.words[:4] == ("bench", "decode-disk", str(demo_store.folder), "--own")
    assert part.words[5] == "1.000", "a small model is there as a whole"
    monkeypatch.setattr(report, "RamWanted", lambda **_: RamWanted(desktop_gb=1e6))
    [part] = [part for part in report.parts(args, tmp_path / "x.csv") if part.title == "decode with experts missing"]
    assert part.missing == "there is not enough RAM"


def test_what_cannot_be_written_or_read_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: object) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(report, "output", measured)
    for words, said in (
        (("--out", str(tmp_path / "none" / "x.txt")), "cannot be written: No such file"),
        (("--out", str(tmp_path)), "cannot be written: Is a directory"),
        (("--store", str(tmp_path / "none")), "there is no such folder"),
        (("--checkpoint", str(tmp_path / "none")), "there is no such folder"),
    ):
        with pytest.raises(SystemExit, match=said):
            main(["report", *words])


def test_ordinary_words_of_a_path_stay() -> None:
    """Else the names of figures would go with them; a person's word does not stay."""
    words = report.private(arguments("--store", "/mnt/disk/ada-lovelace/store"))
    told = report.scrub("disk.read_gb_s of a store, ada-lovelace, /mnt/disk/ada-lovelace/store", words)
    assert told == "disk.read_gb_s of a store, (name), (path)"


def test_a_part_that_takes_too_long_or_fails() -> None:
    assert report.output(("chat", "--help"), 0.01)[0] == 124
    status, said = report.output(("repack", "/nonexistent", "/nonexistent2"), 60)
    assert status == 1
    assert said.endswith("status 1")


def test_the_file_names_nobody(demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real commands, one of which fails and names a path; as a control, what they print does name it."""
    secret = tmp_path / "adas-secret-folder"
    secret.symlink_to(demo_store.folder)
    words = [("disk", ("bench", "disk", "--store", str(secret))), ("repack", ("repack", f"{secret}/none", f"{secret}"))]
    monkeypatch.setattr(report, "parts", lambda *_: [Part(title, given) for title, given in words])
    printed: list[str] = []

    def output(*args: Any) -> tuple[int, str]:
        status, said = real(*args)
        printed.append(said)
        return status, said

    real = report.output
    monkeypatch.setattr(report, "output", output)
    out = tmp_path / "report.txt"
    assert main(["report", "--store", str(secret), "--out", str(out)]) == 1
    text = out.read_text()
    for title in ("doctor", "disk", "repack"):
        assert f"== {title} ==" in text
    assert "reads in flight are enough" in text
    assert "status 1" in text
    for word in (str(secret), secret.name, str(tmp_path), "/home", "/tmp"):
        assert word not in text, word
    for name in (socket.gethostname(), getpass.getuser()):  # as words: a name like Ed is in many others
        assert len(name) == 1 or not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text), name
    assert secret.name in printed[1]
