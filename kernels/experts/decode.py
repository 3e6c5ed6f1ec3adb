"""Triton kernels of the routed experts for decode: a few tokens, each expert's bytes wherever they lie.

The arithmetic is `kernels/experts/reference.py`, bit for bit: all sums are of integers, so tiles, splits and devices
may cut them anywhere. Weights are read through addresses in `table`: device memory for blocks that the copy engine
brought, page-locked host memory for those read in place (unified addressing makes the two alike).

One layer is five launches, all with fixed grids so that a CUDA graph can hold them; items beyond `count` do nothing:

    up       item, tile of neurons   -> h float32
    alive    item                    -> hq int16, the touched 16-neuron groups, the factor of the second product
    down     item, split of groups   -> partial int64 sums
    finish   item, tile of outputs   -> y float32
    combine  token, tile of outputs  -> out float32, added in router-rank order over GPU and CPU results

An *item* is one expert that this GPU computes, for all tokens of the batch at once (a token that did not choose the
expert costs arithmetic but no bytes; nothing reads its result). A launch covers the items from `first` on, so that some
can be computed while the bytes of others are still on their way.
"""

import triton
import triton.language as tl

from kernels.linear.octets import octet_place

_LOOKUP = tl.constexpr(0xC8643210)  # twice the E2M1 magnitudes 0 .5 1 1.5 2 3 4 6, a nibble each, code 0 lowest


@triton.jit
def _twice_e2m1(code):
    """int32 codes 0..15 -> twice their value, an integer within +-12."""
    shift = ((code & 7) * 4).to(tl.uint32)
    magnitude = ((tl.full([], _LOOKUP, tl.uint32) >> shift) & 15).to(tl.int32)
    return tl.where((code & 8) != 0, -magnitude, magnitude)


@triton.jit
def _e4m3_times_512(byte):
    """Non-negative E4M3 bytes as int32 -> their value times 2^9, an integer below 2^18."""
    exponent = byte >> 3
    mantissa = byte & 7
    return tl.where(exponent == 0, mantissa, (mantissa + 8) << tl.maximum(exponent - 1, 0))


@triton.jit
def _power_of_two(exponent):
    """int32 within -126..127 -> float32 2^exponent."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _quantisation_exponent(largest):
    """float32 max|x| -> the e of the contract: 15 - p with max = m 2^p, 0.5 <= m < 1, at most 80; 0 for 0."""
    field = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    return tl.where(largest == 0.0, 0, tl.minimum(141 - field, 80))


@triton.jit
def _quantise(x, exponent):
    """float32 -> int32 round-to-even of x * 2^exponent, within +-32767. |x| 2^exponent <= 2^15 by choice of exponent.

    Adding and taking away 1.5 * 2^23 rounds to the nearest even integer in float32. The scaling is done in two halves:
    2^exponent alone may exceed float32, the product with a quotient of powers of two cannot round.
    """
    half = exponent >> 1
    scaled = x * _power_of_two(half) * _power_of_two(exponent - half)
    rounded = (scaled + 12582912.0) - 12582912.0
    return tl.minimum(tl.maximum(rounded, -32767.0), 32767.0).to(tl.int32)


@triton.jit
def quantise_kernel(x, xq, factor, LATENT: tl.constexpr):
    """One program a token: x float32 [M, LATENT] -> xq int16 [M, 16, LATENT/16], position in group first.

    factor float32 [M] = 2^-(e+10), NaN where x has a NaN or an infinity: it turns the whole row into NaN further on.
    """
    token = tl.program_id(0)
    groups: tl.constexpr = LATENT // 16
    place = tl.arange(0, 16)[:, None] * groups + tl.arange(0, groups)[None, :]
    source = tl.arange(0, groups)[None, :] * 16 + tl.arange(0, 16)[:, None]
    values = tl.load(x + token * LATENT + source)
    finite = tl.abs(values) < float("inf")
    largest = tl.max(tl.max(tl.where(finite, tl.abs(values), 0.0), axis=1), axis=0)
    bad = tl.max(tl.max(tl.where(finite, 0, 1), axis=1), axis=0)
    exponent = _quantisation_exponent(largest)
    quantised = _quantise(tl.where(finite, values, 0.0), exponent)
    tl.store(xq + token * LATENT + place, quantised.to(tl.int16))
    tl.store(factor + token, tl.where(bad != 0, float("nan"), _power_of_two(-(exponent + 10))))


@triton.jit
def up_kernel(
    first,
    table,
    count,
    scale_2,
    xq,
    x_factor,
    h,
    UP_SCALES: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
):
    """h[item, token, n] = relu(float32(sum code2 * scale * xq) * factor)^2 for a tile of neurons.

    table int64 [items, 2]: addresses of the block that holds `up` and of the one that holds `down`; scale_2 float32
    [items, 2], theirs.
    A group of 16 codes is one 64-bit word, so a word's dot product stays inside one thread.
    """
    item = first + tl.program_id(1)
    if item < tl.load(count):
        groups: tl.constexpr = LATENT // 16
        base = tl.load(table + item * 2)
        words_at = base.to(tl.pointer_type(tl.int64))
        scales_at = (base + UP_SCALES).to(tl.pointer_type(tl.uint8))
        rows = tl.program_id(0) * TILE + tl.arange(0, TILE)
        group = tl.arange(0, groups)
        inside = (rows < WIDTH)[:, None]
        where_ = rows[:, None] * groups + group[None, :]
        words = tl.load(words_at + where_, mask=inside, other=0)
        scale = _e4m3_times_512(tl.load(scales_at + where_, mask=inside, other=0).to(tl.int32)).to(tl.int64)
        low = words.to(tl.int32)
        high = (words >> 32).to(tl.int32)
        for token in tl.static_range(TOKENS):
            dots = tl.zeros([TILE, groups], tl.int32)
            for i in tl.static_range(8):
                x = tl.load(xq + token * LATENT + i * groups + group).to(tl.int32)
                dots += _twice_e2m1((low >> (4 * i)) & 15) * x[None, :]
            for i in tl.static_range(8):
                x = tl.load(xq + token * LATENT + (8 + i) * groups + group).to(tl.int32)
                dots += _twice_e2m1((high >> (4 * i)) & 15) * x[None, :]
            total = tl.sum(dots.to(tl.int64) * scale, axis=1)
            factor = tl.load(scale_2 + item * 2) * tl.load(x_factor + token)
            value = total.to(tl.float32) * factor
            squared = tl.where(value <= 0.0, 0.0, value * value)  # NaN stays NaN
            tl.store(h + (item * TOKENS + token) * WIDTH + rows, squared, mask=rows < WIDTH)


@triton.jit
def alive_kernel(
    first,
    count,
    scale_2,
    h,
    hq,
    touched,
    touched_count,
    y_factor,
    WIDTH: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Quantises h to hq int16 and lists the groups with an alive neuron for any token, in ascending order."""
    item = first + tl.program_id(0)
    if item < tl.load(count):
        groups: tl.constexpr = WIDTH // 16
        group = tl.arange(0, GROUPS_PADDED)
        place = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        inside = (group < groups)[:, None]
        alive = tl.zeros([GROUPS_PADDED], tl.int32)
        for token in tl.static_range(TOKENS):
            row = (item * TOKENS + token) * WIDTH
            values = tl.load(h + row + place, mask=inside, other=0.0)
            finite = values < float("inf")
            bad = tl.max(tl.max(tl.where(finite, 0, 1), axis=1), axis=0)
            values = tl.where(finite, values, 0.0)
            exponent = _quantisation_exponent(tl.max(tl.max(values, axis=1), axis=0))
            quantised = _quantise(values, exponent)
            tl.store(hq + row + place, quantised.to(tl.int16), mask=inside)
            alive = tl.maximum(alive, tl.max(quantised, axis=1))
            power = tl.where(bad != 0, float("nan"), _power_of_two(-(exponent + 10)))
            tl.store(y_factor + item * TOKENS + token, tl.load(scale_2 + item * 2 + 1) * power)
        flags = (alive > 0).to(tl.int32)
        position = tl.cumsum(flags, axis=0) - 1
        tl.store(touched + item * groups + position, group, mask=flags != 0)
        tl.store(touched_count + item, tl.sum(flags, axis=0))


@triton.jit
def down_kernel(
    first,
    table,
    count,
    hq,
    touched,
    touched_count,
    partial,
    DOWN_VALUES: tl.constexpr,
    DOWN_SCALES: tl.constexpr,
    LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    WHOLE_GROUPS: tl.constexpr,
):
    """partial int64 [items, TOKENS, SPLITS, 2, LATENT/2]: sums over every SPLITS-th touched group, even outputs first.

    Only rows alive for some token are read, and a group's scales once. WHOLE_GROUPS reads all 16 rows of a touched
    group: the published method, kept to be measured against.
    """
    split = tl.program_id(0)
    item = first + tl.program_id(1)
    if item < tl.load(count):
        half: tl.constexpr = LATENT // 2
        base = tl.load(table + item * 2 + 1)
        values_at = (base + DOWN_VALUES).to(tl.pointer_type(tl.uint8))
        scales_at = (base + DOWN_SCALES).to(tl.pointer_type(tl.uint16))
        column = tl.arange(0, half)
        row = tl.arange(0, 16)
        groups: tl.constexpr = WIDTH // 16
        entries = tl.load(touched_count + item)
        for token in tl.static_range(TOKENS):
            even = tl.zeros([half], tl.int64)
            odd = tl.zeros([half], tl.int64)
            for entry in range(split, entries, SPLITS):
                group = tl.load(touched + item * groups + entry)
                neuron = group * 16 + row
                q = tl.load(hq + (item * TOKENS + token) * WIDTH + neuron).to(tl.int32)
                wanted = (q != 0) | WHOLE_GROUPS
                codes = tl.load(values_at + neuron[:, None] * half + column[None, :], mask=wanted[:, None], other=0).to(
                    tl.int32
                )
                scales = tl.load(scales_at + group * half + column).to(tl.int32)
                dots = tl.sum(_twice_e2m1(codes & 15) * q[:, None], axis=0)
                even += dots.to(tl.int64) * _e4m3_times_512(scales & 255).to(tl.int64)
                dots = tl.sum(_twice_e2m1(codes >> 4) * q[:, None], axis=0)
                odd += dots.to(tl.int64) * _e4m3_times_512(scales >> 8).to(tl.int64)
            place = partial + ((item * TOKENS + token) * SPLITS + split) * LATENT + column
            tl.store(place, even)
            tl.store(place + half, odd)


@triton.jit
def finish_kernel(
    first,
    count,
    partial,
    y_factor,
    y,
    LATENT: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """y float32 [items, TOKENS, LATENT] = float32(sum of the splits) * factor, outputs in order."""
    item = first + tl.program_id(1)
    if item < tl.load(count):
        half: tl.constexpr = LATENT // 2
        column = tl.program_id(0) * TILE + tl.arange(0, TILE)  # as `partial` has them: even outputs first
        output = tl.where(column < half, column * 2, (column - half) * 2 + 1)
        splits = tl.arange(0, SPLITS)[:, None] * LATENT + column[None, :]
        for token in tl.static_range(TOKENS):
            row = item * TOKENS + token
            sums = tl.sum(tl.load(partial + row * SPLITS * LATENT + splits), axis=0)
            tl.store(y + row * LATENT + output, sums.to(tl.float32) * tl.load(y_factor + row))


@triton.jit
def combine_kernel(
    source,
    weights,
    y,
    host_y,
    out,
    LATENT: tl.constexpr,
    TOKENS: tl.constexpr,
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
    OCTETS: tl.constexpr,
):
    """out[token] = sum over ranks, in rank order, of weight * y, in float64 whose products are exact; one rounding.

    source int32 [TOKENS, TOP_K]: item number of a result computed here, or -1 - n for row n of host_y. Unrolled and
    without branches, so that all reads of host memory are under way at once: each takes a microsecond or two. OCTETS:
    out is in the order that a linear reads (kernels/linear/octets.py).
    """
    token = tl.program_id(1)
    output = tl.program_id(0) * TILE + tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    for rank in tl.static_range(TOP_K):
        item = tl.load(source + token * TOP_K + rank)
        weight = tl.load(weights + token * TOP_K + rank).to(tl.float64)
        theirs = tl.load(host_y + (-1 - item) * LATENT + output, mask=(output < LATENT) & (item < 0), other=0.0)
        mine = tl.load(y + (item * TOKENS + token) * LATENT + output, mask=(output < LATENT) & (item >= 0), other=0.0)
        total += weight * tl.where(item < 0, theirs, mine).to(tl.float64)
    place = octet_place(output, LATENT) if OCTETS else output
    tl.store(out + token * LATENT + place, total.to(tl.float32))
