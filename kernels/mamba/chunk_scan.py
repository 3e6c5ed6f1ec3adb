"""Many tokens of a Mamba-2 layer on a GPU (or in the interpreter): causal convolution and chunk scan; one sequence.

    conv     SiLU of the convolution of x, B, C; per channel the operations of a single token's, in gpu.py's order
    steps    each token's time step, and the sums of the logarithms of its chunk's decays, as integers
    scan     chunk after chunk

The engine's sweep goes token by token instead (sweep.py): this is what `thimble bench scan` holds it against.

Formulas and the rule where chunks begin: chunks.py. A program carries the state of its rows through all chunks, so that
nothing but the state goes from one to the next. Products of matrices take float32 in three TF32 parts.
"""

import torch
import triton
import triton.language as tl

from kernels.elementary.gpu import exp, silu, softplus
from kernels.mamba.chunks import CHUNK, LEAST, UNIT
from kernels.mamba.gpu import Sizes

Tensor = torch.Tensor

BLOCK = 32  # tokens of a product
PART = 32  # state rows a program
SLICE = 32  # state columns of a product
WARPS = 4
CONV_ROWS = 16
CONV_CHANNELS = 64
FINGERPRINT = f"triton-tf32x3 chunk{CHUNK} scan{BLOCK}x{PART}x{SLICE}x{WARPS}"

_LEAST, _UNIT, _INVERSE_UNIT = tl.constexpr(LEAST), tl.constexpr(UNIT), tl.constexpr(1 / UNIT)


@triton.jit(do_not_specialize=["rows"])
def conv_kernel(
    x,
    x_stride,
    state,
    weight,
    bias,
    out,
    rows,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program: TILE channels of x [rows, CHANNELS], all rows; state [CHANNELS, TAPS - 1], the newest input last."""
    channel = (tl.program_id(0) * TILE + tl.arange(0, TILE))[None, :]
    inside = channel < CHANNELS
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)[:, None]
        mixed = tl.zeros([ROWS, TILE], tl.float32)
        for tap in tl.static_range(TAPS):
            source = row + (tap - (TAPS - 1))
            known = inside & (source < rows)
            new = tl.load(x + source * x_stride + channel, mask=known & (source >= 0), other=0.0)
            old = tl.load(state + channel * (TAPS - 1) + (TAPS - 1) + source, mask=known & (source < 0), other=0.0)
            mixed = tl.fma(
                tl.where(source >= 0, new, old), tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0), mixed
            )
        mixed = silu(mixed + tl.load(bias + channel, mask=inside, other=0.0))
        tl.store(out + row * CHANNELS + channel, mixed, mask=inside & (row < rows))
    for tap in tl.static_range(TAPS - 1):
        tl.debug_barrier()  # an element may lie in several threads: all have read what is written now
        source = rows + (tap - (TAPS - 1))
        new = tl.load(x + source * x_stride + channel, mask=inside & (source >= 0), other=0.0)
        old = tl.load(state + channel * (TAPS - 1) + (TAPS - 1) + source, mask=inside & (source < 0), other=0.0)
        tl.debug_barrier()
        tl.store(state + channel * (TAPS - 1) + tap, tl.where(source >= 0, new, old), mask=inside)


@triton.jit(do_not_specialize=["rows", "offset"])
def steps_kernel(dt, dt_stride, dt_bias, a, steps, sums, rows, offset, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Program (chunk, head) -> steps float32 and sums int64 [HEADS, chunks * CHUNK]; zero steps where no token is."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, CHUNK)
    row = chunk * CHUNK - offset + at
    inside = (row >= 0) & (row < rows)
    step = softplus(tl.load(dt + row * dt_stride + head, mask=inside, other=0.0) + tl.load(dt_bias + head))
    step = tl.where(inside, step, 0.0)
    logarithm = tl.maximum(step * tl.load(a + head), _LEAST)
    units = tl.where(step == step, logarithm * _UNIT, 0.0).to(tl.int64)
    place = (head * tl.num_programs(0) + chunk) * CHUNK + at
    tl.store(steps + place, step)
    tl.store(sums + place, tl.cumsum(units, axis=0))


@triton.jit
def _decay(sums):
    return exp(tl.minimum(sums, 0).to(tl.float32) * _INVERSE_UNIT)


@triton.jit
def _tile(source, stride, row, in_row, column, columns):
    """float32 [rows, columns] of a matrix whose columns lie side by side, zero outside."""
    place = source + row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(place, mask=in_row[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "offset", "chunks"])
def scan_kernel(
    x,
    x_stride,
    b,
    b_stride,
    c,
    c_stride,
    d,
    steps,
    sums,
    state,
    out,
    rows,
    offset,
    chunks,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE: tl.constexpr,
    GROUPS: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Program (part, head): PART rows of a head's state [HEAD_DIM, STATE]; out [rows, HEADS * HEAD_DIM].

    The state stays in memory, which its program alone reads and writes; barriers order the two.
    """
    head = tl.program_id(1)
    group = head // (HEADS // GROUPS)
    part = tl.program_id(0) * PART + tl.arange(0, PART)
    in_part = part < HEAD_DIM
    at = tl.arange(0, BLOCK)
    along = tl.arange(0, SLICE)
    x += head * HEAD_DIM
    b += group * STATE
    c += group * STATE
    state += head * HEAD_DIM * STATE
    factor = tl.load(d + head)
    for chunk in range(chunks):
        place = (head * chunks + chunk) * CHUNK
        first = chunk * CHUNK - offset
        begin = tl.maximum(-first, 0) // BLOCK  # blocks without a token are left out
        end = tl.cdiv(tl.minimum(rows - first, CHUNK), BLOCK)
        for i in range(begin, end):
            row_i = first + i * BLOCK + at
            in_i = (row_i >= 0) & (row_i < rows)
            sum_i = tl.load(sums + place + i * BLOCK + at)
            y = tl.zeros([BLOCK, PART], tl.float32)
            for start in range(0, STATE, SLICE):
                column = start + along
                before = _tile(state, STATE, part, in_part, column, STATE)
                c_i = _tile(c, c_stride, row_i, in_i, column, STATE)
                y = tl.dot(c_i, tl.trans(before), y, input_precision="tf32x3")
            y *= _decay(sum_i)[:, None]
            for j in range(begin, i + 1):
                row_j = first + j * BLOCK + at
                in_j = (row_j >= 0) & (row_j < rows)
                products = tl.zeros([BLOCK, BLOCK], tl.float32)
                for start in range(0, STATE, SLICE):
                    column = start + along
                    c_i = _tile(c, c_stride, row_i, in_i, column, STATE)
                    b_j = _tile(b, b_stride, row_j, in_j, column, STATE)
                    products = tl.dot(c_i, tl.trans(b_j), products, input_precision="tf32x3")
                step_j = tl.load(steps + place + j * BLOCK + at)
                sum_j = tl.load(sums + place + j * BLOCK + at)
                later = _decay(sum_i[:, None] - sum_j[None, :]) * step_j[None, :]
                products *= tl.where(row_i[:, None] >= row_j[None, :], later, 0.0)
                x_j = _tile(x, x_stride, row_j, in_j, part, HEAD_DIM)
                y = tl.dot(products, x_j, y, input_precision="tf32x3")
            x_i = _tile(x, x_stride, row_i, in_i, part, HEAD_DIM)
            out_at = out + (row_i.to(tl.int64)[:, None] * HEADS + head) * HEAD_DIM + part[None, :]
            tl.store(out_at, tl.fma(x_i, factor, y), mask=in_i[:, None] & in_part[None, :])
        tl.debug_barrier()
        last = tl.load(sums + place + CHUNK - 1)
        for start in range(0, STATE, SLICE):
            column = start + along
            after = _tile(state, STATE, part, in_part, column, STATE) * _decay(last)
            for j in range(begin, end):
                row_j = first + j * BLOCK + at
                in_j = (row_j >= 0) & (row_j < rows)
                kept = _decay(last - tl.load(sums + place + j * BLOCK + at)) * tl.load(steps + place + j * BLOCK + at)
                x_j = _tile(x, x_stride, row_j, in_j, part, HEAD_DIM) * kept[:, None]
                b_j = _tile(b, b_stride, row_j, in_j, column, STATE)
                after = tl.dot(tl.trans(x_j), b_j, after, input_precision="tf32x3")
            tl.store(
                state + part[:, None] * STATE + column[None, :],
                after,
                mask=in_part[:, None] & (column < STATE)[None, :],
            )
        tl.debug_barrier()


class Workspace:
    """What `steps` hands to `scan`: for calls of at most `tokens` tokens at any position."""

    def __init__(self, tokens: int, heads: int, device: torch.device) -> None:
        chunks = triton.cdiv(tokens + CHUNK - 1, CHUNK)
        self.steps = torch.empty(heads * chunks * CHUNK, device=device)
        self.sums = torch.empty(heads * chunks * CHUNK, dtype=torch.int64, device=device)


def conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor, out: Tensor) -> None:
    """Queue out [M, channels] = reference.causal_conv(x, state, weight, bias), the state in place.

    x float32 [M, channels] with any row stride, out contiguous; state, weight and bias as the reference's, contiguous.
    """
    channels, taps = weight.shape
    assert x.stride(1) == 1
    assert state.is_contiguous()
    assert out.is_contiguous()
    conv_kernel[(triton.cdiv(channels, CONV_CHANNELS),)](
        x,
        x.stride(0),
        state,
        weight,
        bias,
        out,
        x.shape[0],
        CHANNELS=channels,
        TAPS=taps,
        ROWS=CONV_ROWS,
        TILE=CONV_CHANNELS,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    first: int,
    sizes: Sizes,
    workspace: Workspace,
    out: Tensor,
) -> None:
    """Queue out [M, inner] = chunks.chunk_scan of the same inputs, the state in place; two launches.

    x float32 [M, inner], dt [M, heads], b and c [M, groups * state], each with any row stride; out contiguous; a, d and
    dt_bias float32 [heads]; state float32 [heads, head_dim, state], contiguous. `first` is the absolute position of the
    first token.
    """
    rows = x.shape[0]
    offset = first % CHUNK
    chunks = triton.cdiv(offset + rows, CHUNK)
    assert sizes.heads * chunks * CHUNK <= workspace.steps.numel()
    assert all(tensor.stride(1) == 1 for tensor in (x, dt, b, c))
    assert state.is_contiguous()
    assert out.is_contiguous()
    steps_kernel[(chunks, sizes.heads)](
        dt,
        dt.stride(0),
        dt_bias,
        a,
        workspace.steps,
        workspace.sums,
        rows,
        offset,
        HEADS=sizes.heads,
        CHUNK=CHUNK,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    scan_kernel[(triton.cdiv(sizes.head_dim, PART), sizes.heads)](
        x,
        x.stride(0),
        b,
        b.stride(0),
        c,
        c.stride(0),
        d,
        workspace.steps,
        workspace.sums,
        state,
        out,
        rows,
        offset,
        chunks,
        HEADS=sizes.heads,
        HEAD_DIM=sizes.head_dim,
        STATE=sizes.state,
        GROUPS=sizes.groups,
        PART=PART,
        CHUNK=CHUNK,
        BLOCK=BLOCK,
        SLICE=SLICE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
