"""`thimble spread`: copies of a store's expert blocks on a further disk, so that both are read at once.

A mirror, all blocks, by default: of a block that both hold, each reads a half. `--part 1/2` copies every second block
only, which needs half the room, and does less for a block that is missing alone. The engine is told of the folder by
THIMBLE_ENGINE_COPIES.
"""

import argparse
import os
import shutil
from pathlib import Path

from services.engine.errors import StoreError
from services.engine.experts.copies import DRIVE, describe, numbers
from services.engine.experts.store import EXPERTS, MANIFEST, Store
from services.tools.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that thimble repack wrote; it stays as it is")
    parser.add_argument("folder", type=Path, help="on the other disk; made if it is missing")
    parser.add_argument("--part", type=parse_part, default=(0, 1), metavar="I/N", help="only part I of N (default 1/1)")


def parse_part(text: str) -> tuple[int, int]:
    """`1/2` -> (0, 2)."""
    part, _, of = text.partition("/")
    if not (part.isdigit() and of.isdigit() and 1 <= int(part) <= int(of)):
        raise argparse.ArgumentTypeError(f"{text!r}: give for example 1/2, the first of two parts")
    return int(part) - 1, int(of)


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    spread(store, args.folder, *args.part)
    if args.folder.stat().st_dev == (store.folder / EXPERTS).stat().st_dev:
        print(f"{args.folder} is on the disk of the store itself: nothing is read faster from there")
    print(f"{args.folder}: done; tell the engine with THIMBLE_ENGINE_COPIES={args.folder.resolve()}")
    return 0


def spread(store: Store, folder: Path, part: int, of: int) -> None:
    """Every block is verified on its way. Not there until it is whole. Raises StoreError."""
    if folder.resolve() == store.folder.resolve():
        raise StoreError(f"{folder} is the store itself: give a folder on another disk")
    if (folder / MANIFEST).exists() or (folder / EXPERTS).is_symlink():  # whose blocks would be overwritten
        raise StoreError(f"{folder} holds a store, or a link to its blocks: give a folder of its own for the copies")
    try:
        _copy(store, folder, part, of)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written: {error.strerror or error}; nothing there is used") from error


def _copy(store: Store, folder: Path, part: int, of: int) -> None:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    held = numbers(store, part, of)
    needed, free = len(held) * store.layout.block_bytes, shutil.disk_usage(folder).free
    if needed > free + (_size(folder / EXPERTS)):
        raise StoreError(f"{folder}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free")
    (folder / DRIVE).unlink(missing_ok=True)
    experts = store.config.experts
    progress = Progress("copied", needed)
    with (folder / EXPERTS).open("wb") as file:
        for number in held:
            file.write(store.read_block(number // experts, number % experts).data)
            progress.update(file.tell())
        file.flush()
        os.fsync(file.fileno())
    progress.close()
    (folder / DRIVE).write_bytes(describe(store, part, of))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
