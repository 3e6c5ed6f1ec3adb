"""Damaged and forged files by the thousand, to everything that opens a file of others: headers, indices, configs,
manifests, tokenizers. Each must be read or refused by the reader's own error, in time and in little memory.

    python tests/drills/hostile_files.py --minutes 10 --seed 1
"""

import argparse
import copy
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.api.errors import ModelFolderError
from services.api.model_folder import load_model_folder
from services.engine.checkpoint import INDEX, SINGLE, Checkpoint
from services.engine.errors import CheckpointError, StoreError, UnsupportedError
from services.engine.experts.store import Store
from services.engine.grammar import Grammars
from services.engine.model_config import read_config
from services.engine.request import Form, Grammar
from services.engine.tensorfile import read_header
from services.engine.vision.config import read_vision_config
from services.tools import figures, small_checkpoint
from services.tools.repack import repack
from services.tools.texts import TextError, Texts

PREPROCESSOR = "preprocessor_config.json"
DEMO = Path(__file__).parents[2] / "demo"
MOST_S = 10.0  # of processor time for one file; all of these take milliseconds
MOST_GROWTH_BYTES = 1_500_000_000
DEEP = "\0deep\0"  # where JSON is to be nested deeper than any parser goes
NASTY: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, 1e308, float("nan"), float("inf"), "",
    "x", "../../etc/passwd", "/etc/passwd", "a\0b", "x" * 20_000, "\ud800", "NaN", "1", [], {}, [[]], [0] * 5000,
    {"": {}}, DEEP,
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A folder that is whole, the file in it to be damaged, and who reads it."""

    folder: Path
    file: str
    read: Callable[[Path], object]
    refusal: type[Exception]


@dataclass
class Report:
    cases: Counter[str] = field(default_factory=Counter)
    read: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    findings: Counter[str] = field(default_factory=Counter)
    examples: dict[str, bytes] = field(default_factory=dict)

    def __str__(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in self.cases.items())
        return (
            f"{sum(self.cases.values())} files ({each}): {self.read} read, {self.refused} refused, slowest "
            f"{self.slowest_s:.2f} s, findings {len(self.findings)}"
        )


def targets(folder: Path) -> dict[str, Target]:
    """Made anew in `folder`, which is empty."""
    plain = small_checkpoint.write(folder / "plain")
    shards = small_checkpoint.write(folder / "shards", "3.5-super-vl")
    store = repack(plain, folder / "store", say=lambda text: None).folder
    model = folder / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO / name, model)

    told = {"min_num_patches": 9, "max_num_patches": 64, "norm_mean": [0.5, 0.5, 0.5], "norm_std": [0.2, 0.2, 0.2]}
    (shards / PREPROCESSOR).write_text(json.dumps(told))
    seeing = repack(shards, folder / "seeing", say=lambda text: None).folder

    def opened(path: Path) -> object:
        return Store.open(path).dense()

    def seen(path: Path) -> object:
        shapes = {name: tensor.shape for name, tensor in Checkpoint.open(path).vision.items()}
        return read_vision_config(path, read_config(path), shapes)

    def followed(path: Path) -> object:
        grammars = Grammars(path / "tokenizer.json", 4096, 1000, 20.0)
        try:
            return grammars.matcher(Grammar(Form.REGEX, "[a-z]+"), {11})
        finally:
            grammars.close()

    return {
        "header": Target(plain, SINGLE, lambda path: read_header(path / SINGLE), CheckpointError),
        "checkpoint": Target(plain, SINGLE, Checkpoint.open, CheckpointError),
        "index": Target(shards, INDEX, Checkpoint.open, CheckpointError),
        "config": Target(shards, "config.json", Checkpoint.open, CheckpointError),
        "vision config": Target(shards, "config.json", seen, CheckpointError),
        "preprocessor": Target(shards, PREPROCESSOR, seen, CheckpointError),
        "seeing manifest": Target(seeing, "manifest.json", Store.open, StoreError),
        "manifest": Target(store, "manifest.json", opened, StoreError),
        "dense": Target(store, "dense.safetensors", opened, StoreError),
        "tokenizer": Target(model, "tokenizer.json", load_model_folder, ModelFolderError),
        "tokenizer of tools": Target(model, "tokenizer.json", lambda path: Texts(path, 64), TextError),
        "tokenizer of grammars": Target(model, "tokenizer.json", followed, UnsupportedError),
        "tokenizer config": Target(model, "tokenizer_config.json", load_model_folder, ModelFolderError),
        "defaults": Target(model, "generation_config.json", load_model_folder, ModelFolderError),
    }


def damaged(choose: random.Random, whole: bytes) -> bytes:
    """Of JSON its values, of safetensors those of the header, of both now and then the bytes."""
    if choose.random() < 0.15:
        return bytes_damaged(choose, whole)
    if whole[:1] in b"{[":
        return json_damaged(choose, whole)
    length = int.from_bytes(whole[:8], "little")
    header = json_damaged(choose, whole[8 : 8 + length])
    said = len(header)
    if choose.random() < 0.1:
        said = choose.choice((0, 1, 2**31, 2**63, 2**64 - 1, len(header) + 1, len(whole) * 2))
    return said.to_bytes(8, "little") + header + whole[8 + length :]


def bytes_damaged(choose: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    for _ in range(choose.choice((1, 1, 3, 20))):
        at = choose.randrange(min(len(data), choose.choice((16, 400, len(data)))))
        match choose.randrange(4):
            case 0:
                data[at] ^= 1 << choose.randrange(8)
            case 1:
                data[at] = choose.randrange(256)
            case 2:
                del data[at : at + choose.randrange(1, 40)]
            case _:
                data[at:at] = choose.randbytes(choose.randrange(1, 40))
        data = data or bytearray(b"{")
    return bytes(data[: choose.randrange(len(data))] if choose.random() < 0.1 else data)


def json_damaged(choose: random.Random, text: bytes) -> bytes:
    value = json.loads(text)
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        places = list(_places(choose, value))
        if not places:
            break
        holder, key = choose.choice(places)
        match choose.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[choose.choice(("__class__", "../x", "", "new", "lm_head.weight"))] = copy.deepcopy(holder[key])
            case _:
                holder[key] = copy.deepcopy(choose.choice(NASTY))
    deep = "[" * 50_000 + "]" * 50_000
    return json.dumps(value).replace(json.dumps(DEEP), deep).encode()


def _places(choose: random.Random, value: Any) -> Any:
    """Some way down from the top: every holder on it with its keys."""
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = choose.choice(list(keys))
        yield value, key
        value = value[key]


def fuzz(folder: Path, seconds: float, seed: int, least: int = 0) -> Report:
    """For so long, and `least` files at least."""
    report, choose = Report(), random.Random(seed)
    found = targets(folder)
    wholes = {name: (target.folder / target.file).read_bytes() for name, target in found.items()}
    until = time.monotonic() + seconds
    while time.monotonic() < until or sum(report.cases.values()) < least:
        name = choose.choice(list(found))
        attempt(report, name, found[name], damaged(choose, wholes[name]))
        (found[name].folder / found[name].file).write_bytes(wholes[name])
    return report


def attempt(report: Report, name: str, target: Target, data: bytes) -> None:
    (target.folder / target.file).write_bytes(data)
    peak = peak_bytes()
    began = time.process_time()
    trouble = ""
    try:
        target.read(target.folder)
        report.read += 1
    except target.refusal as error:
        report.refused += 1
        trouble = "" if str(error).strip() else "refused without a word"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        trouble = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}"
    took = time.process_time() - began
    report.slowest_s = max(report.slowest_s, took)
    report.cases[name] += 1
    if took > MOST_S:
        trouble = trouble or "slow"
    if peak_bytes() - peak > MOST_GROWTH_BYTES:
        trouble = trouble or "much memory"
    if trouble:
        report.findings[f"{name}: {trouble}"] += 1
        report.examples.setdefault(f"{name}: {trouble}", data)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        report = fuzz(Path(name), 60 * args.minutes, args.seed)
    print(f"seed {args.seed}: {report}")
    folder = Path(tempfile.mkdtemp(prefix="thimble-hostile-")) if report.findings else Path()
    for number, (trouble, count) in enumerate(report.findings.most_common()):
        (folder / str(number)).write_bytes(report.examples[trouble])
        print(f"  {count} times {trouble}: {folder / str(number)}")
    if args.out:
        note = f"{args.minutes:g} minutes, seed {args.seed}; {report}"
        figures.append(args.out, "hostile.files_findings", len(report.findings), "kinds", note)
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
