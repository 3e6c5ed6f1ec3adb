"""A sequence's states behind its draft, once that is known to be right, in all Mamba-2 layers at once, on a GPU (or in
the interpreter).

A draft has left the states alone (gpu.py); what was kept of it goes through the same formula as it would have there,
with the same bits. That reads and writes a state once more, only for drafts that were right. The other ways to take
a draft back cost more: a copy of the state before each draft as much traffic, for wrong ones too; a second state, which
takes the place of the first, no traffic but as much of the card's memory as the first.
"""

import torch
import triton
import triton.language as tl

from kernels.mamba.gpu import UPDATE_PART, UPDATE_WARPS, Sizes, advance

Tensor = torch.Tensor

CHANNELS_TILE = 512


@triton.jit(do_not_specialize_on_alignment=["kept", "conv_state"])
def shift_kernel(kept, conv_state, KEPT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, TILE: tl.constexpr):
    """Program (tile, layer): the windows of TILE channels take one more input. A channel is one thread's."""
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    layer = tl.program_id(1).to(tl.int64)
    mask = channel < CHANNELS
    window = conv_state + layer * (CHANNELS * (TAPS - 1)) + channel * (TAPS - 1)
    for tap in tl.static_range(TAPS - 2):
        tl.store(window + tap, tl.load(window + tap + 1, mask=mask), mask=mask)
    tl.store(window + TAPS - 2, tl.load(kept + layer * KEPT + channel, mask=mask), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["kept", "ssm_state"])
def advance_kernel(
    kept,
    ssm_state,
    a,
    dt_bias,
    KEPT: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (part, head, layer): PART rows of a head's state, as update_kernel has them."""
    head = tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    group = head // (HEADS // GROUPS)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    column = tl.arange(0, COLUMNS)
    inside = (row < HEAD_DIM)[:, None] & (column < STATE)[None, :]
    state_at = ssm_state + (layer * HEADS + head) * (HEAD_DIM * STATE) + row[:, None] * STATE + column[None, :]
    source = kept + layer * KEPT + CHANNELS  # x, B, C, dt
    x = tl.load(source + head * HEAD_DIM + row, mask=row < HEAD_DIM, other=0.0)
    b = tl.load(source + HEADS * HEAD_DIM + group * STATE + column, mask=column < STATE, other=0.0)
    dt = tl.load(source + CHANNELS + head)
    state = tl.load(state_at, mask=inside, other=0.0)
    state = advance(state, x, b, dt, tl.load(dt_bias + layer * HEADS + head), tl.load(a + layer * HEADS + head))
    tl.store(state_at, state, mask=inside)


def settle(kept: Tensor, sizes: Sizes, a: Tensor, dt_bias: Tensor, conv_state: Tensor, ssm_state: Tensor) -> None:
    """Queue one sequence's update, in place. All float32 and contiguous, of all Mamba layers: kept [layers, Sizes.kept]
    as `in_proj` filled it; a = -e^A_log and dt_bias [layers, heads]; conv_state [layers, channels, taps - 1]; ssm_state
    [layers, heads, head_dim, state]."""
    layers = len(kept)
    assert all(each.is_contiguous() for each in (kept, a, dt_bias, conv_state, ssm_state))
    assert kept.shape[1] == sizes.kept
    shift_kernel[(triton.cdiv(sizes.channels, CHANNELS_TILE), layers)](
        kept,
        conv_state,
        KEPT=sizes.kept,
        CHANNELS=sizes.channels,
        TAPS=conv_state.shape[2] + 1,
        TILE=CHANNELS_TILE,
    )
    advance_kernel[(triton.cdiv(sizes.head_dim, UPDATE_PART), sizes.heads, layers)](
        kept,
        ssm_state,
        a,
        dt_bias,
        KEPT=sizes.kept,
        CHANNELS=sizes.channels,
        HEADS=sizes.heads,
        HEAD_DIM=sizes.head_dim,
        STATE=sizes.state,
        GROUPS=sizes.groups,
        PART=UPDATE_PART,
        COLUMNS=triton.next_power_of_2(sizes.state),
        num_warps=UPDATE_WARPS,
        enable_fp_fusion=False,
    )
