"""A short run of the files' fuzzer, what it found once, and that it would find the like again."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import hostile_files
import pytest
from hostile_files import Report, Target, attempt, bytes_damaged, damaged, fuzz, json_damaged

from services.api.errors import ModelFolderError
from services.api.model_folder import load_model_folder
from services.engine.checkpoint import INDEX, SINGLE, Checkpoint
from services.engine.errors import CheckpointError, StoreError
from services.engine.experts.store import Store
from services.engine.tensorfile import read_header

DEEP = b"[" * 50_000 + b"]" * 50_000


def test_damaged_files_are_read_or_refused(tmp_path: Path) -> None:
    report = fuzz(tmp_path, 3, seed=1, least=40)
    assert report.findings == {}
    assert report.read > 3 < report.refused


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    return hostile_files.targets(tmp_path_factory.mktemp("whole"))


ENTRY = '{"x":{"dtype":"U8","shape":%s,"data_offsets":%s}}'
HEADERS = {
    "length beyond the file": (2**40).to_bytes(8, "little"),
    "length of 2**64-1": b"\xff" * 8,
    "a dimension of 2**62": ENTRY % ("[4611686018427387904]", "[0,4611686018427387904]"),
    "dimensions whose product is small": ENTRY % ("[4611686018427387904,0]", "[0,1]"),
    "a million dimensions": ENTRY % ("[" + ",".join(["9999999999"] * 1_000_000) + "]", "[0,1]"),
    "negative dimensions": ENTRY % ("[-2,-2]", "[0,4]"),
    "negative offsets": ENTRY % ("[4]", "[-4,0]"),
    "offsets backwards": ENTRY % ("[4]", "[4,0]"),
    "a fraction": ENTRY % ("[4]", "[0.0,4.0]"),
    "true": ENTRY % ("[true]", "[0,1]"),
    "text": ENTRY % ('["4"]', "[0,4]"),
    "deep": DEEP,
    "no object": b"[]" * 20,
    "NaN": ENTRY % ("[NaN]", "[0,4]"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_lie_are_refused_at_once(tmp_path: Path, name: str) -> None:
    content = HEADERS[name]
    data = content.encode() if isinstance(content, str) else content
    framed = data if name.startswith("length") else len(data).to_bytes(8, "little") + data
    (tmp_path / SINGLE).write_bytes(framed + bytes(16))
    report = Report()
    attempt(report, name, Target(tmp_path, SINGLE, lambda path: read_header(path / SINGLE), CheckpointError), framed)
    assert report.findings == {}
    assert report.refused == 1
    assert report.slowest_s < 5


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\0b", "x" * 5000])
def test_an_index_cannot_lead_out_of_its_folder(whole: dict[str, Target], path: str) -> None:
    target = whole["index"]
    before = (target.folder / INDEX).read_bytes()
    content = json.loads(before)
    content["weight_map"][next(iter(content["weight_map"]))] = path
    try:
        (target.folder / INDEX).write_text(json.dumps(content))
        with pytest.raises(CheckpointError):
            Checkpoint.open(target.folder)
    finally:
        (target.folder / INDEX).write_bytes(before)


FOUND = {
    "config": (b'{"architectures": ["NemotronHForCausalLM"], "a": ' + DEEP + b"}", "nested too deeply"),
    "index": (b'{"weight_map": ' + DEEP + b"}", "nested too deeply"),
    "vision config": (b'{"architectures": ["NemotronHForCausalLM"], "a": ' + DEEP + b"}", "nested too deeply"),
    "preprocessor": (DEEP, "nested too deeply"),
    "manifest": (DEEP, "nested too deeply"),
    "tokenizer config": (DEEP, "recursion"),
    "defaults": (DEEP, "recursion"),
    "tokenizer": (b'{"added_tokens": [], "decoder": {"type": "ByteLevel"}, "model": {"vocab": {}}}', "cannot be used"),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_refused_in_words(whole: dict[str, Target], name: str) -> None:
    data, message = FOUND[name]
    target = whole[name]
    before = (target.folder / target.file).read_bytes()
    try:
        (target.folder / target.file).write_bytes(data)
        with pytest.raises((CheckpointError, StoreError, ModelFolderError), match=message):
            target.read(target.folder)
    finally:
        (target.folder / target.file).write_bytes(before)
    assert target.read(target.folder) is not None


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("preprocessor", {"norm_std": [0.5, 10**400, 0.5]}, "expected three numbers"),
        ("vision config", {"vision_config": "x"}, "vision_config is 'x', expected an object"),
        ("vision config", {"vision_config": {"args": [1]}}, r"args is '\[1\]', expected an object"),
        ("vision config", {"patch_size": "16"}, "patch_size is '16'"),
    ],
)
def test_what_was_found_in_a_vision_side(
    whole: dict[str, Target], file: str, values: dict[str, object], message: str
) -> None:
    target = whole[file]
    path = target.folder / target.file
    before = path.read_bytes()
    try:
        path.write_text(json.dumps(json.loads(before) | {"vision_config": {}} | values))
        with pytest.raises(CheckpointError, match=message):
            target.read(target.folder)
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", ["config", "vision config", "manifest", "seeing manifest", "defaults", "preprocessor"])
def test_every_number_may_be_any(whole: dict[str, Target], name: str) -> None:
    """One after the other is beyond 32 bits, and beyond any float: nothing is made in that number."""
    target, report = whole[name], Report()
    path = target.folder / target.file
    before = path.read_text()
    try:
        for place in numbers(json.loads(before)):
            for number in (2**31, 10**400):
                content = holder = json.loads(before)
                for key in place[:-1]:
                    holder = holder[key]
                holder[place[-1]] = number
                attempt(report, ".".join(map(str, place)), target, json.dumps(content).encode())
    finally:
        path.write_text(before)
    assert report.findings == {}
    assert report.refused > 0


def test_a_panic_of_the_tokenizer_s_library_is_refused(whole: dict[str, Target]) -> None:
    target = whole["tokenizer"]
    path = target.folder / target.file
    before = path.read_text()
    content = json.loads(before)
    content["model"]["continuing_subword_prefix"] = "../../etc/passwd"
    try:
        path.write_text(json.dumps(content))
        with pytest.raises(ModelFolderError, match="only byte-level BPE"):
            target.read(target.folder)
    finally:
        path.write_text(before)


def numbers(value: object, place: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where they are; of a list only in its first two."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(2, len(value))):
            yield from numbers(value[key], (*place, key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield place


def test_a_fault_of_a_reader_would_be_found(tmp_path: Path) -> None:
    def careless(path: Path) -> object:
        return {}[(path / "file").read_text()]

    def wordless(path: Path) -> object:
        raise StoreError("")

    for read in (careless, wordless):
        report = Report()
        attempt(report, "x", Target(tmp_path, "file", read, StoreError), b"data")
        assert len(report.findings) == 1


def test_damage_differs_and_repeats_by_its_seed(whole: dict[str, Target]) -> None:
    data = (whole["manifest"].folder / "manifest.json").read_bytes()
    header = (whole["header"].folder / SINGLE).read_bytes()
    for damage in (damaged, json_damaged, bytes_damaged):
        one, other = ([damage(random.Random(seed), data) for seed in range(10)] for _ in range(2))
        assert one == other
        assert len(set(one)) > 5
    assert len({damaged(random.Random(seed), header)[:200] for seed in range(20)}) > 10
    assert Store.open(whole["manifest"].folder).blocks
    assert load_model_folder(whole["defaults"].folder).tokenizer


def test_one_damage_does_not_spoil_the_next() -> None:
    before = repr(hostile_files.NASTY)
    for seed in range(500):
        json_damaged(random.Random(seed), b'{"a": [1, {"b": [3]}], "c": {"d": {"e": []}}}')
    assert repr(hostile_files.NASTY) == before
