"""The vision tensors of a store, read a piece at a time: nothing of them stays in memory between two pictures.

vision.safetensors holds them under the one set of names of names.py, in the checkpoint's own types. `write` makes it
from a checkpoint, `VisionWeights` reads it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from services.engine.errors import StoreError
from services.engine.tensorfile import DTYPES, header_bytes, read_header, tensor_bytes, write_file
from services.engine.vision.config import VisionConfig
from services.engine.vision.names import VisionTensor
from services.engine.vision.tower import Block
from services.engine.weights import check_values

_SLICE = 5120  # of the projector's hidden width
_IN_BLOCK = ("norm1", "qkv", "proj", "norm2", "fc1", "fc2")
_UNUSED = ("video_embedder",)


def write(tensors: Mapping[str, VisionTensor], path: Path) -> tuple[int, int]:
    """Size and XXH64 of the file. Raises CheckpointError that names a tensor with a value that is not finite.

    Layer scales of 1, which some exports write out, are left out: both layouts of a checkpoint give the same file.
    """
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name not in _UNUSED and not ("layer_scale" in name and bool((tensor.read() == 1).all()))
    }
    start, order = header_bytes({name: (tensor.parts[0].dtype, tensor.shape) for name, tensor in kept.items()})

    def pieces() -> Iterator[bytes]:
        yield start
        for name in order:
            values = kept[name].read()
            check_values(kept[name].parts[0].name, values)
            yield tensor_bytes(values)

    size, digest = write_file(path, pieces())
    return size, int(digest, 16)


class VisionWeights:
    """Everything as float32, read when asked for. Raises StoreError where the file is not what the config says."""

    def __init__(self, path: Path, config: VisionConfig) -> None:
        self.config = config
        self.entries = read_header(path)
        for name, shape in shapes(config).items():
            found = self.entries.get(name)
            if found is None or found.shape != shape or found.dtype not in DTYPES:
                raise StoreError(f"{path}: {name} is not there with shape {list(shape)}; run thimble repack again")

    def plain(self, name: str) -> Tensor:
        return self.entries[name].read().float()

    def table(self) -> Tensor:
        """[side, side, width], in the file's own type: it is large, and little of it is used."""
        side = self.config.table
        return self.entries["position"].read().view(side, side, -1)

    def blocks(self) -> Iterator[Block]:
        """In their order; a block is read when it is asked for, and nobody here holds it after that."""
        for index in range(self.config.blocks):
            parts = {
                f"{name}_{kind}": self.plain(f"blocks.{index}.{name}.{kind}")
                for name in _IN_BLOCK
                for kind in ("weight", "bias")
            }
            scales = {
                name: self.plain(f"blocks.{index}.{name}")
                for name in ("layer_scale1", "layer_scale2")
                if f"blocks.{index}.{name}" in self.entries
            }
            yield Block(**parts, **scales)

    def projector_slices(self) -> Iterator[tuple[Tensor, Tensor]]:
        up, down = (self.entries[f"projector.{name}"].read() for name in ("up", "down"))
        for start in range(0, self.config.projector, _SLICE):
            end = start + _SLICE
            yield up[start:end].float(), down[:, start:end].float()


def shapes(config: VisionConfig) -> dict[str, tuple[int, ...]]:
    width, inner = config.width, config.inner
    found: dict[str, tuple[int, ...]] = {
        "embedder": (width, 3 * config.patch**2),
        "position": (1, config.table**2, width),
        "class_tokens": (config.prefix, width),
        "final_norm.weight": (width,),
        "final_norm.bias": (width,),
        "projector.norm": (4 * width,),
        "projector.up": (config.projector, 4 * width),
        "projector.down": (config.hidden, config.projector),
    }
    linears = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (inner, width), "fc2": (width, inner)}
    for index in range(config.blocks):
        for name, shape in {**linears, "norm1": (width,), "norm2": (width,)}.items():
            found |= {f"blocks.{index}.{name}.weight": shape, f"blocks.{index}.{name}.bias": shape[:1]}
    return found
