"""One routed expert from a checkpoint's tensors to a block of a store. Owns the bytes' way, not their place.

Nothing changes a value but for the multi-token-prediction block, which is published in BF16: its experts are rounded to
NVFP4, as blocks are. It drafts, so that an answer is the same with any weights of it.
"""

import mmap
import os
import threading
from collections.abc import Mapping
from typing import IO

import numpy as np
import torch
import xxhash

import kernels.nvfp4.reference as nvfp4
from kernels.block import GROUP, BlockLayout, Bytes
from services.engine.errors import CheckpointError
from services.engine.experts.store import Block
from services.engine.tensorfile import Entry
from services.engine.weights import DRAFT_MOE, FLOATS, Format, check_scale, check_values, linear_parts


class Room(threading.local):
    """What a thread packs in, used again for each expert. Mapped, as O_DIRECT writes from whole pages only."""

    def __init__(self, shape: BlockLayout) -> None:
        self.shape = shape
        self.block: Bytes = np.frombuffer(mmap.mmap(-1, shape.block_bytes), np.uint8)  # its padding stays zero
        self.down_weight = np.empty((shape.latent, shape.width // 2), np.uint8)
        self.down_scale = np.empty((shape.latent, shape.width // GROUP), np.uint8)


def pack_expert(
    name: str, entries: Mapping[str, Entry], formats: Mapping[str, Format], offset: int, room: Room, file: IO[bytes]
) -> Block:
    """Read, pack and write one expert. The kernel lets other threads go on in all four steps."""
    shape = room.shape
    values, scales = shape.up(room.block)
    rounds = name.startswith(DRAFT_MOE) and formats[f"{name}.up_proj"] in FLOATS
    read = _round_to_nvfp4 if rounds else _read_nvfp4
    up = read(entries, formats, f"{name}.up_proj", values, scales)
    down = read(entries, formats, f"{name}.down_proj", room.down_weight, room.down_scale)
    shape.place_down(room.block, room.down_weight, room.down_scale)
    block = Block(offset, xxhash.xxh64_intdigest(room.block.data), up, down)
    written = 0
    while written < shape.block_bytes:
        written += os.pwrite(file.fileno(), room.block[written:].data, offset + written)
    return block


def _round_to_nvfp4(
    entries: Mapping[str, Entry], formats: Mapping[str, Format], name: str, weight: Bytes, scale: Bytes
) -> float:
    """As `_read_nvfp4`, of a linear in floats."""
    if formats[name] not in FLOATS:
        return _read_nvfp4(entries, formats, name, weight, scale)
    values = entries[f"{name}.weight"].read()
    check_values(f"{name}.weight", values)
    codes, scales, scale_2 = nvfp4.quantise(values.float(), "max")
    weight[:] = codes.numpy()
    scale[:] = scales.view(torch.uint8).numpy()
    return float(scale_2)


def _read_nvfp4(
    entries: Mapping[str, Entry], formats: Mapping[str, Format], name: str, weight: Bytes, scale: Bytes
) -> float:
    """Read a linear into `weight` and `scale`; its scale of scales. Every scale is checked."""
    form = formats[name]
    if form not in ("NVFP4", "W4A16_NVFP4"):
        raise CheckpointError(
            f"tensor {name}.weight: expected NVFP4 (U8), found {form}; routed experts must be NVFP4: use an NVFP4 "
            f"checkpoint, or thimble quantize first"
        )
    entries[f"{name}.weight"].read_into(weight.data)
    entries[f"{name}.weight_scale"].read_into(scale.data)
    check_scale(f"{name}.weight_scale", torch.from_numpy(scale).view(torch.float8_e4m3fn))
    _, _, *scalars = linear_parts(name, form, ())
    read = {part: entries[part].read() for part in scalars}
    for part, scalar in read.items():
        check_scale(part, scalar)
    return float(read[f"{name}.weight_scale_2"])
