"""The arithmetic of the routed experts of a sweep in plain torch: what prefill.py must agree with.

    x is float16
    v[n] = float32(sum_k W_up[n, k] x[k]) * up_scale / 8    h[n] = float16(v > 0 ? v * v : 0)
    y[j] = float16(float32(sum_n W_down[j, n] h[n]) * down_scale)
    out[j] = 64 * sum in router-rank order of w_k * y_k[j], float32, every product and every sum rounded

h and y are 2^-6 of what they stand for, so that up to 4 million fit; what is larger but finite counts as that.
W is E2M1 times E4M3, exact in float16. The sums are in float64 here and in float32 there: where they are exact in both
the two are equal, elsewhere they differ by what float32 sums lose. NaN and infinity follow the rules of floating point.
The experts of decode (reference.py) have another arithmetic; the two agree within float16's precision.
"""

from collections.abc import Callable

import torch

from kernels.experts.reference import Expert

Tensor = torch.Tensor

_INTEGERS = 2.0**10  # how much larger an Expert's integers are than E2M1 times E4M3


def up(x: Tensor, expert: Expert) -> Tensor:
    """float16 [rows, latent] -> h float16 [rows, width]."""
    value = (x.double() @ (expert.up.T / _INTEGERS)).float() * torch.tensor(expert.up_scale / 8, dtype=torch.float32)
    return half(torch.where(value <= 0, 0.0, value * value))


def down(h: Tensor, expert: Expert) -> Tensor:
    """float16 [rows, width] -> y float16 [rows, latent]."""
    value = (h.double() @ (expert.down.T / _INTEGERS)).float() * torch.tensor(expert.down_scale, dtype=torch.float32)
    return half(value)


def half(x: Tensor) -> Tensor:
    """float32 -> float16, finite numbers to finite ones."""
    return torch.where(x.isfinite(), x.clamp(-65504, 65504), x).half()


def combine(y: Tensor, weights: Tensor) -> Tensor:
    """y float16 [T * top_k, latent], weights float32 [T, top_k] -> float32 [T, latent]."""
    results = y.float().view(*weights.shape, -1)
    total = torch.zeros_like(results[:, 0])
    for rank in range(weights.shape[1]):
        total = total + weights[:, rank, None] * results[:, rank]
    return 64 * total


def step(ids: Tensor, weights: Tensor, x: Tensor, expert: Callable[[int], Expert]) -> Tensor:
    """One MoE layer: ids int32 [T, top_k] all different within a row, weights float32 [T, top_k], x float16
    [T, latent] -> float32 [T, latent]. `expert` gives the weights of an id that occurs."""
    y = x.new_empty(ids.numel(), x.shape[1])
    for id in sorted(set(ids.flatten().tolist())):
        lookups = (ids.flatten() == id).nonzero().flatten()
        one = expert(id)
        y[lookups] = down(up(x[lookups // ids.shape[1]], one), one)
    return combine(y, weights)
