"""Dense linear layers of decode on a GPU (or in the interpreter): one to four rows, weights as the checkpoint has them.

Owns the launch and what happens to a result before it is stored; dot.py owns the arithmetic of a dot product. A row's
bits do not depend on the other rows, nor on how many there are: a tiling's `warps` and `ahead` are the same for every
number of rows, and `tile` only says which program computes an output. Nothing is chosen by timing.

One launch can compute up to three linears of the same input (gate, next gate and latent projection; query, key, value),
take its input through an RMS norm, square its positive results, or add them to the residual stream.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from kernels.linear.dot import project
from kernels.linear.octets import octet_place

Tensor = torch.Tensor
Finish = Literal["store", "octets", "relu2", "add"]

MOST_ROWS = 4
_VALUES = {"NVFP4": 32, "FP8": 16, "BF16": 8, "F16": 8, "F32": 4}  # in 16 bytes
_UNPACKING = {"NVFP4": 2.0**22, "FP8": 2.0**8}  # see dot.py


@dataclass(frozen=True)
class Tiling:
    """`tile` weight rows a program of `warps`; `ahead`: a step's weights are loaded during the step before."""

    tile: int
    warps: int
    ahead: bool


@dataclass(frozen=True)
class Linear:
    """One linear's weights on a device: `weight` int32 [N, words], `scales` int16 [N, K/32] (NVFP4; else empty)."""

    format: str
    rows: int
    columns: int
    weight: Tensor
    scales: Tensor
    factor: float

    @staticmethod
    def pack(
        form: str, weight: Tensor, weight_scale: Tensor | None = None, weight_scale_2: Tensor | None = None
    ) -> "Linear":
        """Views of a checkpoint's tensors, which must be contiguous, on one device and 16-byte aligned; no copy.

        Raises ValueError for a number of columns that 16 bytes do not divide.
        """
        form = form.removeprefix("W4A16_")
        columns = weight.shape[1] * (2 if form == "NVFP4" else 1)
        if columns % max(8, _VALUES[form]):
            raise ValueError(f"a linear of {columns} columns in {form}: expected a multiple of {max(8, _VALUES[form])}")
        factor, scales = 1.0, weight.new_empty(0, dtype=torch.int16)
        if form == "NVFP4":
            assert weight_scale is not None
            assert weight_scale_2 is not None
            factor, scales = float(weight_scale_2), weight_scale.view(torch.uint8).view(torch.int16)
        elif form == "FP8":
            assert weight_scale is not None
            factor = float(weight_scale)
        words = weight.view(torch.uint8).view(torch.int32)
        return Linear(form, weight.shape[0], columns, words, scales, factor * _UNPACKING.get(form, 1.0))

    @property
    def scale(self) -> float:
        """The tensor's own scale: `factor` without what decode's unpacking leaves out."""
        return self.factor / _UNPACKING.get(self.format, 1.0)

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


@dataclass(frozen=True)
class Norm:
    """An RMS norm that a linear applies to its input: weight float32 [K] in octet order."""

    weight: Tensor
    eps: float


def tiling(form: str, rows: int, columns: int, tokens: int) -> Tiling:
    """The fixed configuration of a shape class, from `thimble bench dense --sweep` at the real model's shapes."""
    steps = columns // (_VALUES[form] * 128)
    tile, warps, ahead = 4 if rows < 4096 or columns > 4096 else 8, 4, steps > 1
    if form == "NVFP4" and columns > 4096:
        tile, warps, ahead = 2, 2, True
    elif form == "NVFP4" and rows >= 65536:
        tile, warps = 8, 2
    elif columns <= 1024:
        tile = 2
    return Tiling(max(2, tile // triton.next_power_of_2(tokens)), warps, ahead)


FINGERPRINT = "triton-f32 " + " ".join(
    f"{form}:{made.warps}{'a' if made.ahead else ''}"
    for form in _VALUES
    for rows, columns in ((4096, 1024), (4096, 4096), (4096, 5376), (4096, 8192), (1 << 17, 4096))
    for made in [tiling(form, rows, columns, 1)]
)


@triton.jit
def _linear(
    program,
    out,
    x,
    x_single,
    norm_weight,
    eps,
    weight,
    scales,
    factor,
    rows,
    tokens,
    stop,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    FINISH: tl.constexpr,
    GUARDED: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    T: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One tile of one linear's outputs."""
    row = program * TILE + tl.arange(0, TILE)
    inside = tl.minimum(row, rows - 1)
    y = project(x, x_single, norm_weight, eps, weight, scales, factor, inside, tokens, K, FORMAT, NORM, T, UNITS, AHEAD)
    token = tl.arange(0, T)[:, None]
    if FINISH == "store":
        place = out + (token * rows + row[None, :])
    else:
        place = out + (token * rows + octet_place(row, rows)[None, :])
    mask = (token < tokens) & (row < rows)[None, :]
    if FINISH == "relu2":
        y = tl.where(y <= 0.0, 0.0, y * y)  # NaN stays NaN
    if FINISH == "add":
        if GUARDED:
            mask = mask & (tl.load(stop) == 0)
        y = tl.load(place, mask=mask, other=0.0) + y
    tl.store(place, y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["x_single", "scales0", "scales1", "scales2"])
def linear_kernel(
    x,
    x_single,
    norm_weight,
    eps,
    tokens,
    stop,
    out0,
    weight0,
    scales0,
    factor0,
    rows0,
    out1,
    weight1,
    scales1,
    factor1,
    rows1,
    out2,
    weight2,
    scales2,
    factor2,
    rows2,
    PARTS: tl.constexpr,
    FORMAT0: tl.constexpr,
    TILE0: tl.constexpr,
    FINISH0: tl.constexpr,
    FORMAT1: tl.constexpr,
    TILE1: tl.constexpr,
    FINISH1: tl.constexpr,
    FORMAT2: tl.constexpr,
    TILE2: tl.constexpr,
    FINISH2: tl.constexpr,
    GUARDED: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    T: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """PARTS linears of x, one after the other in the grid. See `linears`."""
    program = tl.program_id(0)
    first1 = tl.cdiv(rows0, TILE0)
    first2 = first1 + tl.cdiv(rows1, TILE1)
    if PARTS == 1:
        part = 0
    elif PARTS == 2:
        part = (program >= first1).to(tl.int32)
    else:
        part = (program >= first1).to(tl.int32) + (program >= first2).to(tl.int32)
    if part == 0:
        _linear(
            program, out0, x, x_single, norm_weight, eps, weight0, scales0, factor0, rows0, tokens,
            stop, FORMAT0, TILE0, FINISH0, GUARDED, K, NORM, T, UNITS, AHEAD,
        )  # fmt: skip
    elif part == 1:
        _linear(
            program - first1, out1, x, x_single, norm_weight, eps, weight1, scales1, factor1, rows1, tokens,
            stop, FORMAT1, TILE1, FINISH1, GUARDED, K, NORM, T, UNITS, AHEAD,
        )  # fmt: skip
    else:
        _linear(
            program - first2, out2, x, x_single, norm_weight, eps, weight2, scales2, factor2, rows2, tokens,
            stop, FORMAT2, TILE2, FINISH2, GUARDED, K, NORM, T, UNITS, AHEAD,
        )  # fmt: skip


def linear(
    x: Tensor,
    weights: Linear,
    out: Tensor,
    finish: Finish = "store",
    norm: Norm | None = None,
    configuration: Tiling | None = None,
    stop: Tensor | None = None,
) -> None:
    """`linears` for one."""
    linears(x, [(weights, out, finish)], norm, configuration, stop)


def linears(
    x: Tensor,
    parts: list[tuple[Linear, Tensor, Finish]],
    norm: Norm | None = None,
    configuration: Tiling | None = None,
    stop: Tensor | None = None,
) -> None:
    """Queue out = finish(weights @ norm(x)) for one to three linears of one input, in one launch.

    x float32 [M, K] in octet order, M at most MOST_ROWS; out float32 [M, N], for the finishes
      store   in plain order;
      octets  in octet order;
      relu2   positive results squared, others zero, in octet order;
      add     added to what out holds, in octet order: the residual stream; not if `stop` int32 [1] is set by then.
    `configuration` replaces the fixed one of every part, for measurements.
    """
    tokens, columns = x.shape
    assert tokens <= MOST_ROWS
    assert 1 <= len(parts) <= 3
    assert all(part.columns == columns and out.shape == (tokens, part.rows) for part, out, _ in parts)
    tilings = [configuration or tiling(part.format, part.rows, columns, tokens) for part, _, _ in parts]
    if len({(each.warps, each.ahead) for each in tilings}) > 1:  # one launch has one number of warps
        for part in parts:
            linears(x, [part], norm, configuration, stop)
        return
    arguments: dict[str, Any] = {}
    for index in range(3):
        weights, out, finish = parts[min(index, len(parts) - 1)]
        arguments |= {
            f"out{index}": out,
            f"weight{index}": weights.weight,
            f"scales{index}": weights.scales,
            f"factor{index}": weights.factor,
            f"rows{index}": weights.rows,
            f"FORMAT{index}": weights.format,
            f"TILE{index}": tilings[min(index, len(parts) - 1)].tile,
            f"FINISH{index}": finish,
        }
    programs = sum(triton.cdiv(part.rows, each.tile) for (part, _, _), each in zip(parts, tilings, strict=True))
    linear_kernel[(programs,)](
        x,
        x,
        x if norm is None else norm.weight,
        0.0 if norm is None else norm.eps,
        tokens,
        x if stop is None else stop,
        **arguments,
        PARTS=len(parts),
        GUARDED=stop is not None,
        K=columns,
        NORM=norm is not None,
        T=triton.next_power_of_2(tokens),
        UNITS=32 * tilings[0].warps,
        AHEAD=tilings[0].ahead,
        num_warps=tilings[0].warps,
        enable_fp_fusion=False,
    )
