"""Blocks of a store on further disks: folders that `thimble spread` wrote. Owns their two files.

    drive.json    which store it is of, and which part of its blocks: those whose number modulo `of` is `part`
    experts.bin   these blocks, one after the other

The store itself stays whole, and its manifest is the only one; a block that is on several disks is read from the one
that is less busy.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kernels.experts.host.binding import Copy
from services.engine.errors import StoreError
from services.engine.experts.store import EXPERTS, Store
from services.engine.parsing import parse_json

DRIVE = "drive.json"
SEPARATOR = ":"


def copies(store: Store, folders: Sequence[Path]) -> tuple[Copy, ...]:
    """Raises StoreError, which names the folder and says what to do."""
    return tuple(_copy(store, folder) for folder in folders)


def folders_of(text: str) -> tuple[Path, ...]:
    """Of the setting: folders separated by colons."""
    return tuple(Path(part) for part in text.split(SEPARATOR) if part.strip())


def describe(store: Store, part: int, of: int) -> bytes:
    """The content of drive.json."""
    return json.dumps(
        {"format": "thimble-drive", "version": 1, "fingerprint": store.fingerprint, "part": part, "of": of}
    ).encode()


def numbers(store: Store, part: int, of: int) -> range:
    """The blocks of a part, numbered layer by layer."""
    return range(part, sum(map(len, store.blocks)), of)


def _copy(store: Store, folder: Path) -> Copy:
    again = f"make it with `thimble spread {store.folder} {folder}`"
    try:
        said = parse_json((folder / DRIVE).read_text())
        part, of = int(said["part"]), int(said["of"])
        size_bytes = (folder / EXPERTS).stat().st_size
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{folder}: holds no copies of a store's blocks ({error}); {again}") from error
    if not 0 <= part < of or json.dumps(said).encode() != describe(store, part, of):
        raise StoreError(f"{folder}: its blocks are of another store than {store.folder}; {again}")
    held = numbers(store, part, of)
    if size_bytes != len(held) * store.layout.block_bytes:
        raise StoreError(f"{folder / EXPERTS}: truncated or replaced, {size_bytes} bytes; {again}")
    offsets: npt.NDArray[np.int64] = np.full((len(store.blocks), len(store.blocks[0])), -1, np.int64)
    offsets.flat[held.start :: of] = np.arange(len(held), dtype=np.int64) * store.layout.block_bytes
    return Copy(folder / EXPERTS, offsets)
