"""Root-mean-square norms of a prompt's sweep: many rows, plain order, results as the next product takes them.

Definition: reference.py. One program a row, or a group of one; its sum has the order of how the columns lie in its
threads, which goes by the number of columns alone: not by the rows, nor by where in memory they begin.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import rounded_to
from kernels.norm.gpu import gated_normed, normed

Tensor = torch.Tensor

WARPS = 4
FINGERPRINT = f"triton-f32 sweep norm{WARPS}"


@triton.jit
def sweep_rms_norm_kernel(x, weight, out, eps, K: tl.constexpr, PADDED: tl.constexpr):
    """One program a row of x and out [M, K]."""
    row = tl.program_id(0).to(tl.int64) * K
    at, inside, result = normed(x + row, weight, eps, K, PADDED)
    tl.store(out + row + at, rounded_to(result, out), mask=inside)


@triton.jit
def sweep_gated_norm_kernel(
    y,
    y_stride,
    z,
    z_stride,
    weight,
    out,
    eps,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Program (group, row): u = y * silu(z), u / rms(u) * weight."""
    row = tl.program_id(1).to(tl.int64)
    rows = y + row * y_stride, z + row * z_stride
    column, inside, result = gated_normed(rows[0], rows[1], weight, tl.program_id(0), eps, GROUP, PADDED, True)
    tl.store(out + row * N + column, rounded_to(result, out), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Queue out = x / rms(x) * weight. x float32 [M, K], weight float32 [K], out float32, float16 or bfloat16 [M, K];
    all contiguous. K is a multiple of 8."""
    rows, columns = x.shape
    _check(x, weight, out)
    assert x.is_contiguous()
    if rows == 0:
        return
    sweep_rms_norm_kernel[(rows,)](
        x, weight, out, eps, K=columns, PADDED=triton.next_power_of_2(columns), num_warps=WARPS, enable_fp_fusion=False
    )


def gated_group_rms_norm(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float, out: Tensor) -> None:
    """Queue the norm of each `group` columns of y * silu(z), times weight.

    y and z float32 [M, N] with any row strides, multiples of 4; weight float32 [N] and out float32, float16 or bfloat16
    [M, N] contiguous. N is a multiple of 8 and of `group`; at most 65535 rows.
    """
    rows, columns = y.shape
    _check(y, weight, out)
    _check(z, weight, out)
    assert columns % group == 0
    if rows == 0:
        return
    sweep_gated_norm_kernel[(columns // group, rows)](
        y,
        y.stride(0),
        z,
        z.stride(0),
        weight,
        out,
        eps,
        N=columns,
        GROUP=group,
        PADDED=triton.next_power_of_2(group),
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def _check(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Our own bugs; rows that begin at odd places would be loaded, and hence summed, in another order."""
    assert x.dtype == weight.dtype == torch.float32
    assert out.dtype in (torch.float32, torch.float16, torch.bfloat16)
    assert x.shape == out.shape
    assert weight.shape == x.shape[1:]
    assert x.stride(1) == 1
    assert x.shape[1] % 8 == 0
    assert x.stride(0) % 4 == 0
    assert all(tensor.data_ptr() % 16 == 0 for tensor in (x, weight, out))
    assert weight.is_contiguous()
    assert out.is_contiguous()
