"""The released tower and projector's shape with random weights, as a store's vision.safetensors. Measures nothing."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from services.engine.tensorfile import header_bytes, tensor_bytes, write_file
from services.engine.vision.config import CLIP_MEAN, CLIP_STD, VisionConfig
from services.engine.vision.weights import VisionWeights, shapes

REAL = VisionConfig(
    patch=16,
    width=1280,
    heads=16,
    inner=5120,
    blocks=32,
    prefix=10,
    table=128,
    projector=20480,
    hidden=4096,
    least_patches=1024,
    most_patches=13312,
    mean=CLIP_MEAN,
    std=CLIP_STD,
)
_DISTINCT = 1 << 23  # random values; a larger tensor repeats them


def write(path: Path, config: VisionConfig = REAL, seed: int = 0) -> VisionWeights:
    """BF16, about as large as trained ones. Takes 1.6 GB at the real shape."""
    random = torch.Generator().manual_seed(seed)
    wanted = shapes(config)
    drawn = torch.empty(min(_DISTINCT, max(map(_size, wanted.values())))).normal_(generator=random)
    drawn = torch.cat([drawn, drawn])
    start, order = header_bytes({name: ("BF16", shape) for name, shape in wanted.items()})

    def pieces() -> Iterator[bytes]:
        yield start
        for number, name in enumerate(order):
            yield tensor_bytes(_values(drawn, name, wanted[name], number))

    write_file(path, pieces())
    return VisionWeights(path, config)


def holes(path: Path, config: VisionConfig = REAL) -> VisionWeights:
    """All zeros, a file that takes no room: where only sizes count."""
    wanted = {name: ("BF16", shape) for name, shape in shapes(config).items()}
    start, _ = header_bytes(wanted)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(len(start) + sum(2 * _size(shape) for _, shape in wanted.values()))
    return VisionWeights(path, config)


def _values(drawn: Tensor, name: str, shape: tuple[int, ...], number: int) -> Tensor:
    """BF16. Each tensor begins somewhere else among the drawn values, which are there twice."""
    size, distinct = _size(shape), len(drawn) // 2
    begin = number * 7919 % distinct
    values = drawn[begin : begin + distinct]
    values = (values if size <= distinct else values.repeat(-(-size // distinct)))[:size].view(shape)
    if name.endswith("norm") or ("norm" in name and name.endswith("weight")):
        return (values * 0.2 + 1).to(torch.bfloat16)
    return values.to(torch.bfloat16) * (shape[-1] ** -0.5 if len(shape) == 2 and name != "class_tokens" else 0.2)


def _size(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
