"""A training step's large parts as functions of tensors alone, with fixed shapes, so that torch.compile makes each of
them a few kernels: on a GPU a step is mostly passes over memory. The network's own modules are the definition.

Routed experts are computed for every token and weighed with zero where not chosen: eight times the products, and still
less time than sorting tokens takes. Owns no weights; `kind` is the dtype of matrix products.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm, scaled_dot_product_attention

from services.tools.train_demo import scan
from services.tools.train_demo.documents import NOT_SCORED


def mamba(
    x: Tensor,
    norm: Tensor,
    in_proj: Tensor,
    out_proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    gated_norm: Tensor,
    documents: Tensor,
    groups: int,
    eps: float,
    chunk: int,
    kind: torch.dtype,
) -> Tensor:
    """A whole layer: float32 x [rows, tokens, hidden] and what it adds."""
    inner, heads = gated_norm.shape[0], dt_bias.shape[0]
    projected = linear(rms_norm(x, x.shape[-1:], norm, eps).to(kind), in_proj.to(kind))
    gate, mixed, dt = torch.split(projected, [inner, projected.shape[-1] - inner - heads, heads], dim=-1)
    y = scan.mix(gate, mixed, dt, conv_weight, conv_bias, dt_bias, a_log, d, gated_norm, documents, groups, eps, chunk)
    return x + linear(y, out_proj.to(kind)).float()


def attention(
    x: Tensor,
    norm: Tensor,
    q_proj: Tensor,
    k_proj: Tensor,
    v_proj: Tensor,
    o_proj: Tensor,
    seen: Tensor,
    heads: int,
    eps: float,
    kind: torch.dtype,
) -> Tensor:
    size = q_proj.shape[0] // heads
    read = rms_norm(x, x.shape[-1:], norm, eps).to(kind)
    query, key, value = (
        torch.unflatten(linear(read, one.to(kind)), -1, (-1, size)).transpose(1, 2) for one in (q_proj, k_proj, v_proj)
    )
    key, value = (t.repeat_interleave(heads // t.shape[1], dim=1) for t in (key, value))
    attended = scaled_dot_product_attention(query, key, value, attn_mask=seen)
    return x + linear(attended.transpose(1, 2).flatten(2), o_proj.to(kind)).float()


def moe(
    x: Tensor,
    norm: Tensor,
    gate: Tensor,
    bias: Tensor,
    fc1: Tensor,
    fc2: Tensor,
    up: Tensor,
    down: Tensor,
    shared_up: Tensor,
    shared_down: Tensor,
    top_k: int,
    normalise: bool,
    scale: float,
    eps: float,
    kind: torch.dtype,
    sparsity: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The layer's output, tokens per expert, the share of zeros behind relu, and what network.Pass calls sparsity (0
    unless wanted). Experts whose scores tie for the last place are all chosen."""
    experts, width, latent_size = up.shape
    read = rms_norm(x.flatten(0, 1), x.shape[-1:], norm, eps)
    scores = torch.sigmoid(linear(read, gate))
    choice = scores.detach() + bias
    chosen = choice >= choice.topk(top_k, dim=-1).values[:, -1:]
    weights = torch.where(chosen, scores, 0.0)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = weights * scale
    read = read.to(kind)
    latent = linear(read, fc1.to(kind))
    active = torch.relu(linear(latent, up.to(kind).flatten(0, 1)).float().view(-1, experts, width))
    weighed = (active.square() * weights.unsqueeze(-1)).to(kind).flatten(1)
    routed = linear(weighed, down.to(kind).permute(1, 0, 2).reshape(latent_size, -1))
    shared = torch.relu(linear(read, shared_up.to(kind))).square()
    out = linear(routed, fc2.to(kind)).float() + linear(shared, shared_down.to(kind)).float()
    counts = chosen.sum(0)
    taken = counts.sum() * width
    with torch.no_grad():
        zeros = 1 - ((active > 0) & chosen.unsqueeze(-1)).sum() / taken
    dense = zeros.new_zeros(())
    if sparsity:
        shares = active.sum(-1) / (active.square().sum(-1).sqrt() + 1e-6) * width**-0.5
        dense = torch.where(chosen, shares, 0.0).sum() / counts.sum()
    return x + out.view(x.shape), counts, zeros, dense


def head(states: Tensor, lm_head: Tensor, targets: Tensor, kind: torch.dtype) -> Tensor:
    """The mean loss of those that are scored: states [rows, tokens, hidden], targets int64 [rows, tokens]."""
    logits = linear(states.to(kind), lm_head.to(kind)).float()
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_SCORED)


@dataclass(frozen=True)
class Fused:
    """None: that part is left to the network's modules."""

    kind: torch.dtype
    mamba: Callable[..., Tensor] | None = None
    attention: Callable[..., Tensor] | None = None
    moe: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] | None = None
    head: Callable[..., Tensor] | None = None


FUNCTIONS: dict[str, Callable[..., object]] = {"mamba": mamba, "attention": attention, "moe": moe, "head": head}


def plain(kind: torch.dtype) -> Fused:
    """The functions as they are, for tests."""
    return Fused(kind, mamba, attention, moe, head)


def compiled(kind: torch.dtype, names: tuple[str, ...]) -> Fused | None:
    if not names:
        return None
    return Fused(kind, **{name: torch.compile(FUNCTIONS[name], dynamic=False) for name in names})  # type: ignore[arg-type]
