"""Triton: dot products of a few activation rows with packed weight rows. Owns the unpacking; no launch, no epilogue.

A program multiplies TILE weight rows by all tokens. All its threads lie along K, each with 16 bytes of every row (a
*unit*: 32 NVFP4, 16 FP8, 8 BF16 or F16, 4 F32 values), so that weights, block scales and activations are loaded where
they are used: nothing goes through shared memory but the last sum. Activations are in octet order (octets.py).

Order of an output's sum: a thread's products as written below, unit after unit, then Triton's tree over the UNITS
threads of the program. It depends on K, format and UNITS; not on TILE, not on the number of tokens.

Unpacking puts the bits of two values into the two halves of a word as float16 numbers a power of two too small, which
is exact, subnormals included: E2M1 comes out times 2^-14, E4M3 times 2^-8 (its NaN code, which a weight may not have,
as 480). Who launches takes that back: `factor` is the tensor's scale times 2^22 for NVFP4, 2^8 for FP8.
"""

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_SIGN_BITS = tl.constexpr(-0x7FFF8000)  # 0x80008000
_SIGN_BYTES = tl.constexpr(-0x7F7F7F80)  # 0x80808080
_HIGH_BYTES = tl.constexpr(-0x00FF0100)  # 0xFF00FF00


@triton.jit
def _low_high(pair):
    """int32 that holds two float16 -> two float32.

    On a GPU through assembly: seeing the halves, LLVM would prepare them one by one and not both at once.
    """
    if _INTERPRETED:
        low = pair.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .f16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
            "=f,=f,r",
            [pair],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return low, high


@triton.jit
def _quarters(tile, UNITS: tl.constexpr):
    """[A, UNITS * 4] -> four [A, UNITS]: a unit's four lie in one thread, so nothing moves."""
    even, odd = tl.split(tl.reshape(tile, [tile.shape[0], UNITS, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _add(total, w, x):
    """total [T, TILE, UNITS] + w [TILE, UNITS] * x [T, UNITS], rounded once."""
    return tl.fma(w[None, :, :], x[:, None, :], total)


@triton.jit
def _load(pointers, present, WHOLE: tl.constexpr):
    """WHOLE: all of `present` is true."""
    return tl.load(pointers) if WHOLE else tl.load(pointers, mask=present, other=0)


@triton.jit
def _inputs(x, norm_weight, squares, place, present, WHOLE: tl.constexpr, NORM: tl.constexpr):
    """Activations at `place` [1, octets] of each token, x pointers [T, 1]; their squares added to `squares`.

    With NORM times the norm's weights; the root mean square is left to the end.
    """
    values = _load(x + place, present, WHOLE)
    if NORM:
        squares = tl.fma(values, values, squares)
        values = values * _load(norm_weight + place, present, WHOLE)
    return values, squares


@triton.jit
def _nvfp4_pair(word, p: tl.constexpr):
    """Values p and p + 4 of a word, p < 4.

    Sign and magnitude of odd nibbles, kept in their bytes, look like the high bytes of float16 numbers: nibbles 3 and 7
    in place, 1 and 5 a byte below. Even nibbles are first moved to where the odd ones are.
    """
    signs = word if p % 2 else word << 4
    magnitudes = word >> 3 if p % 2 else word << 1
    both = (signs & _SIGN_BYTES) | (magnitudes & 0x0E0E0E0E)
    return _low_high((both << (8 - 8 * (p // 2))) & _HIGH_BYTES)


@triton.jit
def _dot_nvfp4(
    total,
    squares,
    words,
    scales,
    x,
    norm_weight,
    octet,
    present,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Nibble p of word j is value p of octet j; two words share a block scale."""
    UNITS: tl.constexpr = total.shape[2]
    word0, word1, word2, word3 = _quarters(words, UNITS)
    first = tl.zeros(total.shape, tl.float32)
    second = tl.zeros(total.shape, tl.float32)
    for p in tl.static_range(4):
        x_low, squares = _inputs(x, norm_weight, squares, p * (K // 8) + octet, present, WHOLE, NORM)
        x_high, squares = _inputs(x, norm_weight, squares, (p + 4) * (K // 8) + octet, present, WHOLE, NORM)
        low0, low1, low2, low3 = _quarters(x_low, UNITS)
        high0, high1, high2, high3 = _quarters(x_high, UNITS)
        low, high = _nvfp4_pair(word0, p)
        first = _add(_add(first, low, low0), high, high0)
        low, high = _nvfp4_pair(word1, p)
        first = _add(_add(first, low, low1), high, high1)
        low, high = _nvfp4_pair(word2, p)
        second = _add(_add(second, low, low2), high, high2)
        low, high = _nvfp4_pair(word3, p)
        second = _add(_add(second, low, low3), high, high3)
    scale0, scale1 = _low_high(((scales & 0xFF) << 7) | ((scales >> 8) << 23))
    total = tl.fma(scale0[None, :, :], first, total)
    return tl.fma(scale1[None, :, :], second, total), squares


@triton.jit
def _fp8_pair(word, odd: tl.constexpr):
    """Values odd and odd + 2 of a word."""
    word = word << (8 - 8 * odd)
    return _low_high((word & _SIGN_BITS) | ((word >> 1) & 0x3F803F80))


@triton.jit
def _two_floats(word):
    """int64 -> the two float32 in it, the lower first."""
    return word.to(tl.int32).to(tl.float32, bitcast=True), (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _input_pairs(x, norm_weight, squares, place, present, WHOLE: tl.constexpr, NORM: tl.constexpr):
    """As `_inputs` for the two octets of a unit, read as one int64."""
    first, second = _two_floats(_load(x + place, present, WHOLE))
    if NORM:
        squares = tl.fma(second, second, tl.fma(first, first, squares))
        first_weight, second_weight = _two_floats(_load(norm_weight + place, present, WHOLE))
        first, second = first * first_weight, second * second_weight
    return first, second, squares


@triton.jit
def _dot_fp8(
    total, squares, words, x, norm_weight, unit, present, K: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr
):
    """Words 0 and 1 hold values 0..3 and 4..7 of the unit's first octet, words 2 and 3 those of its second."""
    word0, word1, word2, word3 = _quarters(words, total.shape[2])
    for half in tl.static_range(2):
        for odd in tl.static_range(2):
            p = 4 * half + odd
            low0, low1, squares = _input_pairs(x, norm_weight, squares, p * (K // 16) + unit, present, WHOLE, NORM)
            high0, high1, squares = _input_pairs(
                x, norm_weight, squares, (p + 2) * (K // 16) + unit, present, WHOLE, NORM
            )
            low, high = _fp8_pair(word1 if half else word0, odd)
            total = _add(_add(total, low, low0), high, high0)
            low, high = _fp8_pair(word3 if half else word2, odd)
            total = _add(_add(total, low, low1), high, high1)
    return total, squares


@triton.jit
def _dot_16(
    total,
    squares,
    words,
    x,
    norm_weight,
    unit,
    present,
    K: tl.constexpr,
    WHOLE: tl.constexpr,
    NORM: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """BF16 and F16: word j holds values 2j and 2j + 1 of the unit's octet."""
    word0, word1, word2, word3 = _quarters(words, total.shape[2])
    for j in tl.static_range(4):
        word = word0 if j == 0 else word1 if j == 1 else word2 if j == 2 else word3
        x_low, squares = _inputs(x, norm_weight, squares, 2 * j * (K // 8) + unit, present, WHOLE, NORM)
        x_high, squares = _inputs(x, norm_weight, squares, (2 * j + 1) * (K // 8) + unit, present, WHOLE, NORM)
        if FORMAT == "BF16":
            low = (word << 16).to(tl.float32, bitcast=True)
            high = (word & -0x10000).to(tl.float32, bitcast=True)
        else:
            low, high = _low_high(word)
        total = _add(_add(total, low, x_low), high, x_high)
    return total, squares


@triton.jit
def _dot_32(
    total, squares, words, x, norm_weight, unit, present, K: tl.constexpr, WHOLE: tl.constexpr, NORM: tl.constexpr
):
    """F32: word j is value j of an even unit's octet, value 4 + j of an odd one's."""
    word0, word1, word2, word3 = _quarters(words, total.shape[2])
    for j in tl.static_range(4):
        word = word0 if j == 0 else word1 if j == 1 else word2 if j == 2 else word3
        place = (4 * (unit % 2) + j) * (K // 8) + unit // 2
        values, squares = _inputs(x, norm_weight, squares, place, present, WHOLE, NORM)
        total = _add(total, word.to(tl.float32, bitcast=True), values)
    return total, squares


@triton.jit
def _weights(
    weight, scales, rows, start, BLOCKS: tl.constexpr, UNITS: tl.constexpr, FORMAT: tl.constexpr, MASKED: tl.constexpr
):
    """What a step needs of its rows: int32 words [TILE, UNITS * 4] and pairs of block scales int32 [TILE, UNITS]."""
    word = start * 4 + tl.arange(0, UNITS * 4)[None, :]
    unit = start + tl.arange(0, UNITS)[None, :]
    words_at = weight + rows[:, None] * (BLOCKS * 4) + word
    scales_at = scales + rows[:, None] * BLOCKS + unit
    block_scales = unit
    if MASKED:
        words = tl.load(words_at, mask=word < BLOCKS * 4, other=0)
        if FORMAT == "NVFP4":
            block_scales = tl.load(scales_at, mask=unit < BLOCKS, other=0).to(tl.int32)
    else:
        words = tl.load(words_at)
        if FORMAT == "NVFP4":
            block_scales = tl.load(scales_at).to(tl.int32)
    return words, block_scales


@triton.jit
def _halve(x):
    """[T, N] -> [T, N/2], neighbours added."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    return even + odd


@triton.jit
def _sum_of_squares(squares, FORMAT: tl.constexpr):
    """[T, N] -> [T], in an order that does not depend on T.

    Triton's own sum goes by how the numbers lie in the threads, which it takes from the loads they come from. Where
    those are next to each other that is the same for every T (see tests/kernels/test_gpu_compile.py); F32's are not.
    """
    if FORMAT == "F32":
        for _ in tl.static_range(10):
            if squares.shape[1] > 1:
                squares = _halve(squares)
        return tl.reshape(squares, [squares.shape[0]])
    return tl.sum(squares, axis=1)


@triton.jit
def project(
    x,
    x_single,
    norm_weight,
    eps,
    weight,
    scales,
    factor,
    rows,
    tokens,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    NORM: tl.constexpr,
    T: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """[T, TILE]: weight rows `rows` times x (with NORM: x / rms(x) * norm_weight) times `factor`.

    x float32 [tokens, K] and norm_weight float32 [K] in octet order; weight int32 [N, words]; scales int16 [N, K/32],
    two E4M3 bytes each (NVFP4 only). T is `tokens` or the next power of two: rows beyond repeat the last token.
    `x_single` is x, and like `scales` it must be a kernel argument whose alignment Triton is not told
    (do_not_specialize_on_alignment): else it gives a thread several neighbours to load, and moves them afterwards.
    """
    VALUES: tl.constexpr = 32 if FORMAT == "NVFP4" else 16 if FORMAT == "FP8" else 4 if FORMAT == "F32" else 8
    WIDE: tl.constexpr = 4 if FORMAT == "NVFP4" else 1  # neighbouring octets that a thread loads at once
    BLOCKS: tl.constexpr = K // VALUES
    WHOLE: tl.constexpr = BLOCKS % UNITS == 0
    if FORMAT != "NVFP4":
        x = x_single
    if FORMAT == "FP8":  # the two octets of a unit as one number
        x = x.to(tl.pointer_type(tl.int64), bitcast=True)
        norm_weight = norm_weight.to(tl.pointer_type(tl.int64), bitcast=True)
    x = x + tl.minimum(tl.arange(0, T), tokens - 1)[:, None] * (K // 2 if FORMAT == "FP8" else K)
    total = tl.zeros([T, rows.shape[0], UNITS], tl.float32)
    squares = tl.zeros([T, UNITS * WIDE], tl.float32)
    if AHEAD:
        words, block_scales = _weights(weight, scales, rows, 0, BLOCKS, UNITS, FORMAT, not WHOLE)
    for start in tl.range(0, BLOCKS, UNITS):
        if AHEAD:  # the next step's weights are on their way while this one's are used
            next_words, next_scales = _weights(weight, scales, rows, start + UNITS, BLOCKS, UNITS, FORMAT, True)
        else:
            words, block_scales = _weights(weight, scales, rows, start, BLOCKS, UNITS, FORMAT, not WHOLE)
        place = start * WIDE + tl.arange(0, UNITS * WIDE)[None, :]
        present = place < BLOCKS * WIDE
        if FORMAT == "NVFP4":
            total, squares = _dot_nvfp4(
                total, squares, words, block_scales, x, norm_weight, place, present, K, WHOLE, NORM
            )
        elif FORMAT == "FP8":
            total, squares = _dot_fp8(total, squares, words, x, norm_weight, place, present, K, WHOLE, NORM)
        elif FORMAT == "F32":
            total, squares = _dot_32(total, squares, words, x, norm_weight, place, present, K, WHOLE, NORM)
        else:
            total, squares = _dot_16(total, squares, words, x, norm_weight, place, present, K, WHOLE, NORM, FORMAT)
        if AHEAD:
            words, block_scales = next_words, next_scales
    y = tl.sum(total, axis=2) * factor
    if NORM:
        mean = _sum_of_squares(squares, FORMAT) * (1.0 / K)
        y = y * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))[:, None]
    return y
