"""What a compiled kernel is given, when it is launched without Triton's own launch: what Triton would give.

A stand-in for a kernel: on a GPU the sweep's tests hold the results against each other.
"""

from collections.abc import Callable
from typing import Any

import torch

from kernels.experts.prefill_kernels import FIELDS
from kernels.experts.prefill_launches import Launches


class Compiled:
    """Keeps what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments, stream: self.launches.append((grid, arguments, stream))


class Kernel:
    """Compiled anew at each launch that comes to it."""

    arg_names = ("ring", "items", "x", "WIDTH", "OPERAND")

    def __init__(self) -> None:
        self.compiled: list[Compiled] = []
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
        def launch(*tensors: torch.Tensor, **words: Any) -> Compiled:
            self.launches.append((grid, tensors, words))
            self.compiled.append(Compiled())
            return self.compiled[-1]

        return launch


def test_it_is_compiled_once_for_each_kind_of_address() -> None:
    kernel = Kernel()
    launches = Launches(kernel, {"OPERAND": "f16", "WIDTH": 80}, {"num_warps": 4})
    ring, items = torch.zeros(64, dtype=torch.uint8), torch.zeros(6, FIELDS, dtype=torch.int32)
    x = torch.zeros(64, dtype=torch.float16)
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (ring, x))
    for some in (x, x[8:], x[1:]):
        launches.bind(ring, items, some)
        for first in (0, 2):
            launches.queue((7, 5), first, 3, stream=11)

    assert len(kernel.launches) == 2, "x[8:] is of the kind of x, x[1:] is not"
    grid, tensors, words = kernel.launches[0]
    assert grid == (7, 5, 3)
    assert tensors[0] is ring
    assert tensors[1].shape == (3, FIELDS)
    assert words == {"OPERAND": "f16", "WIDTH": 80, "num_warps": 4}

    def launched(first: int, some: torch.Tensor) -> tuple[Any, ...]:
        addresses = ring.data_ptr(), items[first:].data_ptr(), some.data_ptr()
        return (7, 5, 3), (*addresses, 80, "f16"), 11

    assert kernel.compiled[0].launches == [launched(2, x), launched(0, x[8:]), launched(2, x[8:])]
    assert kernel.compiled[1].launches == [launched(2, x[1:])]
