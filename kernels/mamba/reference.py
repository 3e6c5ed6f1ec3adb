"""The recurrent parts of a Mamba-2 layer: the definition. Formulas: Dao & Gu 2024, equation 1 and section 7.

Both functions carry a state from token to token and update it in place. M tokens at once are by definition M single
tokens one after the other; the bits are the same, so a prompt may be cut anywhere. Float32 throughout.
The time step is not clamped.
"""

import torch
from torch import Tensor

from kernels.elementary.reference import exp, silu, softplus, total

STATES_AT_ONCE = 1 << 19  # elements; how many states are kept for one read-out, for speed only


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A depthwise causal convolution, then SiLU.

    x [M, C], weight [C, K], bias [C] -> [M, C]. `state` [C, K-1] holds the last K-1 inputs, the newest last.
    """
    window = torch.cat([state.T, x])  # [K-1 + M, C]
    taps = weight.shape[1]
    mixed = window[: len(x)] * weight[:, 0]
    for tap in range(1, taps):
        mixed = mixed + window[tap : tap + len(x)] * weight[:, tap]
    state.copy_(window[len(x) :].T)
    return silu(mixed + bias)


def selective_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor
) -> Tensor:
    """For each token: step = softplus(dt + dt_bias); S = S * e^(a step) + (step x) outer b; y = S c + d x.

    x [M, heads, P], dt [M, heads], b and c [M, groups, N] (head h uses group h // (heads / groups)), a = -e^A_log,
    d and dt_bias [heads] -> y [M, heads, P]. `state` [heads, P, N] is S.
    """
    heads = x.shape[1]
    step = softplus(dt + dt_bias)
    decay = exp(step * a)[:, :, None, None]
    scaled = step.unsqueeze(2) * x
    b = b.repeat_interleave(heads // b.shape[1], dim=1)
    c = c.repeat_interleave(heads // c.shape[1], dim=1)
    outputs = []
    at_once = max(1, STATES_AT_ONCE // state.numel())
    for start in range(0, len(x), at_once):
        block = slice(start, start + at_once)
        states = scaled[block, :, :, None] * b[block, :, None, :]  # becomes S after each token of the block
        for token, input_ in enumerate(states, start):
            state.mul_(decay[token]).add_(input_)
            input_.copy_(state)
        outputs.append(total(states.mul_(c[block, :, None, :]), dim=3))
    return torch.cat(outputs) + d[:, None] * x
