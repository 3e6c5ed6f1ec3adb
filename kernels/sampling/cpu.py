"""Sampling in C++: the same id as kernels/sampling/reference.py, the same bits as penalties.py."""

import ctypes
import math
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.elementary.binding import FLOAT, POINTER, SIZE, bind, whole
from kernels.sampling import penalties, reference

DOUBLE = ctypes.c_double
SAMPLE = "thimble_sample", POINTER, POINTER, SIZE, DOUBLE, DOUBLE, SIZE, SIZE, SIZE, DOUBLE, POINTER, POINTER
PENALISE = "thimble_penalise", POINTER, SIZE, POINTER, SIZE, POINTER, POINTER, SIZE, FLOAT, FLOAT, FLOAT
LOGPROBS = "thimble_logprobs", POINTER, SIZE, SIZE, SIZE, POINTER, POINTER, POINTER, POINTER


class Counts:
    """How often an answer holds each of its ids, in arrays that C++ reads as they lie."""

    def __init__(self) -> None:
        self.ids, self.counts = array("i"), array("i")
        self._places: dict[int, int] = {}

    def add(self, id_: int) -> None:
        place = self._places.setdefault(id_, len(self.ids))
        if place == len(self.ids):
            self.ids.append(id_)
            self.counts.append(0)
        self.counts[place] += 1


def sample(
    logits: Tensor,
    temperature: float,
    top_p: float,
    seed: int,
    position: int,
    top_k: int = 0,
    min_p: float = 0.0,
    allowed: Tensor | None = None,
) -> int:
    """As the reference's. `allowed` int32 [(V + 31) / 32], or None: bit i % 32 of word i / 32 allows id i; as if the
    logits of the others were -inf."""
    assert logits.dim() == 1
    assert temperature >= 0
    assert 0 < top_p <= 1
    assert top_k >= 0
    assert 0 <= min_p <= 1
    if allowed is not None:
        assert allowed.dtype == torch.int32
        assert allowed.shape == ((len(logits) + 31) // 32,)
        assert allowed.is_contiguous()
    function = bind(*SAMPLE)
    if function is None:
        logits = logits if allowed is None else masked(logits, allowed)
        return reference.sample(logits, temperature, top_p, seed, position, top_k, min_p)
    logits = logits.contiguous()
    id_, top = ctypes.c_int64(), FLOAT()
    function(
        whole(logits),
        None if allowed is None else allowed.data_ptr(),
        *(len(logits), temperature, top_p, seed, position, top_k, min_p),
        *(ctypes.byref(id_), ctypes.byref(top)),
    )
    if id_.value < 0:
        raise reference.LogitsError.of(top.value)
    return id_.value


def masked(logits: Tensor, allowed: Tensor) -> Tensor:
    """A copy, -inf where a bit of `allowed` is missing."""
    bits = (allowed[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return logits.masked_fill(bits.flatten()[: len(logits)] == 0, -math.inf)


def penalise(
    logits: Tensor,
    prompt: Tensor,
    answer: Counts,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """As the one in penalties.py: a changed copy. `prompt` int32: the prompt's ids, each once or more often."""
    assert repetition > 0
    assert prompt.dtype == torch.int32
    function = bind(*PENALISE)
    if function is None:
        said = dict(zip(answer.ids, answer.counts, strict=True))
        return penalties.penalise(logits, prompt.tolist(), said, repetition, presence, frequency)
    out = logits.clone(memory_format=torch.contiguous_format)
    prompt = prompt.contiguous()
    (ids, length), (counts, _) = answer.ids.buffer_info(), answer.counts.buffer_info()
    function(whole(out), len(out), prompt.data_ptr(), len(prompt), ids, counts, length, repetition, presence, frequency)
    return out


def logprobs(logits: Tensor, id_: int, top: int) -> tuple[float, Sequence[tuple[int, float]]]:
    """As the one in penalties.py."""
    function = bind(*LOGPROBS)
    if function is None:
        return penalties.logprobs(logits, id_, top)
    logits, top = logits.contiguous(), min(top, len(logits))
    assert 0 <= id_ < len(logits)
    largest, total, below, best = FLOAT(), DOUBLE(), (FLOAT * (1 + top))(), (ctypes.c_int32 * top)()
    function(whole(logits), len(logits), id_, top, ctypes.byref(largest), ctypes.byref(total), below, best)
    if not math.isfinite(largest.value):
        raise reference.LogitsError.of(largest.value)
    log_total = math.log(total.value)
    own, *others = (value - log_total for value in below)
    return own, list(zip(best, others, strict=True))
