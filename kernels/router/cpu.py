"""The choice of experts in C++: bit for bit kernels/router/reference.py."""

import torch
from torch import Tensor

from kernels.elementary.binding import FLOAT, POINTER, SIZE, bind, rows_of, whole
from kernels.router import reference

CHOOSE = "thimble_choose", POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, FLOAT, SIZE


def choose(logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """As the reference's."""
    function = bind(*CHOOSE)
    if function is None:
        return reference.choose(logits, bias, top_k, scale, normalise)
    logits = rows_of(logits)
    rows, experts = logits.shape
    assert 0 < top_k <= experts == len(bias)
    ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
    outputs = whole(bias), ids.data_ptr(), weights.data_ptr()
    function(logits.data_ptr(), logits.stride(0), *outputs, rows, experts, top_k, scale, normalise)
    return ids, weights
