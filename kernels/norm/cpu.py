"""The norms in C++: bit for bit kernels/norm/reference.py."""

import torch
from torch import Tensor

from kernels.elementary.binding import FLOAT, POINTER, SIZE, bind, rows_of, whole
from kernels.norm import reference

RMS = "thimble_rms_norm", POINTER, SIZE, POINTER, POINTER, SIZE, SIZE, FLOAT
GATED = "thimble_gated_group_rms_norm", POINTER, SIZE, POINTER, SIZE, POINTER, POINTER, SIZE, SIZE, SIZE, FLOAT


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference's."""
    function = bind(*RMS)
    if function is None:
        return reference.rms_norm(x, weight, eps)
    x = rows_of(x)
    rows, size = x.shape
    out = torch.empty(rows, size)
    function(x.data_ptr(), x.stride(0), whole(weight), out.data_ptr(), rows, size, eps)
    return out


def gated_group_rms_norm(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float) -> Tensor:
    """As the reference's."""
    function = bind(*GATED)
    if function is None:
        return reference.gated_group_rms_norm(y, z, weight, group, eps)
    y, z = rows_of(y), rows_of(z)
    rows, size = y.shape
    out = torch.empty(rows, size)
    function(
        *(y.data_ptr(), y.stride(0), z.data_ptr(), z.stride(0), whole(weight), out.data_ptr()),
        *(rows, size // group, group, eps),
    )
    return out
