"""The choice of experts on a GPU (or in the interpreter): one program a token, from the gate's logits.

The logits come from `kernels/linear/gpu.py`, in one launch with the latent projection, which reads the same input. The
outputs may be page-locked host memory: whoever waits for the ids need not wait for a copy.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import sigmoid

Tensor = torch.Tensor

EPSILON = 1e-20  # as in reference.py
WARPS = 4
FINGERPRINT = f"triton-f32 choose{WARPS}"


@triton.jit(do_not_specialize_on_alignment=["ids", "weights"])
def choose_kernel(
    logits,
    bias,
    ids,
    weights,
    scale,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    RANKS: tl.constexpr,
    NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """ids int32 and weights float32 [M, TOP_K] in router rank. RANKS is TOP_K or the next power of two.

    An expert's key orders by choice score, then by lowest id: the score's bits, made to order as integers do, above the
    id counted from the end.
    """
    token = tl.program_id(0)
    expert = tl.arange(0, PADDED)
    inside = expert < EXPERTS
    score = sigmoid(tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0))
    choice = score + tl.load(bias + expert, mask=inside, other=0.0)
    bits = tl.where(choice == choice, choice, float("inf")).to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(inside, ordered, -0x80000000).to(tl.int64) * 0x100000000 + (PADDED - 1 - expert)
    best = tl.topk(key, RANKS)
    rank = tl.arange(0, RANKS)
    chosen = rank < TOP_K
    id = PADDED - 1 - (best & 0x7FFFFFFF).to(tl.int32)
    weight = sigmoid(tl.load(logits + token * EXPERTS + id, mask=chosen, other=0.0))
    if NORMALISE:
        weight = tl.div_rn(weight, tl.sum(tl.where(chosen, weight, 0.0), axis=0) + EPSILON)
    tl.store(ids + token * TOP_K + rank, id, mask=chosen)
    tl.store(weights + token * TOP_K + rank, weight * scale, mask=chosen)


def choose(
    logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool, ids: Tensor, weights: Tensor
) -> None:
    """Queue reference.choose: logits float32 [M, E], bias float32 [E] -> ids int32 and weights float32 [M, top_k].

    A NaN among the logits counts as the highest score: the ids are still valid, different, and the weights NaN.
    """
    tokens, experts = logits.shape
    ranks = triton.next_power_of_2(top_k)
    choose_kernel[(tokens,)](
        logits,
        bias,
        ids,
        weights,
        scale,
        EXPERTS=experts,
        PADDED=max(ranks, triton.next_power_of_2(experts)),
        TOP_K=top_k,
        RANKS=ranks,
        NORMALISE=normalise,
        EPSILON=EPSILON,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
