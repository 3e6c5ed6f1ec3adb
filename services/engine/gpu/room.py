"""One piece of a card's memory that several users have in turns. Owns how a user lays out its tensors there.

What lies in it means nothing once another user has run; who runs when is the callers' affair.
"""

import math

import torch
from torch import Tensor

ALIGNED_BYTES = 256  # what matrix products want of an address


def aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


class Room:
    """A user's tensors, one behind the other from the start of `memory`, uint8."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._taken_bytes = 0

    def take(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        first = self._taken_bytes
        stop = first + math.prod(shape) * dtype.itemsize
        assert stop <= len(self.memory), "the ledger counted less"
        self._taken_bytes = aligned(stop)
        return self.memory[first:stop].view(dtype).view(shape)

    def rest(self) -> Tensor:
        """What nobody has taken."""
        return self.memory[self._taken_bytes :]
