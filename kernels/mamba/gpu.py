"""A Mamba-2 layer's one token on a GPU (or in the interpreter), in two launches; the output projection is the third.

    in_proj    norm, projection to z, x, B, C and dt, causal convolution and SiLU of x, B, C; its state in place
    update     selective state update in place, read-out, gate and group norm

Formulas: reference.py; the time step is not clamped. States belong to the caller: `slots` names each token's sequence,
and a sequence may be in a launch once. A channel or a state row is updated by the one program that computes it.
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
def _convolve(
    y, row, mask, writable, state, conv_weight, conv_bias, FIRST: tl.constexpr, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """SiLU of the convolution for the rows that are its channels, other rows as they are; y [T, TILE].

    state [T, 1] points to each token's [CHANNELS, TAPS - 1], the newest input last. It is shifted in place, and so few
    elements lie in several threads each: every thread must have read a tap before any writes it, hence the barriers.
    """
    channel = (row - FIRST)[None, :]
    is_channel = (channel >= 0) & (channel < CHANNELS)
    window = state + channel * (TAPS - 1)
    mine = mask & is_channel
    mixed = tl.zeros(y.shape, tl.float32)
    for tap in tl.static_range(TAPS - 1):
        past = tl.load(window + tap, mask=mine, other=0.0)
        tl.debug_barrier()
        mixed = tl.fma(past, tl.load(conv_weight + channel * TAPS + tap, mask=is_channel, other=0.0), mixed)
        if tap > 0:
            tl.store(window + tap - 1, past, mask=mine & writable)
    mixed = tl.fma(y, tl.load(conv_weight + channel * TAPS + TAPS - 1, mask=is_channel, other=0.0), mixed)
    tl.store(window + TAPS - 2, y, mask=mine & writable)
    return tl.where(is_channel, silu(mixed + tl.load(conv_bias + channel, mask=is_channel, other=0.0)), y)


@triton.jit(do_not_specialize_on_alignment=["x_single", "scales", "slots"])
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
):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    y = project(
        x, x_single, norm_weight, eps, weight, scales, factor, tl.minimum(row, ROWS - 1), tokens, K, FORMAT, True, T,
        UNITS, AHEAD,
    )  # fmt: skip
    token = tl.arange(0, T)[:, None]
    mask = (token < tokens) & (row < ROWS)[None, :]
    slot = tl.load(slots + tl.minimum(token, tokens - 1)).to(tl.int64)
    writable = tl.load(stop) == 0 if GUARDED else True
    y = _convolve(
        y, row, mask, writable, conv_state + slot * conv_stride, conv_weight, conv_bias, FIRST, CHANNELS, TAPS
    )
    tl.store(out + (token * ROWS + row[None, :]), y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=["slots", "arrived"])
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
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    GUARDED: tl.constexpr,
):
    """Program (part, head, token): PART rows of a head's state [HEAD_DIM, STATE], COLUMNS >= STATE a power of two.

    The last program of a group to arrive norms the group's outputs, in an order that does not depend on who is last.
    """
    PARTS: tl.constexpr = (HEAD_DIM + PART - 1) // PART
    INNER: tl.constexpr = HEADS * HEAD_DIM
    head = tl.program_id(1)
    token = tl.program_id(2)
    group = head // (HEADS // GROUPS)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    column = tl.arange(0, COLUMNS)
    in_rows = row < HEAD_DIM
    in_columns = column < STATE
    inside = in_rows[:, None] & in_columns[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    state_at = ssm_state + slot * ssm_stride + ((head * HEAD_DIM + row[:, None]) * STATE + column[None, :])
    state = tl.load(state_at, mask=inside, other=0.0)
    source = projected + token * ROWS
    x = tl.load(source + INNER + head * HEAD_DIM + row, mask=in_rows, other=0.0)
    b = tl.load(source + 2 * INNER + group * STATE + column, mask=in_columns, other=0.0)
    c = tl.load(source + 2 * INNER + (GROUPS + group) * STATE + column, mask=in_columns, other=0.0)
    dt = tl.load(source + 2 * INNER + 2 * GROUPS * STATE + head)
    step = softplus(dt + tl.load(dt_bias + head))
    decay = exp(step * tl.load(a + head))
    state = tl.fma(state, decay, (step * x)[:, None] * b[None, :])
    tl.store(state_at, state, mask=inside & (tl.load(stop) == 0) if GUARDED else inside)
    read = tl.sum(state * c[None, :], axis=1)
    tl.store(y + token * INNER + head * HEAD_DIM + row, tl.fma(x, tl.load(d + head), read), mask=in_rows)

    tl.debug_barrier()  # all of y is stored before the arrival is announced, and read after the last one
    ticket = arrived + token * GROUPS + group
    if tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == PARTS * (HEADS // GROUPS) - 1:
        gated_group_norm(
            y + token * INNER,
            source,
            norm_weight,
            out + token * INNER,
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
) -> None:
    """Queue the projection and the convolution.

    x float32 [M, hidden] in octet order -> out float32 [M, rows] in plain order: z, convolved x B C, dt.
    conv_weight float32 [channels, taps], conv_bias [channels]; conv_state float32 [slots, channels, taps - 1] with any
    slot stride; slots int32 [M], all different. The state stays as it is if `stop` int32 [1] is set by then.
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
    part: int = UPDATE_PART,
    warps: int = UPDATE_WARPS,
) -> None:
    """Queue the state update, the read-out y and out = group norm of y * silu(z).

    projected float32 [M, rows], from `in_proj`; a = -e^A_log, d and dt_bias float32 [heads]; ssm_state float32 [slots,
    heads, head_dim, state] with any slot stride; slots int32 [M], all different; norm_weight float32 [inner] in plain
    order; y float32 [M, inner] in plain order; out float32 [M, inner] in octet order. `arrived` int32 [M, groups] must
    be zero and is zero again afterwards. The state stays as it is if `stop` int32 [1] is set by then.
    `part` and `warps` are given by measurements only.
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
        ROWS=sizes.rows,
        HEADS=sizes.heads,
        HEAD_DIM=sizes.head_dim,
        STATE=sizes.state,
        GROUPS=sizes.groups,
        PART=part,
        COLUMNS=triton.next_power_of_2(sizes.state),
        GROUP_PADDED=triton.next_power_of_2(sizes.inner // sizes.groups),
        GUARDED=stop is not None,
        num_warps=warps,
        enable_fp_fusion=False,
    )
