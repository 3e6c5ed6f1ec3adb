"""Names for what the host has the GPU do, as Nsight and other profilers show them (NVTX). Off unless somebody profiles:
then `named` costs a call that does nothing.

Ranges stand around what the host launches: a token with its parts, a layer of a sweep, a group of blocks. What a graph
replays has none, and a range never spans a place where others may run.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

_OFF: AbstractContextManager[None] = nullcontext()
_on = False


def switch(on: bool) -> None:
    """For the whole process."""
    global _on
    _on = on


def named(name: str, number: int | None = None) -> AbstractContextManager[None]:
    """A range of the calling thread; ranges of a thread nest."""
    if not _on:
        return _OFF
    made: AbstractContextManager[None] = torch.cuda.nvtx.range(name if number is None else f"{name} {number}")
    return made
