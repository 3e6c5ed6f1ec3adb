"""Root-mean-square norms on a GPU (or in the interpreter): one program a row or group, sums in one fixed order.

A linear applies the plain norm itself (kernels/linear/gpu.py) and the recurrent step the gated one
(kernels/mamba/gpu.py); the plain one stands alone for what has no linear behind it.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import inverse_root, silu
from kernels.linear.octets import octet_place

Tensor = torch.Tensor

WARPS = 4
FINGERPRINT = f"triton-f32 norm{WARPS}"


@triton.jit
def normed(x, weight, eps, K: tl.constexpr, PADDED: tl.constexpr):
    """A row x [K] -> its columns, which of them there are, x / rms(x) * weight."""
    at = tl.arange(0, PADDED)
    inside = at < K
    values = tl.load(x + at, mask=inside, other=0.0)
    ratio = inverse_root(tl.sum(values * values, axis=0) * (1.0 / K), eps)
    return at, inside, values * ratio * tl.load(weight + at, mask=inside, other=0.0)


@triton.jit
def gated_normed(y, z, weight, group, eps, GROUP: tl.constexpr, PADDED: tl.constexpr, CACHED: tl.constexpr):
    """One group of one row -> its columns, which of them there are, and u / rms(u) * weight of u = y * silu(z)."""
    at = tl.arange(0, PADDED)
    inside = at < GROUP
    column = group * GROUP + at
    values = tl.load(y + column, mask=inside, other=0.0, cache_modifier="" if CACHED else ".cg")
    gated = values * silu(tl.load(z + column, mask=inside, other=0.0))
    ratio = inverse_root(tl.sum(gated * gated, axis=0) * (1.0 / GROUP), eps)
    return column, inside, gated * ratio * tl.load(weight + column, mask=inside, other=0.0)


@triton.jit
def rms_norm_kernel(x, weight, out, eps, K: tl.constexpr, PADDED: tl.constexpr):
    """One program a row of x [M, K]. Any order of columns, the same for all three."""
    row = tl.program_id(0) * K
    at, inside, result = normed(x + row, weight, eps, K, PADDED)
    tl.store(out + row + at, result, mask=inside)


@triton.jit
def gated_group_norm(y, z, weight, out, group, eps, N: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr):
    """One group of one row: u = y * silu(z), u / rms(u) * weight -> out [N] in octet order.

    y may have been written by other programs of the same launch: it is not read through a multiprocessor's own cache.
    """
    column, inside, result = gated_normed(y, z, weight, group, eps, GROUP, PADDED, False)
    tl.store(out + octet_place(column, N), result, mask=inside)


@triton.jit
def gated_group_rms_norm_kernel(
    y,
    z,
    z_stride,
    weight,
    out,
    eps,
    N: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
):
    row = tl.program_id(1)
    gated_group_norm(y + row * N, z + row * z_stride, weight, out + row * N, tl.program_id(0), eps, N, GROUP, PADDED)


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Queue out = x / rms(x) * weight. x and out float32 [M, K], weight [K], all three in the same order of columns."""
    columns = x.shape[1]
    rms_norm_kernel[(x.shape[0],)](
        x, weight, out, eps, K=columns, PADDED=triton.next_power_of_2(columns), num_warps=WARPS, enable_fp_fusion=False
    )


def gated_group_rms_norm(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float, out: Tensor) -> None:
    """Queue the norm of each `group` columns of y * silu(z), times weight. float32; y [M, N] and weight [N] in plain
    order, z [M, N] plain with any row stride, out [M, N] in octet order."""
    rows, columns = y.shape
    assert z.stride(1) == 1
    gated_group_rms_norm_kernel[(columns // group, rows)](
        y,
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
