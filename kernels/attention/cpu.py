"""Attention in C++: bit for bit kernels/attention/reference.py."""

import math

import torch
from torch import Tensor

from kernels.attention import reference
from kernels.elementary.binding import FLOAT, POINTER, SIZE, bind, rows_of

ATTEND = "thimble_attend", POINTER, SIZE, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, SIZE, SIZE, FLOAT


def attend(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
    """As the reference's."""
    function = bind(*ATTEND)
    if function is None:
        return reference.attend(query, key, value, first)
    query, key, value = rows_of(query), key.contiguous(), value.contiguous()
    rows, heads, size = query.shape
    tokens, kv_heads, _ = key.shape
    assert tokens >= first + rows
    out = torch.empty(rows, heads, size)
    pointers = query.data_ptr(), query.stride(0), key.data_ptr(), value.data_ptr(), out.data_ptr()
    function(*pointers, rows, heads, kv_heads, size, first, 1.0 / math.sqrt(size))
    return out
