"""A Mamba-2 layer's few tokens on a GPU (or in the interpreter), in two launches; the output projection is the third.

    in_proj    norm, projection to z, x, B, C and dt, causal convolution and SiLU of x, B, C; its state in place
    update     selective state update in place, read-out, gate and group norm

Formulas: reference.py; the time step is not clamped. States belong to the caller: `slots` names each token's sequence.
Tokens of one sequence lie next to each other, in their order: each begins where the one before it ends, with the bits
that it would have in a launch of its own. A channel or a state row is updated by the one program that computes it.

A token that is a draft leaves the states as they were before it. What a state's update reads of it is kept apart, some
KiB, with which settle.py makes up for it if the draft was right.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import exp, silu, softplus
from kernels.linear.dot import project
from kernels.linear.gpu import Linear, Norm, Tiling, tiling
from kernels.norm.gpu import gated_group_norm

Tensor = torch.Tensor

UPDATE_PART = 32  # state rows a program
UPDATE_WARPS = 4
FINGERPRINT = f"triton-f32 update{UPDATE_PART}x{UPDATE_WARPS}"


@triton.jit
def _earlier(y, distance: tl.constexpr):
    """y [T, TILE], each row replaced by the one `distance` before it, to the bit; zeros where there is none."""
    token = tl.arange(0, y.shape[0])[:, None]
    bits = y.to(tl.int32, bitcast=True)
    moved = tl.zeros(y.shape, tl.int32)
    for source in tl.static_range(y.shape[0] - distance):
        one = tl.sum(tl.where(token == source, bits, 0), axis=0)
        moved = tl.where(token == source + distance, one[None, :], moved)
    return moved.to(tl.float32, bitcast=True)


@triton.jit
def _convolve(
    y, row, mask, behind, last, state, conv_weight, conv_bias, FIRST: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution for the rows that are its channels, other rows as they are; y [T, TILE].

    state [T, 1] points to each token's [CHANNELS, TAPS - 1], the newest input last, and `behind` says how many tokens
    of the same sequence come before it here: what the state does not hold yet is theirs. A sequence's `last` shifts the
    state, in place, and so few elements lie in several threads each: every thread must have read a place, for any of
    the sequence's tokens, before it is written, hence the barriers. What is read goes ahead of what is written.
    """
    channel = (row - FIRST)[None, :]
    is_channel = (channel >= 0) & (channel < CHANNELS)
    window = state + channel * (TAPS - 1)
    mine = mask & is_channel
    mixed = tl.zeros(y.shape, tl.float32)
    for tap in tl.static_range(TAPS - 1):
        past = tl.load(window + tap + behind, mask=mine & (behind < TAPS - 1 - tap), other=0.0)
        if TAPS - 1 - tap < y.shape[0]:
            past = tl.where(behind < TAPS - 1 - tap, past, _earlier(y, TAPS - 1 - tap))
        tl.debug_barrier()
        mixed = tl.fma(past, tl.load(conv_weight + channel * TAPS + tap, mask=is_channel, other=0.0), mixed)
        if tap > 0:
            tl.store(window + tap - 1, past, mask=mine & last)
    mixed = tl.fma(y, tl.load(conv_weight + channel * TAPS + TAPS - 1, mask=is_channel, other=0.0), mixed)
    tl.store(window + TAPS - 2, y, mask=mine & last)
    return tl.where(is_channel, silu(mixed + tl.load(conv_bias + channel, mask=is_channel, other=0.0)), y)


@triton.jit
def advance(state, x, b, dt, dt_bias, a):
    """A state [rows, columns] behind one more token: x [rows], b [columns], the others numbers."""
    step = softplus(dt + dt_bias)
    return tl.fma(state, exp(step * a), (step * x)[:, None] * b[None, :])


@triton.jit(do_not_specialize_on_alignment=["x_single", "scales", "slots", "drafts", "kept"])
def in_proj_kernel(
    x,
    x_single,
    norm_weight,
    eps,
    weight,
    scales,
    factor,
    out,
    tokens,
    slots,
    conv_state,
    conv_stride,
    conv_weight,
    conv_bias,
    stop,
    drafts,
    kept,
    kept_stride,
    ROWS: tl.constexpr,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
    GUARDED: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    y = project(
        x, x_single, norm_weight, eps, weight, scales, factor, tl.minimum(row, ROWS - 1), tokens, K, FORMAT, True, T,
        UNITS, AHEAD,
    )  # fmt: skip
    token = tl.arange(0, T)[:, None]
    mask = (token < tokens) & (row < ROWS)[None, :]
    slot = tl.load(slots + tl.minimum(token, tokens - 1)).to(tl.int64)
    behind = tl.zeros([T, 1], tl.int32)
    for back in tl.static_range(1, T):
        behind += ((token >= back) & (tl.load(slots + tl.maximum(token - back, 0)) == slot)).to(tl.int32)
    last = (token == tokens - 1) | (tl.load(slots + tl.minimum(token + 1, tokens - 1)) != slot)
    if DRAFTS:
        draft = tl.load(drafts + tl.minimum(token, tokens - 1)) != 0
        last = (last | (tl.load(drafts + tl.minimum(token + 1, tokens - 1)) != 0)) & (draft == 0)
        kept_at = kept + slot * kept_stride + (row - FIRST)[None, :]
        is_kept = mask & draft & (row >= FIRST)[None, :]
        tl.store(kept_at, y, mask=is_kept & (row < FIRST + CHANNELS)[None, :])
    if GUARDED:
        last = last & (tl.load(stop) == 0)
    y = _convolve(
        y, row, mask, behind, last, conv_state + slot * conv_stride, conv_weight, conv_bias, FIRST, CHANNELS, TAPS
    )
    if DRAFTS:
        tl.store(kept_at + CHANNELS, y, mask=is_kept)
    tl.store(out + (token * ROWS + row[None, :]), y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots", "arrived", "drafts"])
def update_kernel(
    projected,
    slots,
    ssm_state,
    ssm_stride,
    a,
    d,
    dt_bias,
    y,
    arrived,
    norm_weight,
    out,
    eps,
    stop,
    drafts,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GUARDED: tl.constexpr,
    DRAFTS: tl.constexpr,
):
    """Program (part, head, token): PART rows of a head's state [HEAD_DIM, STATE], COLUMNS >= STATE a power of two.

    That of a sequence's first token goes through all its tokens here, the state in registers; the others' do nothing.
    The last program of a group to arrive norms a token's outputs, in an order that does not depend on who is last.
    """
    PARTS: tl.constexpr = (HEAD_DIM + PART - 1) // PART
    INNER: tl.constexpr = HEADS * HEAD_DIM
    head = tl.program_id(1)
    first = tl.program_id(2)
    tokens = tl.num_programs(2)
    group = head // (HEADS // GROUPS)
    row = tl.arange(0, PART)
    column = tl.arange(0, COLUMNS)
    in_rows = tl.program_id(0) * PART + row < HEAD_DIM
    in_columns = column < STATE
    inside = in_rows[:, None] & in_columns[None, :]
    begin = head * HEAD_DIM + tl.program_id(0) * PART  # of the rows, in the layer
    place = row[:, None] * STATE + column[None, :]
    slot = tl.load(slots + first)
    if tl.load(slots + first - 1, mask=first > 0, other=-1) != slot:
        state_at = ssm_state + slot.to(tl.int64) * ssm_stride + begin * STATE + place
        state = tl.load(state_at, mask=inside, other=0.0)
        token = first
        while tl.load(slots + token, mask=token < tokens, other=-1) == slot:
            source = projected + token * ROWS
            x = tl.load(source + INNER + begin + row, mask=in_rows, other=0.0)
            b = tl.load(source + 2 * INNER + group * STATE + column, mask=in_columns, other=0.0)
            c = tl.load(source + 2 * INNER + (GROUPS + group) * STATE + column, mask=in_columns, other=0.0)
            dt = tl.load(source + 2 * INNER + 2 * GROUPS * STATE + head)
            state = advance(state, x, b, dt, tl.load(dt_bias + head), tl.load(a + head))
            read = tl.sum(state * c[None, :], axis=1)
            tl.store(y + token * INNER + begin + row, tl.fma(x, tl.load(d + head), read), mask=in_rows)
            token += 1
            if DRAFTS:  # the state is that behind the last token that is none
                ends = tl.load(slots + token, mask=token < tokens, other=-1) != slot
                ends = ends | (tl.load(drafts + token, mask=token < tokens, other=1) != 0)
                stays = ends & (tl.load(drafts + token - 1) == 0)
                if GUARDED:
                    stays = stays & (tl.load(stop) == 0)
                tl.store(state_at, state, mask=inside & stays)
        if not DRAFTS:
            tl.store(state_at, state, mask=inside & (tl.load(stop) == 0) if GUARDED else inside)

        tl.debug_barrier()  # all of y is stored before the arrival is announced, and read after the last one
        for done in range(first, token):
            ticket = arrived + done * GROUPS + group
            if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS * (HEADS // GROUPS) - 1:
                gated_group_norm(
                    y + done * INNER,
                    projected + done * ROWS,
                    norm_weight,
                    out + done * INNER,
                    group,
                    eps,
                    INNER,
                    INNER // GROUPS,
                    GROUP_PADDED,
                )
                tl.store(ticket, 0)


@dataclass(frozen=True)
class Sizes:
    """Of a Mamba-2 layer. The projection's rows are z, x, B, C, dt; the convolution's channels x, B, C."""

    heads: int
    head_dim: int
    state: int
    groups: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def rows(self) -> int:
        return self.inner + self.channels + self.heads

    @property
    def kept(self) -> int:
        """Numbers that are kept of a draft: its inputs of the convolution, what that makes of them, and dt."""
        return 2 * self.channels + self.heads


@dataclass(frozen=True)
class Drafts:
    """`rows` int32 [M]: not 0 where a token is a draft, of which a sequence has at most one, its last. `kept` float32
    [slots, Sizes.kept], with any slot stride, takes what is kept of each."""

    rows: Tensor
    kept: Tensor


def in_proj(
    x: Tensor,
    norm: Norm,
    weights: Linear,
    sizes: Sizes,
    conv_weight: Tensor,
    conv_bias: Tensor,
    conv_state: Tensor,
    slots: Tensor,
    out: Tensor,
    configuration: Tiling | None = None,
    stop: Tensor | None = None,
    drafts: Drafts | None = None,
) -> None:
    """Queue the projection and the convolution.

    x float32 [M, hidden] in octet order -> out float32 [M, rows] in plain order: z, convolved x B C, dt.
    conv_weight float32 [channels, taps], conv_bias [channels]; conv_state float32 [slots, channels, taps - 1] with any
    slot stride; slots int32 [M], equal ones next to each other. The state stays as it is if `stop` int32 [1] is set by
    then. Without `drafts` no token is one.
    """
    tokens = x.shape[0]
    assert (weights.rows, weights.columns) == (sizes.rows, x.shape[1])
    assert conv_state[0].is_contiguous()
    chosen = configuration or tiling(weights.format, weights.rows, weights.columns, tokens)
    in_proj_kernel[(triton.cdiv(sizes.rows, chosen.tile),)](
        x,
        x,
        norm.weight,
        norm.eps,
        weights.weight,
        weights.scales,
        weights.factor,
        out,
        tokens,
        slots,
        conv_state,
        conv_state.stride(0),
        conv_weight,
        conv_bias,
        x if stop is None else stop,
        slots if drafts is None else drafts.rows,
        x if drafts is None else drafts.kept,
        0 if drafts is None else drafts.kept.stride(0),
        ROWS=sizes.rows,
        FIRST=sizes.inner,
        CHANNELS=sizes.channels,
        TAPS=conv_weight.shape[1],
        FORMAT=weights.format,
        TILE=chosen.tile,
        K=weights.columns,
        T=triton.next_power_of_2(tokens),
        UNITS=32 * chosen.warps,
        AHEAD=chosen.ahead,
        GUARDED=stop is not None,
        DRAFTS=drafts is not None,
        num_warps=chosen.warps,
        enable_fp_fusion=False,
    )


def update(
    projected: Tensor,
    sizes: Sizes,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    slots: Tensor,
    norm_weight: Tensor,
    eps: float,
    y: Tensor,
    arrived: Tensor,
    out: Tensor,
    stop: Tensor | None = None,
    drafts: Drafts | None = None,
    part: int = UPDATE_PART,
    warps: int = UPDATE_WARPS,
) -> None:
    """Queue the state update, the read-out y and out = group norm of y * silu(z).

    projected float32 [M, rows], from `in_proj`; a = -e^A_log, d and dt_bias float32 [heads]; ssm_state float32 [slots,
    heads, head_dim, state] with any slot stride; slots int32 [M] as for `in_proj`; norm_weight float32 [inner] in plain
    order; y float32 [M, inner] in plain order; out float32 [M, inner] in octet order. `arrived` int32 [M, groups] must
    be zero and is zero again afterwards. The state stays as it is if `stop` int32 [1] is set by then.
    `drafts` as for `in_proj`. `part` and `warps` are given by measurements only.
    """
    assert ssm_state[0].is_contiguous()
    update_kernel[(triton.cdiv(sizes.head_dim, part), sizes.heads, projected.shape[0])](
        projected,
        slots,
        ssm_state,
        ssm_state.stride(0),
        a,
        d,
        dt_bias,
        y,
        arrived,
        norm_weight,
        out,
        eps,
        y if stop is None else stop,
        slots if drafts is None else drafts.rows,
        ROWS=sizes.rows,
        HEADS=sizes.heads,
        HEAD_DIM=sizes.head_dim,
        STATE=sizes.state,
        GROUPS=sizes.groups,
        PART=part,
        COLUMNS=triton.next_power_of_2(sizes.state),
        GROUP_PADDED=triton.next_power_of_2(sizes.inner // sizes.groups),
        GUARDED=stop is not None,
        DRAFTS=drafts is not None,
        num_warps=warps,
        enable_fp_fusion=False,
    )
