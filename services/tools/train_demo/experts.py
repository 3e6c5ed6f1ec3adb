"""The routed experts of one layer for all tokens at once: tokens are sorted by expert, each expert's are one matrix.

Every expert gets room for as many tokens as the busiest one has, so nothing is ever dropped. Sorting and adding up are
gathers in both directions, so that gradients are the same bits every time. Owns the arithmetic, not the weights.
"""

from typing import Any

import torch
from torch import Tensor

# Room grows in steps, so that sizes repeat and a GPU's allocator finds memory again; a step is little beside the mean.
_LEAST_STEP_TOKENS = 64
_STEPS_OF_MEAN = 16


def places(ids: Tensor, experts: int) -> tuple[Tensor, int, Tensor]:
    """From the ids of experts [tokens, k] to each choice's row in [experts * room], the room, and tokens per expert."""
    flat = ids.reshape(-1)
    counts = torch.bincount(flat, minlength=experts)
    step = max(_LEAST_STEP_TOKENS, len(flat) // experts // _STEPS_OF_MEAN)
    room = -(-int(counts.max()) // step) * step
    order = flat.argsort(stable=True)
    begin = counts.cumsum(0) - counts
    rank = torch.arange(len(flat), device=ids.device) - begin[flat[order]]
    rows = torch.empty_like(flat)
    rows[order] = flat[order] * room + rank
    return rows.view(ids.shape), room, counts


class _Sort(torch.autograd.Function):
    """x [tokens, d] -> [rows, d], zeros where no token is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, of_row: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        padded = torch.cat((x, x.new_zeros(1, x.shape[1])))
        return padded[of_row // rows.shape[1]]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return gradients[0][rows].sum(1), None, None


class _Add(torch.autograd.Function):
    """y [rows, d], weights [tokens, k] -> [tokens, d]: the weighted sum of each token's k rows."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, rows: Tensor, of_row: Tensor) -> Tensor:
        ctx.save_for_backward(y, weights, rows, of_row)
        return torch.einsum("tk,tkd->td", weights.to(y.dtype), y[rows])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y, weights, rows, of_row = ctx.saved_tensors
        gradient, choices = gradients[0], weights.shape[1]
        of_weights = torch.einsum("td,tkd->tk", gradient, y[rows]).to(weights.dtype)
        padded = torch.cat((gradient, gradient.new_zeros(1, gradient.shape[1])))
        scale = torch.cat((weights.reshape(-1), weights.new_zeros(choices)))
        return padded[of_row // choices] * scale[of_row].to(y.dtype).unsqueeze(1), of_weights, None, None


def run(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over each token's experts of weight * down(relu(up x)^2): x [tokens, latent], up [experts, width,
    latent], down [experts, latent, width], ids and weights [tokens, k].

    Returns it [tokens, latent], tokens per expert [experts], and the values behind relu [experts, room, width].
    """
    experts, choices = up.shape[0], ids.numel()
    rows, room, counts = places(ids, experts)
    of_row = torch.full((experts * room,), choices, device=x.device)
    of_row[rows.reshape(-1)] = torch.arange(choices, device=x.device)
    sorted_x = _sorted(x, rows, of_row).view(experts, room, -1)
    active = torch.relu(torch.bmm(sorted_x, up.transpose(1, 2)))
    y = torch.bmm(active.square(), down.transpose(1, 2)).flatten(0, 1)
    out: Tensor = _Add.apply(y, weights, rows, of_row)  # type: ignore[no-untyped-call]
    return out, counts, active


def _sorted(x: Tensor, rows: Tensor, of_row: Tensor) -> Tensor:
    out: Tensor = _Sort.apply(x, rows, of_row)  # type: ignore[no-untyped-call]
    return out
