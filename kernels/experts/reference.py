"""The arithmetic of the routed experts in plain torch: the definition that every fast path equals bit for bit.

Sums are sums of integers, exact in any order, so that no split, tile, thread count or instruction set can change a bit:

    x [latent] -> xq int16 with one power of two: max|x| = m * 2^p (0.5 <= m < 1), e = min(15 - p, 80),
                  xq = clamp(round_half_even(x * 2^e), -32767, 32767); an all-zero x has xq = 0, e = 0
    S[n] = sum_k code(n,k) * scale(n, k/16) * xq[k]         code = 2 * E2M1, |.| <= 12; scale = 2^9 * E4M3 < 2^18
    v[n] = float32(S[n]) * float32(up_scale * 2^-(e+10))    h[n] = v > 0 ? v * v : 0
    h [width] -> hq, f as x -> xq, e; neuron n is alive if hq[n] != 0
    T[j] = sum_n code(j,n) * scale(j, n/16) * hq[n]         y[j] = float32(T[j]) * float32(down_scale * 2^-(f+10))
    out[j] = float32(sum in router-rank order of double(w_k) * double(y_k[j]))

|S| < 12 * 2^18 * 2^15 * latent and |T| < the same * width: below 2^51 up to MOST_INPUTS, so int64 and double both hold
every partial sum. A product of two float32 is exact in double, so fusing the multiply and add changes nothing.
A NaN or Inf in x, or an h that overflows, makes the token's whole output NaN. Subnormals are kept, never flushed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.block import GROUP, BlockLayout
from kernels.nvfp4.reference import E2M1, unpack_codes

MOST_INPUTS = 16384  # of one sum: 12 * 448 * 2^9 * 32767 * 16384 < 2^51
INT16_LIMIT = 32767
SMALLEST_NORMAL = 2.0**-126
# Keeps every power of two an ordinary float32; a vector whose largest value is below 2^-65 loses precision, not order.
MOST_EXPONENT = 80


@dataclass(frozen=True)
class Expert:
    """One expert as exact integers in float64: up [width, latent] and down [latent, width], code times block scale.

    `up_scale` and `down_scale` are the tensors' own scales (weight_scale_2), float32 values.
    """

    up: Tensor
    down: Tensor
    up_scale: float
    down_scale: float


def check_scales(up_scale: float, down_scale: float) -> None:
    """Raises ValueError unless both are positive normal float32 numbers."""
    for name, scale in (("up", up_scale), ("down", down_scale)):
        if not (SMALLEST_NORMAL <= scale <= torch.finfo(torch.float32).max):
            raise ValueError(f"the {name} scale {scale} is not a positive normal float32 number")


def unpack_expert(block: npt.NDArray[np.uint8], layout: BlockLayout, up_scale: float, down_scale: float) -> Expert:
    """The integers of a block [block_bytes]. Raises ValueError on a scale code that is negative or NaN."""
    check_scales(up_scale, down_scale)
    if max(layout.latent, layout.width) > MOST_INPUTS:
        raise ValueError(f"an expert may have at most {MOST_INPUTS} inputs and neurons")
    up_weight, up_scales, down_weight, down_scales = (torch.from_numpy(part) for part in layout.unpack(block))
    return Expert(_integers(up_weight, up_scales), _integers(down_weight, down_scales), up_scale, down_scale)


def _integers(weight: Tensor, scales: Tensor) -> Tensor:
    """float64 [N, K] of code * scale from weight uint8 [N, K/2], scales uint8 [N, K/16]."""
    if int(scales.max()) > 0x7E:
        raise ValueError("a block scale is negative or NaN")
    codes = E2M1[unpack_codes(weight).int()].double() * 2
    return codes * (scales.view(torch.float8_e4m3fn).double() * 2.0**9).repeat_interleave(GROUP, dim=-1)


def quantise(values: Tensor) -> tuple[Tensor, npt.NDArray[np.int64]]:
    """float32 [rows, n], finite -> (int16 values as float64 [rows, n], exponents e int64 [rows])."""
    _, p = np.frexp(values.abs().amax(dim=1).double().numpy())
    e = np.where(values.abs().amax(dim=1).numpy() > 0, np.minimum(15 - p.astype(np.int64), MOST_EXPONENT), 0)
    scaled = np.rint(np.ldexp(values.double().numpy(), e[:, None]))
    return torch.from_numpy(np.clip(scaled, -INT16_LIMIT, INT16_LIMIT)), e


def rescale(sums: Tensor, scale: float, e: npt.NDArray[np.int64]) -> Tensor:
    """float32(sums) * float32(scale * 2^-(e + 10)) for exact sums float64 [rows, n] -> float32 [rows, n]."""
    with np.errstate(over="ignore", under="ignore"):
        factors = np.ldexp(np.float64(scale), -(e + 10)).astype(np.float32)
    # + 0.0: an integer zero has no sign, a float64 sum of zeros may have one.
    return (sums + 0.0).float() * torch.from_numpy(factors)[:, None]


def apply_expert(x: Tensor, expert: Expert) -> tuple[Tensor, Tensor]:
    """float32 x [rows, latent], finite -> (y float32 [rows, latent], overflowed bool [rows]).

    Where `overflowed`, an h is infinite and y means nothing: the token's output is NaN.
    """
    xq, e = quantise(x)
    v = rescale(xq @ expert.up.T, expert.up_scale, e)
    h = torch.where(v > 0, v * v, torch.zeros_like(v))
    overflowed = torch.isinf(h).any(dim=1)
    hq, f = quantise(torch.where(overflowed[:, None], torch.zeros_like(h), h))
    return rescale(hq @ expert.down.T, expert.down_scale, f), overflowed


def step(ids: Tensor, weights: Tensor, x: Tensor, expert: Callable[[int], Expert]) -> Tensor:
    """One MoE layer's routed experts: ids int32 [M, k], weights float32 [M, k], x float32 [M, latent] -> [M, latent].

    Column order of `ids` is router rank. `expert` gives the weights of an id and is asked once per id that has a finite
    row, in order of first mention. An id that occurs twice in a row counts twice.
    """
    bad = ~torch.isfinite(x).all(dim=1)
    results: dict[tuple[int, int], Tensor] = {}
    wanted: dict[int, list[int]] = {}
    for row in range(x.shape[0]):
        for id in ids[row].tolist() if not bad[row] else []:
            rows = wanted.setdefault(id, [])
            if row not in rows:
                rows.append(row)
    for id, rows in wanted.items():
        y, overflowed = apply_expert(x[rows], expert(id))
        bad[rows] |= overflowed
        results.update({(row, id): y[at] for at, row in enumerate(rows)})
    out = torch.full_like(x, torch.nan)
    for row in range(x.shape[0]):
        if not bad[row]:
            total = torch.zeros(x.shape[1], dtype=torch.float64)
            for rank, id in enumerate(ids[row].tolist()):
                total = total + weights[row, rank].double() * results[row, id].double()
            out[row] = total.float()
    return out
