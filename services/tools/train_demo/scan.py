"""Mamba-2 over whole rows of documents that know nothing of each other: recurrence in chunks, convolution.

    S_t = exp(A dt_t) S_(t-1) + dt_t x_t B_t^T        y_t = S_t C_t        (S = 0 before a document's first token)

Equal to kernels/mamba/reference.py's token by token up to rounding. Plain torch, so that gradients come by themselves;
owns no weights.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad, rms_norm, silu, softplus


def mix(
    gate: Tensor,
    mixed: Tensor,
    dt: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor,
    dt_bias: Tensor,
    a_log: Tensor,
    d: Tensor,
    norm_weight: Tensor,
    documents: Tensor,
    groups: int,
    eps: float,
    chunk: int,
) -> Tensor:
    """All of a Mamba layer between its two projections, in mixed's dtype: gate [rows, tokens, inner], mixed [rows,
    tokens, inner + 2 * groups * state] and dt [rows, tokens, heads] are the parts of the first one's output."""
    inner, heads, kind = gate.shape[-1], dt.shape[-1], mixed.dtype
    shared = (mixed.shape[-1] - inner) // 2
    mixed = silu(convolve(mixed, conv_weight, conv_bias, documents)).to(kind)
    values, b, c = torch.split(mixed, [inner, shared, shared], dim=-1)
    values = torch.unflatten(values, -1, (heads, -1))
    b, c = (torch.unflatten(t, -1, (groups, -1)) for t in (b, c))
    y = scan(values, softplus(dt.float() + dt_bias), -torch.exp(a_log), b, c, documents, chunk)
    y = (y + d.unsqueeze(-1) * values).flatten(2) * silu(gate.float())
    y = rms_norm(torch.unflatten(y, -1, (groups, -1)), (inner // groups,), None, eps).flatten(-2)
    return (y * norm_weight).to(kind)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, documents: Tensor) -> Tensor:
    """Depthwise causal convolution of x [rows, tokens, channels] in float32; weight [channels, 1, taps].

    A tap that lies in another document (documents int [rows, tokens]) counts as zero, as at a text's start.
    """
    taps = weight.shape[-1]
    values = x.float()
    out = torch.addcmul(bias.float(), values, weight[:, 0, taps - 1].float())
    for back in range(1, min(taps, x.shape[1])):
        same = (documents[:, back:] == documents[:, :-back]).unsqueeze(-1)
        shifted = pad(values[:, :-back] * same, (0, 0, back, 0))
        out = torch.addcmul(out, shifted, weight[:, 0, taps - 1 - back].float())
    return out


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, documents: Tensor, chunk: int) -> Tensor:
    """y float32 [rows, tokens, heads, head_dim].

    x [rows, tokens, heads, head_dim]; dt float32 [rows, tokens, heads]; a float32 [heads], negative; b, c [rows,
    tokens, groups, state]; head h uses group h // (heads / groups). documents int [rows, tokens], equal within one and
    never used again. Products run in x's dtype, decays in float32.
    """
    rows, tokens, heads, size = x.shape
    groups = b.shape[2]
    short = -tokens % chunk
    if short:  # what is appended is a document of its own, so that it changes nothing
        x, dt, b, c = (pad(t, (0, 0) * (t.dim() - 2) + (0, short)) for t in (x, dt, b, c))
        documents = pad(documents, (0, short), value=-1)
    chunks = (tokens + short) // chunk
    per = heads // groups
    kind = x.dtype

    def cut(t: Tensor) -> Tensor:
        return torch.unflatten(t, 1, (chunks, chunk))

    def by_group(t: Tensor, heads_at: int) -> Tensor:
        return torch.unflatten(t, heads_at, (groups, per))

    documents = cut(documents)
    total = cut(dt * a).cumsum(2).permute(0, 1, 3, 2)  # [rows, chunks, heads, chunk]: log decay from the chunk's start
    weighed = by_group(cut(x * dt.unsqueeze(-1).to(kind)), 3)  # [r, n, t, g, p, d]
    b, c = cut(b), cut(c)

    # Within a chunk: token i takes from j <= i of the same document.
    same = documents.unsqueeze(3) == documents.unsqueeze(2)
    seen = same & torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~seen.unsqueeze(2), -torch.inf).exp().to(kind)
    scores = torch.einsum("rnigs,rnjgs->rngij", c, b)
    mixed = scores.unsqueeze(3) * by_group(decay, 2)
    y = torch.einsum("rngpij,rnjgpd->rnigpd", mixed, weighed)

    # What a chunk leaves behind: of its last token's document alone.
    last = documents[:, :, -1]
    kept = (documents == last.unsqueeze(-1)).unsqueeze(2)
    to_end = (total[..., -1:] - total).masked_fill(~kept, -torch.inf).exp().to(kind)
    left = torch.einsum("rnjgs,rnjgpd->rngpsd", b, weighed * by_group(to_end, 2).permute(0, 1, 4, 2, 3)[..., None])

    # What a chunk z finds: the leavings of every earlier chunk c whose document still runs at the end of z - 1.
    ends = pad(total[..., -1].cumsum(1), (0, 0, 1, 0))  # [rows, chunks + 1, heads]
    earlier = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).tril(-1)
    runs = earlier & (last.unsqueeze(1) == pad(last, (1, 0), value=-2)[:, :chunks].unsqueeze(2))
    between = (ends[:, :chunks].unsqueeze(2) - ends[:, 1:].unsqueeze(1)).masked_fill(~runs.unsqueeze(-1), -torch.inf)
    carried = by_group(between.exp().to(kind), 3)
    found = torch.einsum("rzcgp,rcgpsd->rzgpsd", carried, left)
    begins = pad(last, (1, 0), value=-2)[:, :chunks].unsqueeze(-1) == documents
    from_start = total.masked_fill(~begins.unsqueeze(2), -torch.inf).exp().to(kind)
    reached = torch.einsum("rnigs,rngpsd->rnigpd", c, found)
    y = y + reached * by_group(from_start, 2).permute(0, 1, 4, 2, 3).unsqueeze(-1)
    return y.float().flatten(1, 2)[:, :tokens].reshape(rows, tokens, heads, size)
