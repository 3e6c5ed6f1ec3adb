"""What page-locking RAM for a card takes of the card's own memory: page tables, measured before anything is planned.

Drivers do not say. The same few pages are locked under one address after the other, which costs no RAM: the card's
tables are of addresses. They grow by pieces, of which the last is hardly used; from piece to piece they are measured
to a step.
"""

import mmap
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import torch

from services.engine.gpu.ledger import LOCKED_SHARE, MIB

STEP_BYTES = 64 * MIB
MOST_STEPS = 128
LEAST_STEPS = 16  # fewer say too little
LONGEST_S = 0.5
MOST_SHARE = 4 * LOCKED_SHARE  # more is another process's
GRAIN_BYTES = 2 * MIB  # what drivers allocate by


class Runtime(Protocol):
    """Of CUDA's runtime: 0, or an error's number."""

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int: ...

    def cudaHostUnregister(self, address: int) -> int: ...


def measured_share(
    runtime: Runtime | None = None, free_bytes: Callable[[], int] = lambda: torch.cuda.mem_get_info()[0]
) -> float:
    """Bytes of the current card for each byte of the host's that it reads, at most; LOCKED_SHARE where that cannot be
    measured: the system locks less than it would need."""
    runtime = runtime or torch.cuda.cudart()  # type: ignore[no-untyped-call]
    assert runtime is not None
    before, locked_bytes, begun = free_bytes(), 0, time.monotonic()
    pieces: list[tuple[int, int]] = []  # what was locked when there was one more, and what they are together
    with ExitStack() as stack:
        file = os.memfd_create("locked")
        stack.callback(os.close, file)
        os.ftruncate(file, STEP_BYTES)
        while locked_bytes < MOST_STEPS * STEP_BYTES and time.monotonic() - begun < LONGEST_S:
            address = np.frombuffer(mmap.mmap(file, STEP_BYTES), np.uint8)
            if int(runtime.cudaHostRegister(address.ctypes.data, STEP_BYTES, 0)):
                _forget_error()
                break
            stack.callback(_unlock, runtime, address)
            locked_bytes += STEP_BYTES
            taken_bytes = before - free_bytes()
            if taken_bytes > (pieces[-1][1] if pieces else 0):
                pieces.append((locked_bytes, taken_bytes))
    if locked_bytes < LEAST_STEPS * STEP_BYTES:
        return LOCKED_SHARE
    return min(_most(pieces, locked_bytes), MOST_SHARE)


def _most(pieces: list[tuple[int, int]], locked_bytes: int) -> float:
    """The share that can be behind such pieces, at most."""
    most = ((pieces[-1][1] if pieces else 0) + GRAIN_BYTES) / locked_bytes
    if len(pieces) < 2:
        return most
    # When the first came, more was needed than there was before. A step before the last came, all ahead of it were
    # enough: what was locked in between needed no more than those.
    between_bytes = pieces[-1][0] - STEP_BYTES - pieces[0][0]
    return min(most, pieces[-2][1] / between_bytes) if between_bytes > 0 else most


def _unlock(runtime: Runtime, memory: "np.ndarray[tuple[int], np.dtype[np.uint8]]") -> None:
    runtime.cudaHostUnregister(memory.ctypes.data)


def _forget_error() -> None:
    """The runtime keeps a refused call's error for the next launch to report: this one."""
    if torch.cuda.is_available():
        try:
            torch.zeros(1, device="cuda")
        except RuntimeError:
            return
