"""What the vision tower does to its rows beside products of matrices: positions added, layer norms, on a GPU (or in the
interpreter).

Definitions: torch's `layer_norm` and `lerp`, as the tower and the projector on a processor use them. One program a row,
all of it in registers; float32. Weights and lines are read in the file's own float type.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import bfloat16, inverse_root

Tensor = torch.Tensor

WARPS = 4
SHUFFLE_WARPS = 8


@triton.jit
def _centred(values, inside, K: tl.constexpr, eps):
    """[rows, PADDED], zero outside -> (x - mean) / sqrt(variance + eps)."""
    rest = tl.where(inside, values - (tl.sum(values, axis=1) * (1.0 / K))[:, None], 0.0)
    return rest * inverse_root(tl.sum(rest * rest, axis=1) * (1.0 / K), eps)[:, None]


@triton.jit
def layer_norm_kernel(x, weight, bias, out, eps, K: tl.constexpr, PADDED: tl.constexpr):
    """One program a row of x and out [M, K]."""
    at = tl.arange(0, PADDED)[None, :]
    inside = at < K
    row = tl.program_id(0).to(tl.int64) * K
    normed = _centred(tl.load(x + row + at, mask=inside, other=0.0), inside, K, eps)
    normed = normed * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = normed + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + at, bfloat16(normed), mask=inside)


@triton.jit(do_not_specialize=["columns"])
def shuffled_norm_kernel(
    x, weight, bias, outer, out, columns, eps, outer_eps, K: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Program (column, row) of the result: its four patches' layer norms side by side, and the RMS norm of these."""
    corner = tl.arange(0, 4)[:, None]  # dy * 2 + dx
    at = tl.arange(0, PADDED)[None, :]
    inside = at < K
    patch = (2 * tl.program_id(1) + corner // 2) * columns + 2 * tl.program_id(0) + corner % 2
    values = tl.load(x + patch.to(tl.int64) * K + at, mask=inside, other=0.0)
    values = _centred(values, inside, K, eps) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    values = values + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    ratio = inverse_root(tl.sum(tl.sum(values * values, axis=1), axis=0) * (1.0 / (4 * K)), outer_eps)
    place = corner * K + at
    values = values * ratio * tl.load(outer + place, mask=inside, other=0.0).to(tl.float32)
    row = (tl.program_id(1) * (columns // 2) + tl.program_id(0)).to(tl.int64) * (4 * K)
    tl.store(out + row + place, bfloat16(values), mask=inside)


@triton.jit(do_not_specialize=["first_patch", "first_line", "rows", "columns"])
def positions_kernel(
    x,
    lines,
    down,
    below,
    across,
    beside,
    first_patch,
    first_line,
    rows,
    columns,
    SIDE: tl.constexpr,
    K: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One program a patch of x [.., K]: its place between four rows of `lines` [.., SIDE, K]."""
    at = tl.arange(0, PADDED)
    inside = at < K
    patch = first_patch + tl.program_id(0)
    row = patch // columns
    column = patch % columns
    upper = (tl.load(down + row) - first_line) * SIDE
    lower = (tl.load(down + rows + row) - first_line) * SIDE
    left = tl.load(across + column)
    right = tl.load(across + columns + column)
    share = tl.load(below + row)
    a = tl.load(lines + (upper + left) * K + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(lines + (lower + left) * K + at, mask=inside, other=0.0).to(tl.float32)
    at_left = tl.fma(b - a, share, a)
    a = tl.load(lines + (upper + right) * K + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(lines + (lower + right) * K + at, mask=inside, other=0.0).to(tl.float32)
    at_right = tl.fma(b - a, share, a)
    target = x + patch.to(tl.int64) * K + at
    position = tl.fma(at_right - at_left, tl.load(beside + column), at_left)
    tl.store(target, tl.load(target, mask=inside, other=0.0) + position, mask=inside)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    """Queue out = (x - mean) / sqrt(variance + eps) * weight + bias of each row.

    x float32 [M, K], out bfloat16 [M, K], contiguous; weight and bias [K], of any float type.
    """
    _check(x, out, weight, bias)
    assert out.shape == x.shape
    columns = x.shape[1]
    layer_norm_kernel[(len(x),)](
        x, weight, bias, out, eps, K=columns, PADDED=triton.next_power_of_2(columns), num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def shuffled_norm(
    x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor, eps: float, outer: Tensor, outer_eps: float,
    out: Tensor,
) -> None:  # fmt: skip
    """Queue out = y / rms(y) * outer, where a row y is the layer norms of two by two neighbours of a grid, dy slowest.

    x float32 [rows * columns, K] with even rows and columns; weight and bias [K], outer [4 K] of any float type; out
    bfloat16 [rows / 2 * columns / 2, 4 K], contiguous; at most 131070 rows.
    """
    (rows, columns), size = grid, x.shape[1]
    _check(x, out, weight, bias)
    assert len(x) == rows * columns
    assert rows % 2 == columns % 2 == 0
    assert out.shape == (len(x) // 4, 4 * size)
    assert outer.shape == (4 * size,)
    shuffled_norm_kernel[(columns // 2, rows // 2)](
        x, weight, bias, outer, out, columns, eps, outer_eps, K=size, PADDED=triton.next_power_of_2(size),
        num_warps=SHUFFLE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


class Places:
    """Of a grid's patches in the table: the neighbours of each row and column, and how far it is to the second."""

    def __init__(
        self, grid: tuple[int, int], down: tuple[Tensor, Tensor, Tensor], across: tuple[Tensor, Tensor, Tensor],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.rows, self.columns = grid
        self.down, self.across = (
            torch.cat([first, second]).int().to(device) for first, second, _ in (down, across)
        )  # fmt: skip
        self.below, self.beside = (share.float().to(device) for _, _, share in (down, across))


def add_positions(x: Tensor, lines: Tensor, places: Places, patches: tuple[int, int], first_line: int) -> None:
    """Queue x += position of the patches from the first to before the second of `patches`.

    x float32 [all patches, K], contiguous; lines [some, side, K] of any float type, contiguous, beginning with the
    table's line `first_line`: all neighbours of these patches are there.
    """
    first, stop = patches
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert lines.is_contiguous()
    assert lines.shape[2] == x.shape[1]
    assert 0 <= first <= stop <= len(x) == places.rows * places.columns
    if first == stop:
        return
    columns = x.shape[1]
    positions_kernel[(stop - first,)](
        x, lines, places.down, places.below, places.across, places.beside, first, first_line, places.rows,
        places.columns, SIDE=lines.shape[1], K=columns, PADDED=triton.next_power_of_2(columns), num_warps=WARPS,
        enable_fp_fusion=False,
    )  # fmt: skip


def _check(x: Tensor, out: Tensor, weight: Tensor, bias: Tensor) -> None:
    assert x.dtype == torch.float32
    assert out.dtype == torch.bfloat16
    assert weight.shape == bias.shape == x.shape[1:]
    assert len(x)
    assert all(tensor.is_contiguous() for tensor in (x, out, weight, bias))
