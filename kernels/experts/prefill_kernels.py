"""Triton kernels of the routed experts for a sweep: many tokens, each expert's block lying in a slot of a ring in VRAM.

Owns the grouped matrix products and the weighted sum; prefill.py launches them, prefill_reference.py is the definition.

    up        rows of x gathered, h float16 = 2^-6 relu^2 of their products with `up`
    down      y float16 [lookups, latent] = 2^-6 products of true h with `down`, each row to the place of its lookup
    combine   weighted sum of a token's results, in router-rank order

A lookup is a token's choice of an expert, numbered token * top_k + rank. Weights go from E2M1 and E4M3 to float16 in
registers, which is exact; tensor cores sum in float32. h and y may be large, hence the 2^-6: up to 4 million fit. Tiles
and the order of the sums are the same for every number of rows, so that a lookup's bits depend on its row of x and its
expert alone. NaN and infinity follow the rules of floating point and stay in their row.
"""

import triton
import triton.language as tl

from kernels.elementary.gpu import float16, rounded_to

FIELDS = 5  # of an item: see prefill.Item

_FIELDS = tl.constexpr(FIELDS)
_UNSCALE = tl.constexpr(2.0**8)  # see _scales
_SMALLER = tl.constexpr(2.0**6)  # h and y are stored so many times smaller than they are


@triton.jit
def _load(at, mask, WHOLE: tl.constexpr):
    """Zeros outside the mask; with WHOLE nothing is."""
    if WHOLE:
        return tl.load(at)
    return tl.load(at, mask=mask, other=0)


@triton.jit
def _low(packed):
    """int32 bytes -> the E2M1 value of the low nibble times 2^-126, float32: its exponent and mantissa bits are moved
    to where float32 has its lowest ones, so that E2M1's subnormal is one of float32."""
    return (((packed & 0x07) << 22) | ((packed & 0x08) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _high(packed):
    """The same of the high nibble."""
    return (((packed & 0x70) << 18) | ((packed & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _scales(byte):
    """Non-negative E4M3 bytes -> their value times 2^118, float32, so that a product with an E2M1 value of `_low` is
    the weight times 2^-8: exact in float16 (2 + 4 bits, 2^-18 at least), and _UNSCALE away from its true size."""
    return (byte.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 2.0**120 * 2.0**118


@triton.jit
def _rows(items, starts):
    """Of this program's item: expert, slot, row of h, first place in the sorted lookups, how many."""
    item = items + tl.program_id(2) * _FIELDS
    expert = tl.load(item)
    first = tl.load(starts + expert) + tl.load(item + 3)
    count = tl.minimum(tl.load(starts + expert + 1) - first, tl.load(item + 4))
    return expert, tl.load(item + 1).to(tl.int64), tl.load(item + 2).to(tl.int64), first, count


@triton.jit(do_not_specialize_on_alignment=["items"])
def up_kernel(
    ring,
    items,
    starts,
    rows,
    x,
    scale_2,
    h,
    BLOCK_BYTES: tl.constexpr,
    UP_SCALES: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    NEURONS: tl.constexpr,
    INPUTS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Program: NEURONS of ROWS lookups of an item. Lanes without a lookup or neuron compute the last one's again."""
    expert, slot, h_row, first, count = _rows(items, starts)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS < count:
        whole: tl.constexpr = LATENT % INPUTS == 0
        token = tl.load(rows + first + tl.minimum(row, count - 1)) // TOP_K
        neuron = tl.program_id(0) * NEURONS + tl.arange(0, NEURONS)
        held = tl.minimum(neuron, WIDTH - 1)[:, None]
        block = ring + slot * BLOCK_BYTES
        input = tl.arange(0, INPUTS)[None, :]
        byte = tl.arange(0, INPUTS // 2)[None, :]
        group = tl.arange(0, INPUTS // 16)[None, :]
        x_at = x + token.to(tl.int64)[:, None] * LATENT + input
        codes_at = block + held * (LATENT // 2) + byte
        scales_at = block + UP_SCALES + held * (LATENT // 16) + group
        total = tl.zeros([ROWS, NEURONS], tl.float32)
        for start in range(0, LATENT, INPUTS):
            values = _load(x_at + start, start + input < LATENT, whole)
            codes = _load(codes_at + start // 2, start // 2 + byte < LATENT // 2, whole).to(tl.int32)
            scales = _scales(_load(scales_at + start // 16, start // 16 + group < LATENT // 16, whole))
            codes = tl.reshape(codes, [NEURONS, INPUTS // 16, 8])
            scales = scales[:, :, None]
            weights = tl.interleave(_low(codes) * scales, _high(codes) * scales)
            weights = tl.reshape(weights, [NEURONS, INPUTS]).to(OPERAND)
            total = tl.dot(values.to(OPERAND), tl.trans(weights), total)
        value = total * (tl.load(scale_2 + expert) * (_UNSCALE / 8))
        squared = tl.where(value <= 0.0, 0.0, value * value)  # NaN stays NaN
        at = h + (h_row + row)[:, None] * WIDTH + neuron[None, :]
        tl.store(at, float16(squared), mask=(row < count)[:, None] & (neuron < WIDTH)[None, :])


@triton.jit(do_not_specialize_on_alignment=["items"])
def down_kernel(
    ring,
    items,
    starts,
    rows,
    h,
    scale_2,
    y,
    BLOCK_BYTES: tl.constexpr,
    DOWN_VALUES: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    NEURONS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Program: OUTPUTS of ROWS lookups of an item, over all neurons."""
    expert, slot, h_row, first, count = _rows(items, starts)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    if tl.program_id(1) * ROWS < count:
        whole: tl.constexpr = WIDTH % NEURONS == 0 and LATENT % OUTPUTS == 0
        half: tl.constexpr = LATENT // 2
        held = tl.minimum(row, count - 1)
        block = ring + slot * BLOCK_BYTES
        neuron = tl.arange(0, NEURONS)
        group = tl.arange(0, NEURONS // 16)[:, None]
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
        byte = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)[None, :]
        h_at = h + (h_row + held)[:, None] * WIDTH + neuron[None, :]
        codes_at = block + DOWN_VALUES + neuron[:, None] * half + byte
        scales_at = block + DOWN_SCALES + group * LATENT + output
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        next_scales = _scales(_load(scales_at, (group < WIDTH // 16) & (output < LATENT), whole))
        for start in range(0, WIDTH, NEURONS):
            values = _load(h_at + start, (start + neuron < WIDTH)[None, :], whole)
            inside = (start + neuron < WIDTH)[:, None] & (byte < half)
            codes = _load(codes_at + start * half, inside, whole).to(tl.int32)
            # A step ahead by hand: two bytes a thread are too few for an asynchronous copy, which the others are. As
            # float32, since the compiler spreads over the threads what the loop carries: less work for each weight.
            scales = next_scales
            ahead = tl.minimum(start + NEURONS, WIDTH - 16) // 16
            inside = (ahead + group < WIDTH // 16) & (output < LATENT)
            next_scales = _scales(tl.load(scales_at + ahead * LATENT, mask=inside, other=0))
            weights = tl.reshape(tl.interleave(_low(codes), _high(codes)), [NEURONS // 16, 16, OUTPUTS])
            weights = tl.reshape(weights * scales[:, None, :], [NEURONS, OUTPUTS]).to(OPERAND)
            total = tl.dot(values.to(OPERAND), weights, total)
        lookup = tl.load(rows + first + held).to(tl.int64)
        value = total * (tl.load(scale_2 + expert) * _UNSCALE)
        tl.store(y + lookup[:, None] * LATENT + output, float16(value), mask=(row < count)[:, None] & (output < LATENT))


@triton.jit
def combine_kernel(y, weights, out, LATENT: tl.constexpr, TOP_K: tl.constexpr, TILE: tl.constexpr):
    """Program: TILE outputs of a token. Unrolled, so that all reads are under way at once."""
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = output < LATENT
    total = tl.zeros([TILE], tl.float32)
    for rank in tl.static_range(TOP_K):
        lookup = token * TOP_K + rank
        value = tl.load(y + lookup * LATENT + output, mask=inside, other=0.0).to(tl.float32)
        total = total + tl.load(weights + lookup) * value
    tl.store(out + token * LATENT + output, rounded_to(total * _SMALLER, out), mask=inside)
