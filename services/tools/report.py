"""`thimble report`: one file that says how the product does on a machine, to be shown to others: doctor, verify, and
the expert and decode benchmarks with the published method, with all experts of a token in RAM and with as many as
`thimble plan` would keep there.

Owns what is run and what is left out: the text is scrubbed of paths, names of host and user, and addresses, whatever a
part may have printed. What cannot run here (no card, no store, no checkpoint) is said in its place.
"""

import argparse
import datetime
import getpass
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.engine.experts.store import Store
from services.tools import doctor, figures
from services.tools.amounts import amount
from services.tools.ram_ledger import GB, PlanError, RamWanted, ram_ledger

# In a path they tell nothing of its owner, and the report's own words and figures' names need them.
ORDINARY = frozenset(
    ("card", "checkpoint", "data", "decode", "demo", "disk", "experts", "model", "models", "plan", "store")
)
LIMIT_S = 3600.0
TAIL_LINES = 120


@dataclass(frozen=True)
class Part:
    """A command of ours whose output goes into the report; `missing` says why it is not run, if it is not."""

    title: str
    words: tuple[str, ...]
    missing: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("thimble-report.txt"), help="default thimble-report.txt")
    parser.add_argument("--store", type=Path, help="for verify and the decode benchmark (thimble synth or repack)")
    parser.add_argument("--checkpoint", type=Path, help="what the store was made of, for verify")
    parser.add_argument("--limit-s", type=amount, default=LIMIT_S, help="longest time of a part (default one hour)")


def run(args: argparse.Namespace) -> int:
    for path in (args.store, args.checkpoint):
        if path is not None and not path.is_dir():
            raise SystemExit(f"thimble report: {path}: there is no such folder")
    try:  # now, not after an hour of measuring
        args.out.open("ab").close()
    except OSError as error:
        raise SystemExit(
            f"thimble report: {args.out}: cannot be written: {error.strerror}; give another --out"
        ) from error
    found = doctor.findings(doctor.Machine(folder=folder_of(args)))
    text = [heading(), section("doctor", "\n".join(map(str, found)))]
    failed = left_out = 0
    with tempfile.TemporaryDirectory() as scratch:
        figures_file = Path(scratch) / "report.csv"
        for part in parts(args, figures_file):
            print(f"{part.title} ...", flush=True)
            status, said = (0, f"not run: {part.missing}") if part.missing else output(part.words, args.limit_s)
            failed, left_out = failed + (status != 0), left_out + bool(part.missing)
            text.append(section(part.title, said))
        if figures_file.exists():
            text.append(section("figures", figures_file.read_text()))
    args.out.write_text(scrub("\n".join(text), private(args)), encoding="utf-8")
    print(
        f"{args.out}: written. Look through it before you show it to anyone; {failed} parts failed, {left_out} not run"
    )
    return 1 if failed else 0


def parts(args: argparse.Namespace, figures_file: Path) -> list[Part]:
    card = "" if _has_card() else "there is no CUDA card"
    store = "" if args.store else "no --store was given"
    verify = store or ("" if args.checkpoint else "no --checkpoint was given")
    out = ("--out", str(figures_file))
    disk = ("--store", str(args.store)) if args.store else ("--folder", str(folder_of(args)))
    missing = card or store
    share = f"{_share(args.store):.3f}" if not missing else ""
    return [
        Part("verify", ("verify", str(args.checkpoint), str(args.store)), verify),
        Part("disk", ("bench", "disk", *disk, *out)),
        Part("experts on the processor", ("bench", "experts-cpu")),
        Part("experts on the card and the processor", ("bench", "experts", *out), card),
        Part("decode", ("bench", "decode", str(args.store), "--free-mib", "0", *out), missing),
        Part(
            "decode with experts missing",
            ("bench", "decode-disk", str(args.store), "--own", "--share", share, *out),
            missing or ("" if share != "0.000" else "there is not enough RAM"),
        ),
        Part("plan", ("plan", *(("--store", str(args.store)) if args.store else ())), card),
    ]


def heading() -> str:
    now = datetime.datetime.now(datetime.UTC).date().isoformat()
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    version = importlib.metadata.version("thimble")
    return f"Thimble {version}, commit {figures.commit()}, {now}\n{system}, {_processor()}\n"


def section(title: str, text: str) -> str:
    return f"== {title} ==\n{text.strip()}\n"


def output(words: Sequence[str], limit_s: float) -> tuple[int, str]:
    """What a command of ours prints, at most its last lines, and its status; 124 if it took too long."""
    command = [sys.executable, "-m", "services.tools.cli", *words]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit_s, check=False
        )
        status, said = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        status, said = 124, (error.stdout or b"").decode(errors="replace") + f"\nstopped after {limit_s:.0f} s"
    lines = [line.rpartition("\r")[2] for line in said.splitlines()]
    cut = ["..."] if len(lines) > TAIL_LINES else []
    return status, "\n".join([*cut, *lines[-TAIL_LINES:], *([f"status {status}"] if status else [])])


def private(args: argparse.Namespace) -> list[str]:
    """Words that must not be in the report, beside what looks like a path or an address."""
    words = {socket.gethostname(), platform.node(), getpass.getuser(), Path.home().name, os.environ.get("USER", "")}
    for path in (args.store, args.checkpoint, Path.cwd()):
        if path is not None:  # as it was given, then what is left of it where it was cut
            words |= {str(path), *path.parts} - ORDINARY
    return sorted((word for word in words if len(word) > 1), key=len, reverse=True)


def scrub(text: str, words: Sequence[str]) -> str:
    text = re.sub(r"[\w.+-]+@[\w-]+(\.[\w-]+)+", "(address)", text)
    text = re.sub(r"\b\d{1,3}(\.\d{1,3}){3}\b(?!\.\d)", "(address)", text)
    text = re.sub(r"\b(?:[0-9a-fA-F]{1,2}:){5}[0-9a-fA-F]{1,2}\b", "(address)", text)
    text = re.sub(r"(?<![\w.)/])(?:~|\.{1,2})?/(?:[^\s'\":;,()]+)", "(path)", text)
    for word in words:
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "(name)", text)
    return text


def folder_of(args: argparse.Namespace) -> Path:
    return args.store if args.store else Path()


def _share(folder: Path) -> float:
    """Of the store's experts, as many as there would be in RAM; 0: none."""
    store = Store.open(folder)
    ram_gb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB
    blocks = sum(map(len, store.blocks))
    try:
        ledger = ram_ledger(store.config, blocks, ram_gb, RamWanted(monitoring=False))
    except PlanError:
        return 0.0
    return ledger.cache_gb * GB / (blocks * store.layout.block_bytes)


def _processor() -> str:
    names = re.findall(r"^model name\s*:\s*(.+)$", doctor.Machine().text("/proc/cpuinfo"), re.MULTILINE)
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} threads"


def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()
