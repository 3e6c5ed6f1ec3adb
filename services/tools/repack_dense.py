"""The dense file of a store: every tensor of the language model but the routed experts, checked as it is copied.

Tensors keep the checkpoint's own formats and bytes. `fp8` is the exception that its owner asks for: floats of the large
linears are rounded to FP8, so that a checkpoint that left them in BF16 fits a smaller card. Attention stays as it is.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

import kernels.fp8.reference as fp8
from services.engine.checkpoint import Checkpoint
from services.engine.experts.store import DenseFile
from services.engine.tensorfile import DTYPES, Entry, header_bytes, tensor_bytes, write_file
from services.engine.weights import FLOATS, check_scale, check_values

Dense = Literal["as-is", "fp8"]
ROUNDED = (".in_proj", ".out_proj", "_latent_proj", ".shared_experts.up_proj", ".shared_experts.down_proj", "lm_head")
_PIECE_ROWS = 4096


def names(source: Checkpoint) -> list[str]:
    return [name for name in source.tensors if ".mixer.experts." not in name]


def rounded(source: Checkpoint) -> list[str]:
    """The linears that `fp8` changes, by name without `.weight`."""
    return [name for name, form in source.formats.items() if form in FLOATS and name.endswith(ROUNDED)]


def write(source: Checkpoint, path: Path, dense: Dense) -> DenseFile:
    """Raises CheckpointError that names a tensor with a value that is not finite or a scale that is not positive."""
    entries = {name: source.tensors[name] for name in names(source)}
    for name, entry in entries.items():
        if name.endswith(("_scale", "_scale_2")):
            check_scale(name, entry.read())
    layout = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    scales: dict[str, Tensor] = {}
    for linear in rounded(source) if dense == "fp8" else ():
        scales[f"{linear}.weight"] = _scale(entries[f"{linear}.weight"])
        layout[f"{linear}.weight"] = ("F8_E4M3", entries[f"{linear}.weight"].shape)
        layout[f"{linear}.weight_scale"] = ("F32", ())
    start, order = header_bytes(layout)

    def pieces() -> Iterator[bytes]:
        yield start
        for name in order:
            if name in scales:
                for rows in _rows(entries[name]):
                    yield tensor_bytes(fp8.encode(rows, scales[name]).view(torch.uint8))
            elif name not in entries:
                yield tensor_bytes(scales[name.removesuffix("_scale")])
            else:
                yield from _checked(name, entries[name])

    size, digest = write_file(path, pieces())
    return DenseFile(size, int(digest, 16))


def write_draft(source: Checkpoint, path: Path) -> DenseFile:
    """The multi-token-prediction block's tensors but its routed experts', as they are. Raises CheckpointError."""
    entries = {name: entry for name, entry in source.mtp.items() if ".mixer.experts." not in name}
    for name, entry in entries.items():
        if name.endswith(("_scale", "_scale_2")):
            check_scale(name, entry.read())
    start, order = header_bytes({name: (entry.dtype, entry.shape) for name, entry in entries.items()})
    size, digest = write_file(path, chain([start], *(_checked(name, entries[name]) for name in order)))
    return DenseFile(size, int(digest, 16))


def _checked(name: str, entry: Entry) -> Iterator[bytes]:
    for chunk in entry.chunks():
        if entry.dtype in (*FLOATS, "F8_E4M3"):
            check_values(name, torch.frombuffer(bytearray(chunk), dtype=DTYPES[entry.dtype]))
        yield chunk


def _scale(entry: Entry) -> Tensor:
    """The largest weight becomes the largest FP8 value, as the published FP8 linears are scaled."""
    largest = torch.tensor(0.0)
    for rows in _rows(entry):
        check_values(entry.name, rows)
        largest = torch.maximum(largest, rows.abs().amax())
    return largest / fp8.E4M3_MAX if largest > 0 else torch.tensor(1.0)


def _rows(entry: Entry) -> Iterator[Tensor]:
    """float32, some rows at a time: lm_head in float32 is larger than all that repacking may take."""
    for rows in entry.read().split(_PIECE_ROWS):  # type: ignore[no-untyped-call]
        yield rows.to(torch.float32)
