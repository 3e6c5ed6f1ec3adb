"""Packed weights as numbers that tensor cores take, float16 or bfloat16, two at a time: the language of sweep.py's
kernels, and of the interpreter.

A code's bits are put where the number's exponent and mantissa are; what that is too small by, a product makes good. The
two kinds differ in where that is and by how much: each instruction sequence is written once, with those as words.
"""

import os

import triton
import triton.language as tl

_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


def _both(text: str, f16: tuple[str, ...], bf16: tuple[str, ...]) -> tuple[tl.constexpr, tl.constexpr]:
    """The text for float16 and for bfloat16: %0, %1 ... are the kind's words, %x2 is its pair type."""

    def filled(pair: str, words: tuple[str, ...]) -> tl.constexpr:
        made = text.replace("%x2", pair)
        for number, word in enumerate(words):
            made = made.replace(f"%{number}", word)
        return tl.constexpr(made)

    return filled("f16x2", f16), filled("bf16x2", bf16)


_FP8_F16, _FP8_BF16 = _both(
    """{
            .reg .b32 a, m, c, z;
            mov.b32 c, %0;
            mov.b32 z, 0x80008000;
            prmt.b32 a, $1, 0, 0x1404;
            shr.b32 m, a, %1;
            and.b32 m, m, %2;
            lop3.b32 m, a, 0x80008000, m, 0xEA;
            fma.rn.%x2 $0, m, c, z;
            }""",
    f16=("0x5C005C00", "1", "0x3F803F80"),
    bf16=("0x7B807B80", "4", "0x07F007F0"),
)
_SCALE_F16, _SCALE_BF16 = _both(
    """{
            .reg .b32 a, c, z;
            mov.b32 c, %0;
            mov.b32 z, 0x80008000;
            mul.lo.u32 a, $1, %1;
            %2
            fma.rn.%x2 $0, a, c, z;
            }""",
    f16=("0x74007400", "0x00800080", ""),
    bf16=("0x7A807A80", "0x00100010", "fma.rn.bf16x2 a, a, c, z;"),  # too much for one factor
)
_FP4_F16, _FP4_BF16 = _both(
    """{
            .reg .b32 m, s, z;
            mov.b32 z, 0x80008000;
            mul.lo.u32 m, $1, %0;
            mul.lo.u32 s, $1, 0x01001000;
            and.b32 m, m, %1;
            lop3.b32 m, s, 0x80008000, m, 0xEA;
            fma.rn.%x2 $0, m, $2, z;
            }""",
    f16=("0x00200200", "0x0E000E00"),
    bf16=("0x00040040", "0x01C001C0"),
)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _split(pair, KIND: tl.constexpr):
    """int32 -> the numbers of KIND in its halves."""
    return pair.to(tl.int16).to(KIND, bitcast=True), (pair >> 16).to(tl.int16).to(KIND, bitcast=True)


@triton.jit
def fp8_pair(codes, KIND: tl.constexpr):
    """int16 with two E4M3 codes -> two numbers of KIND.

    A code's bits in bfloat16's places are its value times 2^-120, in float16's times 2^-8, subnormal or not.
    """
    codes = codes.to(tl.int32)
    if _INTERPRETED:
        low = (float_of(((codes & 0x80) << 24) | ((codes & 0x7F) << 20)) * 1.329227995784916e36).to(KIND)
        high = (float_of(((codes & 0x8000) << 16) | ((codes & 0x7F00) << 12)) * 1.329227995784916e36).to(KIND)
    else:
        text: tl.constexpr = _FP8_F16 if tl.float16 == KIND else _FP8_BF16
        pair = tl.inline_asm_elementwise(text, "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1)
        low, high = _split(pair, KIND)
    return low, high


@triton.jit
def scale_pair(codes, KIND: tl.constexpr):
    """E4M3 codes, of values that are not negative -> int32: the value times 2^116 as a bfloat16, twice, or times 2^6 as
    a float16, twice. In the interpreter the first as a float32's bits, for both."""
    codes = codes.to(tl.int32)
    if _INTERPRETED:
        value = float_of((codes & 0x7F) << 20) * 3.3230699894622897e35 * 3.3230699894622897e35
        return value.to(tl.int32, bitcast=True)
    text: tl.constexpr = _SCALE_F16 if tl.float16 == KIND else _SCALE_BF16
    return tl.inline_asm_elementwise(text, "=r,r", [codes], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def fp4_pair(codes, scale, KIND: tl.constexpr):
    """uint8 with two E2M1 codes, int32 of `scale_pair` -> the two values times scale and 2^-10 as bfloat16, or times
    scale and 2^-8 as float16.

    A code's bits in bfloat16's places are its value times 2^-126, in float16's times 2^-14.
    """
    codes = codes.to(tl.int32)
    if _INTERPRETED:
        scale = float_of(scale) * (4.0 if tl.float16 == KIND else 1.0)
        low = (float_of(((codes & 8) << 28) | ((codes & 7) << 22)) * scale).to(KIND)
        high = (float_of(((codes & 0x80) << 24) | ((codes & 0x70) << 18)) * scale).to(KIND)
    else:
        text: tl.constexpr = _FP4_F16 if tl.float16 == KIND else _FP4_BF16
        pair = tl.inline_asm_elementwise(text, "=r,r,r", [codes, scale], dtype=tl.int32, is_pure=True, pack=1)
        low, high = _split(pair, KIND)
    return low, high
