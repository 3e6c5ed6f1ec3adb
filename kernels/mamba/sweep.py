"""The recurrent parts of a Mamba-2 layer for a sweep of prompts on a GPU (or in the interpreter); rows in plain order.

    convolve   causal convolution and SiLU of x, B and C, in place; one launch
    scan       time steps and decays, then the selective scan, the state in registers; two launches

Both go through a sequence token by token, with decode's operations in decode's order: gpu.py's. So a prompt may be cut
anywhere, and which sequences share a launch changes nothing. Formulas: reference.py. Projections and norm are not here.

`segments` int32 [S, 3] names the sequences of a launch: first row, rows, slot. Segments share neither rows nor slots;
rows in none are left alone. One program alone reads and writes an element of a state, and all of its tokens in turn.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import exp, silu, softplus
from kernels.mamba.gpu import Sizes

Tensor = torch.Tensor

PART, WARPS, STAGES = 16, 1, 6  # rows of a head a program; tokens on their way from memory
CONV_ROWS, CONV_CHANNELS, CONV_WARPS = 64, 32, 8
STEPS_TOKENS, STEPS_HEADS, STEPS_WARPS = 32, 32, 4
MOST_ELEMENTS = 1 << 31
FINGERPRINT = f"triton-f32 sequential {PART}x{WARPS} conv{CONV_ROWS}x{CONV_CHANNELS}"

_NEIGHBOURS = tl.constexpr(4)  # states that a thread adds first, as in decode's sum


@triton.jit
def _convolve(
    x, STRIDE: tl.constexpr, window, weight, bias, row, rows, channel, inside, CHANNELS: tl.constexpr,
    TAPS: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """Outputs of a tile; with HISTORY the inputs before row 0 are the state's. Then all threads have read theirs."""
    mixed = tl.zeros([row.shape[0], channel.shape[1]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = row + (tap - (TAPS - 1))
        past = tl.load(x + source * STRIDE + channel, mask=inside & (source >= 0) & (source < rows), other=0.0)
        if HISTORY and tap < TAPS - 1:
            old = tl.load(window + (TAPS - 1) + source, mask=inside & (source < 0), other=0.0)
            past = tl.where(source < 0, old, past)
        mixed = tl.fma(past, tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0), mixed)
    tl.debug_barrier()
    return silu(mixed + tl.load(bias + channel, mask=inside, other=0.0))


@triton.jit(do_not_specialize_on_alignment=["segments"])
def convolve_kernel(
    projected,
    segments,
    conv_state,
    weight,
    bias,
    STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (tile, segment): TILE channels, ROWS rows at a time, the last ones first.

    A row's output takes its place, and its input is needed by the TAPS - 1 rows behind it: those are done by then.
    """
    entry = segments + 3 * tl.program_id(1)
    rows = tl.load(entry + 1)
    x = projected + tl.load(entry).to(tl.int64) * STRIDE + FIRST
    state = conv_state + tl.load(entry + 2).to(tl.int64) * STATE_STRIDE
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    in_channels = channel < CHANNELS

    tap = tl.arange(0, PADDED)[None, :]
    source = rows + tap - (TAPS - 1)
    in_state = in_channels[:, None] & (tap < TAPS - 1)
    window = state + channel[:, None] * (TAPS - 1)
    newest = tl.load(x + source * STRIDE + channel[:, None], mask=in_state & (source >= 0), other=0.0)
    older = tl.load(window + (TAPS - 1) + source, mask=in_state & (source < 0), other=0.0)
    newest = tl.where(source >= 0, newest, older)

    channel = channel[None, :]
    inside = in_channels[None, :]
    window = state + channel * (TAPS - 1)
    at = tl.arange(0, ROWS)[:, None]
    for behind in range(1, tl.cdiv(rows, ROWS)):
        row = (tl.cdiv(rows, ROWS) - behind) * ROWS + at
        y = _convolve(x, STRIDE, window, weight, bias, row, rows, channel, inside, CHANNELS, TAPS, False)
        tl.store(x + row * STRIDE + channel, y, mask=inside & (row < rows))
    y = _convolve(x, STRIDE, window, weight, bias, at, rows, channel, inside, CHANNELS, TAPS, True)
    tl.store(x + at * STRIDE + channel, y, mask=inside & (at < rows))
    tl.store(state + channel.trans() * (TAPS - 1) + tap, newest, mask=in_state)


@triton.jit(do_not_specialize=["tokens"])
def steps_and_decays_kernel(
    dt, dt_bias, a, steps, tokens, STRIDE: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr
):
    """Program (tokens, heads) -> steps [HEADS, tokens, 2]: a token's step, and what its state is multiplied by."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None]
    head = (tl.program_id(1) * TILE + tl.arange(0, TILE))[None, :]
    inside = (token < tokens) & (head < HEADS)
    source = dt + token.to(tl.int64) * STRIDE + head
    bias = tl.load(dt_bias + head, mask=head < HEADS, other=0.0)
    step = softplus(tl.load(source, mask=inside, other=0.0) + bias)
    decay = exp(step * tl.load(a + head, mask=head < HEADS, other=0.0))
    place = steps + (head.to(tl.int64) * tokens + token) * 2
    tl.store(place, step, mask=inside)
    tl.store(place + 1, decay, mask=inside)


@triton.jit
def _sum_states(products, PART: tl.constexpr, LANES: tl.constexpr):
    """[outer, inner, PART, LANES, neighbours] -> [PART]: neighbours in turn, then halves onto halves.

    Two numbers have one sum: the order is the same wherever the compiler lays them, and it is that of decode's sum.
    """
    read = tl.sum(products, axis=4)
    read = tl.sum(tl.sum(read, axis=0), axis=0)
    for i in tl.static_range(LANES.bit_length() - 1):
        read = tl.sum(tl.reshape(read, [PART, 2, LANES >> (i + 1)]), axis=1)
    return tl.reshape(read, [PART])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["segments"])
def sequential_kernel(
    projected,
    segments,
    steps,
    tokens,
    ssm_state,
    d,
    y,
    STRIDE: tl.constexpr,
    STATE_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    LANES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (part, head, segment): PART rows of a head's state [HEAD_DIM, STATE] through all tokens of a segment.

    The columns are [OUTER, INNER, LANES, neighbours], so that a thread holds several and few cross a sum. x, B and C
    come STAGES - 1 tokens early. y may take the place of x: no other program reads this x, and no later token.
    """
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    entry = segments + 3 * tl.program_id(2)
    first = tl.load(entry).to(tl.int64)
    rows = tl.load(entry + 1)
    slot = tl.load(entry + 2).to(tl.int64)
    row = tl.program_id(0) * PART + tl.arange(0, PART)
    in_rows = row < HEAD_DIM
    column = (
        (tl.arange(0, OUTER) * (INNER * LANES * _NEIGHBOURS))[:, None, None, None, None]
        + (tl.arange(0, INNER) * (LANES * _NEIGHBOURS))[None, :, None, None, None]
        + (tl.arange(0, LANES) * _NEIGHBOURS)[None, None, None, :, None]
        + tl.arange(0, _NEIGHBOURS)[None, None, None, None, :]
    )
    in_columns = column < STATE
    inside = in_rows[None, None, :, None, None] & in_columns
    state_at = ssm_state + slot * STATE_STRIDE + (head * HEAD_DIM + row)[None, None, :, None, None] * STATE + column
    state = tl.load(state_at, mask=inside, other=0.0)
    factor = tl.load(d + head)
    x_at = projected + first * STRIDE + HEADS * HEAD_DIM + head * HEAD_DIM + row
    b_at = projected + first * STRIDE + 2 * HEADS * HEAD_DIM + group * STATE + column
    y_at = y + first * Y_STRIDE + head * HEAD_DIM + row
    step_at = steps + (head.to(tl.int64) * tokens + first) * 2
    next_step = tl.load(step_at, mask=rows > 0, other=0.0)
    next_decay = tl.load(step_at + 1, mask=rows > 0, other=0.0)
    for token in tl.range(0, rows, num_stages=STAGES):
        step = next_step
        decay = next_decay
        following = 2 * tl.minimum(token + 1, rows - 1)
        next_step = tl.load(step_at + following)
        next_decay = tl.load(step_at + following + 1)
        x = tl.load(x_at + token * STRIDE, mask=in_rows, other=0.0)
        b = tl.load(b_at + token * STRIDE, mask=in_columns, other=0.0)
        c = tl.load(b_at + GROUPS * STATE + token * STRIDE, mask=in_columns, other=0.0)
        state = tl.fma(state, decay, (step * x)[None, None, :, None, None] * b)
        read = _sum_states(state * c, PART, LANES)
        tl.store(y_at + token * Y_STRIDE, tl.fma(x, factor, read), mask=in_rows)
    tl.store(state_at, state, mask=inside)


class Workspace:
    """Time steps and decays of at most `tokens` tokens: 8 bytes a token and head."""

    def __init__(self, tokens: int, heads: int, device: torch.device) -> None:
        self.steps = torch.empty(heads * tokens * 2, device=device)


def convolve(
    projected: Tensor, sizes: Sizes, weight: Tensor, bias: Tensor, conv_state: Tensor, segments: Tensor
) -> None:
    """Queue projected's x, B, C = reference.causal_conv of them, in place, and the states.

    projected float32 [M, rows], columns z, x, B, C, dt side by side; weight float32 [channels, taps], bias [channels];
    conv_state float32 [slots, channels, taps - 1] with any slot stride, the newest input last; segments on the device.
    """
    _check(projected, sizes, segments)
    assert conv_state[0].is_contiguous()
    assert weight.is_contiguous()
    taps = weight.shape[1]
    convolve_kernel[(triton.cdiv(sizes.channels, CONV_CHANNELS), len(segments))](
        projected,
        segments,
        conv_state,
        weight,
        bias,
        STRIDE=projected.stride(0),
        STATE_STRIDE=conv_state.stride(0),
        FIRST=sizes.inner,
        CHANNELS=sizes.channels,
        TAPS=taps,
        PADDED=triton.next_power_of_2(taps),
        ROWS=CONV_ROWS,
        TILE=CONV_CHANNELS,
        num_warps=CONV_WARPS,
        enable_fp_fusion=False,
    )


def scan(
    projected: Tensor,
    sizes: Sizes,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    ssm_state: Tensor,
    segments: Tensor,
    workspace: Workspace,
    y: Tensor,
    part: int = PART,
    warps: int = WARPS,
    stages: int = STAGES,
) -> None:
    """Queue y = reference.selective_scan of projected's x, dt, B, C, and the states in place.

    projected float32 [M, rows], as `convolve` leaves it; a = -e^A_log, d and dt_bias float32 [heads]; ssm_state float32
    [slots, heads, head_dim, state] with any slot stride; segments on the device; y float32 [M, inner] with any row
    stride, projected's own columns of x if wanted. `part`, `warps` and `stages` are given by measurements only.
    """
    _check(projected, sizes, segments)
    tokens, dt = projected.shape[0], projected[:, sizes.inner + sizes.channels :]
    assert 2 * tokens * sizes.heads <= workspace.steps.numel()
    assert ssm_state[0].is_contiguous()
    assert y.shape == (tokens, sizes.inner)
    assert y.stride(1) == 1
    columns = max(triton.next_power_of_2(sizes.state), _NEIGHBOURS.value)
    inner = 2 if columns >= 64 else 1
    outer = max(columns // 64, 1)
    steps_and_decays_kernel[(triton.cdiv(tokens, STEPS_TOKENS), triton.cdiv(sizes.heads, STEPS_HEADS))](
        dt,
        dt_bias,
        a,
        workspace.steps,
        tokens,
        STRIDE=dt.stride(0),
        HEADS=sizes.heads,
        TOKENS=STEPS_TOKENS,
        TILE=STEPS_HEADS,
        num_warps=STEPS_WARPS,
        enable_fp_fusion=False,
    )
    sequential_kernel[(triton.cdiv(sizes.head_dim, part), sizes.heads, len(segments))](
        projected,
        segments,
        workspace.steps,
        tokens,
        ssm_state,
        d,
        y,
        STRIDE=projected.stride(0),
        STATE_STRIDE=ssm_state.stride(0),
        Y_STRIDE=y.stride(0),
        HEADS=sizes.heads,
        HEAD_DIM=sizes.head_dim,
        STATE=sizes.state,
        GROUPS=sizes.groups,
        PART=part,
        OUTER=outer,
        INNER=inner,
        LANES=columns // (outer * inner * _NEIGHBOURS.value),
        STAGES=stages,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _check(projected: Tensor, sizes: Sizes, segments: Tensor) -> None:
    assert projected.shape[1] == sizes.rows
    assert projected.stride(1) == 1
    assert projected.shape[0] * projected.stride(0) < MOST_ELEMENTS
    assert segments.dtype == torch.int32
    assert segments.is_contiguous()
    assert segments.shape[1] == 3
