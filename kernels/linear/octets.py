"""The order in which activations that feed a linear layer lie in GPU memory. Owns nothing else.

*Octet order*: a vector of K values (K a multiple of 8) is stored as [8, K/8], value k at [k % 8, k // 8]. A thread that
unpacks 16 bytes of weights (32 NVFP4, 16 FP8 or 8 BF16 values) then finds its inputs in eight contiguous loads, next to
those of its neighbours, whatever the weight's format. Whoever writes such a vector scatters it; nobody transposes.
"""

import torch
import triton
import triton.language as tl  # noqa: F401 - the interpreter looks for it

Tensor = torch.Tensor


def to_octets(x: Tensor) -> Tensor:
    """[..., K] -> the same values in octet order, [..., K], contiguous."""
    return x.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2).contiguous()


def from_octets(x: Tensor) -> Tensor:
    """The inverse of `to_octets`."""
    return x.unflatten(-1, (8, -1)).transpose(-1, -2).flatten(-2).contiguous()


@triton.jit
def octet_place(k, K):
    """Where value k of a vector of K lies."""
    return (k % 8) * (K // 8) + k // 8
