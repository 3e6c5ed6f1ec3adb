"""Convolution and scan in C++: bit for bit kernels/mamba/reference.py."""

import torch
from torch import Tensor

from kernels.elementary.binding import POINTER, SIZE, bind, rows_of, whole
from kernels.mamba import reference

CONV = "thimble_causal_conv", POINTER, SIZE, POINTER, POINTER, POINTER, POINTER, SIZE, SIZE, SIZE
SCAN = "thimble_selective_scan", *(POINTER, SIZE) * 4, *(POINTER,) * 5, *(SIZE,) * 5


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As the reference's."""
    function = bind(*CONV)
    if function is None:
        return reference.causal_conv(x, state, weight, bias)
    x = rows_of(x)
    rows, channels = x.shape
    assert state.shape == (channels, weight.shape[1] - 1)
    out = torch.empty(rows, channels)
    weights = whole(state), whole(weight), whole(bias)
    function(x.data_ptr(), x.stride(0), *weights, out.data_ptr(), rows, channels, weight.shape[1])
    return out


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor
) -> Tensor:
    """As the reference's."""
    function = bind(*SCAN)
    if function is None:
        return reference.selective_scan(x, dt, b, c, a, d, dt_bias, state)
    inputs = [rows_of(tensor) for tensor in (x, dt, b, c)]
    (rows, heads, size), (_, groups, columns) = x.shape, b.shape
    assert state.shape == (heads, size, columns)
    out = torch.empty(rows, heads, size)
    function(
        *(number for tensor in inputs for number in (tensor.data_ptr(), tensor.stride(0))),
        *(whole(tensor) for tensor in (a, d, dt_bias, state, out)),
        *(rows, heads, size, groups, columns),
    )
    return out
