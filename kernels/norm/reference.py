"""Root-mean-square norms: the definition. Formulas: Zhang & Sennrich 2019; gate and groups as in Mamba-2.

Float32 throughout. A row's bits do not depend on the other rows.
"""

from torch import Tensor

from kernels.elementary.reference import silu, sqrt, total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [M, H] / sqrt(mean(x^2) + eps) * weight [H] -> [M, H]."""
    return _normalise(x, eps) * weight


def gated_group_rms_norm(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float) -> Tensor:
    """The gate comes first: u = y * silu(z), then the norm of each `group` consecutive columns, then the weight.

    y, z [M, N], weight [N] -> [M, N]; N is a multiple of `group`.
    """
    gated = y * silu(z)
    return _normalise(gated.reshape(len(y), -1, group), eps).flatten(1) * weight


def _normalise(x: Tensor, eps: float) -> Tensor:
    mean = total(x * x, dim=-1) / x.shape[-1]
    return x / sqrt(mean + eps).unsqueeze(-1)
