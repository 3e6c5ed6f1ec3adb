"""Repack a checkpoint into the store that the engine reads. Resumes after a kill; changes no value unless told to.

    STORE/experts.bin      grows batch by batch; each batch is on the disk before the journal says so
    STORE/repack.journal   a line for the source, then one for each batch: what the manifest will say of its blocks
    STORE/manifest.json    written last and at once: a folder without it is not a store

The bytes of a store are in services/engine/experts/store.py and kernels/block.py, its dense file is written by
repack_dense.py, an expert's block by repack_expert.py, compared by repack_check.py; this file owns the journey.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO

import xxhash

from services.engine.checkpoint import Checkpoint, weight_files
from services.engine.errors import CheckpointError, DiskError, StoreError
from services.engine.experts import store as layout
from services.engine.experts.store import Block, DraftFile, Store, VisionFile
from services.engine.model_config import read_config
from services.engine.tensorfile import write_file
from services.engine.vision import weights as vision_weights
from services.engine.vision.config import read_vision_config
from services.engine.weights import DRAFT_MOE, FLOATS, Format, expert_name
from services.tools import disk_speed, figures, repack_check, repack_dense
from services.tools.amounts import count
from services.tools.complaints import refused
from services.tools.progress import Progress
from services.tools.repack_dense import Dense
from services.tools.repack_expert import Room, pack_expert

_BATCH_BYTES = 64 << 20
_WAITING = 2  # threads above the cores: so many wait for the disk at any time
_SPARE_BYTES = 64 << 20  # for the manifest, the text files and the file system's own needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and safetensors files")
    parser.add_argument("store", type=Path, help="folder for the store; made if it does not exist")
    parser.add_argument("--replace", action="store_true", help="replace a finished store that is there")
    parser.add_argument(
        "--dense",
        choices=("as-is", "fp8"),
        default="as-is",
        help="fp8: round the large linears that are not quantised to FP8, so that they take half the memory; this "
        "CHANGES THE WEIGHTS (default: as-is)",
    )
    parser.add_argument(
        "--verify",
        type=count,
        default=0,
        metavar="N",
        help="compare N random experts with the checkpoint, byte for byte",
    )
    parser.add_argument(
        "--record", type=Path, metavar="CSV", help="measure a plain copy of the same files too; append repack.over_disk"
    )


def run(args: argparse.Namespace) -> int:
    files = weight_files(args.checkpoint) if args.record else []
    before = _plain_copy(files, args.store)
    disk_speed.forget(files)
    start = time.monotonic()
    store = repack(args.checkpoint, args.store, replace=args.replace, dense=args.dense, say=print)
    seconds = time.monotonic() - start
    size = store.experts_path.stat().st_size + store.dense_file.size_bytes
    size += store.vision_file.size_bytes if store.vision_file else 0
    size += store.draft_file.file.size_bytes if store.draft_file else 0
    print(f"{args.store}: {size / 1e9:.2f} GB, model {store.fingerprint}, {seconds:.1f} s")
    if args.verify:
        compared = repack_check.check(args.checkpoint, args.store, args.verify)
        print(f"{args.store}: {compared} random experts are the checkpoint's, byte for byte")
    if args.record:
        # Before and after, as what else the machine does comes and goes.
        plain = (before + _plain_copy(files, args.store)) / 2
        ours = sum(path.stat().st_size for path in files) / seconds
        print(f"repacked at {ours / 1e6:.0f} MB/s, a plain copy of the same files runs at {plain / 1e6:.0f} MB/s")
        busy = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        note = f"{args.checkpoint.resolve().name}, {size / 1e9:.2f} GB, copy {plain / 1e6:.0f} MB/s, {busy}"
        figures.append(args.record, "repack.over_disk", ours / plain, "", note)
    return 0


def _plain_copy(files: list[Path], folder: Path) -> float:
    """Bytes a second of a plain copy of `files` into `folder`; 0 without files. Raises DiskError."""
    if not files:
        return 0.0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return disk_speed.copy_rate(files, folder / "copy.part")
    except OSError as error:
        raise DiskError(refused(error, folder)) from error


def repack(
    checkpoint: Path, folder: Path, *, replace: bool = False, dense: Dense = "as-is", say: Callable[[str], None]
) -> Store:
    """Make (or go on making, or just open) the store of `checkpoint` in `folder`.

    Raises CheckpointError, StoreError or DiskError. `replace` allows a finished store of something else to be replaced.
    """
    source = Checkpoint.open(checkpoint)
    key = _source_key(source, dense)
    if (folder / layout.MANIFEST).exists() and not replace:
        return _finished(folder, key, source, say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / layout.JOURNAL).open("a+b") as journal:
            try:
                fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DiskError(f"{folder}: another thimble repack is writing there; wait for it or stop it") from error
            _make(source, folder, journal, key, dense, say)
            (folder / layout.JOURNAL).unlink()
    except OSError as error:
        raise DiskError(refused(error, folder)) from error
    return Store.open(folder)


def _finished(folder: Path, key: str, source: Checkpoint, say: Callable[[str], None]) -> Store:
    try:
        store = Store.open(folder)
    except StoreError as error:
        raise StoreError(f"{error}; with --replace, as something is there") from error
    if store.source.get("key") != key:
        raise DiskError(
            f"{folder}: holds a finished store of another checkpoint ({store.source.get('folder')!r}), of older "
            f"files, or was made with another --dense; choose another folder, or --replace to make it again"
        )
    if store.draft_file is None and _draft_formats(source, say) is not None:
        say(f"{folder}: lacks the multi-token-prediction block, which answers do without; --replace makes it anew")
    return store


def _make(
    source: Checkpoint, folder: Path, journal: IO[bytes], key: str, dense: Dense, say: Callable[[str], None]
) -> None:
    (folder / layout.MANIFEST).unlink(missing_ok=True)
    experts_path = folder / layout.EXPERTS
    blocks = _read_journal(journal, experts_path, key, source.config.block.block_bytes)
    if blocks:
        say(f"{folder}: going on after {len(blocks)} blocks")
    draft = _draft_formats(source, say)
    _check_space(source, folder, len(blocks), draft is not None)
    if source.sound_tensors:
        say(f"{source.sound_tensors} sound tensors are left out of the store")
    if draft and any(form in FLOATS for name, form in draft.items() if ".experts." in name):
        say("experts of the multi-token-prediction block are rounded to NVFP4: it drafts, answers do not change")
    _write_experts(source, draft, experts_path, journal, blocks)
    if dense == "fp8":
        say(f"--dense fp8 changes the weights: {len(repack_dense.rounded(source))} linears are rounded to FP8")
    dense_file = repack_dense.write(source, folder / layout.DENSE, dense)
    vision_file = _write_vision(source, folder)
    (folder / layout.DRAFT).unlink(missing_ok=True)
    draft_dense = repack_dense.write_draft(source, folder / layout.DRAFT) if draft else None
    absent = [name for name in layout.TEXT_FILES if not (source.folder / name).exists()]
    if absent:
        say(f"note: the checkpoint has no {', '.join(absent)}; the api cannot serve a store without them")
    for name in set(layout.TEXT_FILES) - set(absent):
        shutil.copyfile(source.folder / name, folder / name)
    count = source.config.experts
    by_layer = [blocks[i : i + count] for i in range(0, len(blocks), count)]
    draft_file = DraftFile(draft_dense, tuple(by_layer.pop())) if draft_dense else None
    described = {
        "folder": source.folder.resolve().name,
        "architecture": source.architecture,
        "key": key,
        "dense": dense,
    }
    unfinished = folder / f"{layout.MANIFEST}.part"
    manifest = layout.manifest_bytes(source.config, by_layer, dense_file, described, vision_file, draft_file)
    write_file(unfinished, [manifest])
    os.replace(unfinished, folder / layout.MANIFEST)
    _flush_folder(folder)


def _draft_formats(source: Checkpoint, say: Callable[[str], None]) -> dict[str, Format] | None:
    """Of the multi-token-prediction block's linears; None if there is none that can be computed."""
    if not source.mtp:
        return None
    try:
        return source.draft_formats()
    except CheckpointError as error:
        say(f"{len(source.mtp)} multi-token-prediction tensors are left out of the store: {error}")
        return None


def _write_vision(source: Checkpoint, folder: Path) -> VisionFile | None:
    """The vision side, if the model has one, as it is: pictures are read with the weights that were trained."""
    if not source.vision:
        (folder / layout.VISION).unlink(missing_ok=True)
        return None
    shapes = {name: tensor.shape for name, tensor in source.vision.items()}
    config = read_vision_config(source.folder, read_config(source.folder), shapes)
    return VisionFile(*vision_weights.write(source.vision, folder / layout.VISION), config)


def _source_key(source: Checkpoint, dense: Dense) -> str:
    """Changes when a file of the checkpoint does, or what is done with it; cheap enough for 80 GB."""
    digest = hashlib.sha256(dense.encode() + json.dumps(source.config.to_json(), sort_keys=True).encode())
    if source.vision:
        digest.update(b"with vision")  # stores made before pictures were read are of the same files, but lack it
    for path in weight_files(source.folder):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


def _check_space(source: Checkpoint, folder: Path, blocks_there: int, drafts: bool) -> None:
    config = source.config
    experts = ((len(config.moe_layers) + drafts) * config.experts - blocks_there) * config.block.block_bytes
    dense = sum(source.tensors[name].size_bytes for name in repack_dense.names(source))
    dense += sum(e.size_bytes for name, e in source.mtp.items() if drafts and ".mixer.experts." not in name)
    vision = sum(part.size_bytes for tensor in source.vision.values() for part in tensor.parts)
    needed, free = experts + dense + vision + _SPARE_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise DiskError(
            f"{folder}: {needed / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free; free space or choose another folder"
        )


def _write_experts(
    source: Checkpoint,
    draft: dict[str, Format] | None,
    experts_path: Path,
    journal: IO[bytes],
    blocks: list[Block],
) -> None:
    """Append the blocks that are still missing to the file and to `blocks`, a batch at a time."""
    config, block_bytes = source.config, source.config.block.block_bytes
    layers = [(f"layers.{layer}", source.tensors, source.formats) for layer in config.moe_layers]
    layers += [(DRAFT_MOE, source.mtp, draft)] if draft else []
    total = len(layers) * config.experts
    batch = max(1, _BATCH_BYTES // block_bytes)
    progress = Progress("repack", total * block_bytes, len(blocks) * block_bytes)

    def pack(number: int) -> Block:
        layer, expert = divmod(number, config.experts)
        name, entries, formats = layers[layer]
        return pack_expert(expert_name(name, expert), entries, formats, number * block_bytes, room, file)

    def start(first: int) -> Iterator[Block]:
        return pool.map(pack, range(first, min(total, first + batch)))

    def promise(records: list[Block]) -> None:
        # The order is the promise of the journal: a batch it lists is on the disk.
        os.fdatasync(file.fileno())
        journal.write(json.dumps(list(map(layout.block_record, records)), separators=(",", ":")).encode() + b"\n")
        journal.flush()

    room = Room(config.block)
    with (
        _direct(experts_path) as file,
        ThreadPoolExecutor((os.cpu_count() or 1) + _WAITING) as pool,
        ThreadPoolExecutor(1) as disk,
    ):
        promised: Future[None] | None = None
        # A batch behind the one that is waited for, so that its last blocks leave no thread idle.
        under_way = deque((len(blocks) + i * batch, start(len(blocks) + i * batch)) for i in range(2))
        while len(blocks) < total:
            first, packing = under_way.popleft()
            packed = list(packing)
            under_way.append((first + 2 * batch, start(first + 2 * batch)))
            if promised:
                promised.result()
            promised = disk.submit(promise, packed)
            blocks += packed
            progress.update(len(blocks) * block_bytes)
        if promised:
            promised.result()
    progress.close()


def _direct(path: Path) -> IO[bytes]:
    """A file to be written past the page cache, at whatever offset, where its file system can do that."""
    file = open(path, "r+b" if path.exists() else "xb", buffering=0)  # noqa: SIM115
    with contextlib.suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | getattr(os, "O_DIRECT", 0))
    return file


def _read_journal(journal: IO[bytes], experts_path: Path, key: str, block_bytes: int) -> list[Block]:
    """The blocks that an earlier run finished; none if it was of another source or its files are damaged.

    Leaves the journal and experts.bin cut to just those, ready to be appended to.
    """
    head = json.dumps({"source": key}).encode()
    journal.seek(0)
    lines = journal.read().split(b"\n")[:-1]  # what follows the last newline was being written at the kill
    blocks: list[Block] = []
    try:
        if lines and lines[0] == head and experts_path.exists():
            blocks = [layout.parse_block(record) for line in lines[1:] for record in json.loads(line)]
    except (ValueError, OverflowError, KeyError, TypeError):
        blocks = []
    if blocks and _holds(experts_path, blocks, block_bytes):
        journal.truncate(sum(len(line) + 1 for line in lines))
        os.truncate(experts_path, len(blocks) * block_bytes)
        return blocks
    experts_path.unlink(missing_ok=True)
    journal.truncate(0)
    journal.write(head + b"\n")
    journal.flush()
    return []


def _holds(experts_path: Path, blocks: list[Block], block_bytes: int) -> bool:
    """Whether the file is long enough and its last listed block is what the journal says."""
    if experts_path.stat().st_size < len(blocks) * block_bytes:
        return False
    with experts_path.open("rb") as file:
        file.seek((len(blocks) - 1) * block_bytes)
        return xxhash.xxh64_intdigest(file.read(block_bytes)) == blocks[-1].xxh64


def _flush_folder(folder: Path) -> None:
    """Renames are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
