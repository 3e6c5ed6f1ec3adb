"""The router of a mixture-of-experts layer: the definition.

Sigmoid scores; experts are chosen by score + correction bias, weighted by the score alone (DeepSeek-V3, section 2.1.2).
Float32 throughout. A row's bits do not depend on the other rows.
"""

import torch
from torch import Tensor

from kernels.elementary.reference import sigmoid
from kernels.linear.reference import linear

EPSILON = 1e-20  # added to the sum of the chosen scores before the division


def route(x: Tensor, gate: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """x [M, H], gate [E, H], bias [E] -> ids int32 [M, k], weights [M, k], both in router rank: see `choose`."""
    return choose(linear(x, gate), bias, top_k, scale, normalise)


def choose(logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
    """logits [M, E], bias [E] -> ids int32 [M, k], weights [M, k].

    Router rank: by sigmoid(logit) + bias, highest first, of equal ones the lowest id first. Weights are the scores
    without the bias, divided by their sum (taken in rank order) if `normalise`, times `scale`.
    """
    scores = sigmoid(logits)
    ids = torch.sort(scores + bias, dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if normalise:
        denominator = weights[:, 0]
        for rank in range(1, top_k):
            denominator = denominator + weights[:, rank]
        weights = weights / (denominator + EPSILON).unsqueeze(1)
    return ids.int(), weights * scale
