"""The interpreter without its repetitions computes what Triton's own does, and leaves the language as it found it."""

import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU, not in the interpreter")


@triton.jit
def larger(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def mixed(a, b):
    return tl.sum(a.to(tl.bfloat16).to(tl.float32)[:, None] * b[None, :], axis=1) + tl.reduce(b, 0, larger)


@triton.jit
def kernel(x, counts, out, ids, SIZE: tl.constexpr, FAILS: tl.constexpr):
    at = tl.arange(0, SIZE)
    row = tl.program_id(0)
    values = tl.load(x + row * SIZE + at, mask=at < SIZE - 3, other=1.5)
    found = mixed(values, tl.cumsum(values.to(tl.float8e4nv).to(tl.float32), axis=0))
    square = tl.reshape(values, (SIZE // 4, 4))
    found += tl.reshape(tl.trans(tl.dot(square, tl.trans(square)).to(tl.float16).to(tl.float32)), (SIZE,))
    if FAILS:
        found = larger(found, tl.arange(0, SIZE // 2))
    tl.store(out + row * SIZE + at, found)
    number = tl.load(counts + at) * 0x10001 + (at << 3)  # beyond 32 bits
    tl.store(ids + row * SIZE + at, tl.sort(number ^ row))


def run(fails: bool = False) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(5))
    out, ids = torch.full((3, 16), torch.nan), torch.zeros(3, 16, dtype=torch.int32)
    kernel[(3,)](x, torch.arange(16, dtype=torch.int32) * 0x1234567, out, ids, SIZE=16, FAILS=fails)
    return out, ids


def test_it_computes_what_triton_s_own_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found, ids = run()
    with monkeypatch.context() as patch:
        for owner, name, value in quick_interpreter.ORIGINAL:
            patch.setattr(owner, name, value)
        assert interpreter._patch_lang.__module__ == interpreter.__name__, "the other one"
        exact, exact_ids = run()
    assert interpreter._patch_lang.__module__ == quick_interpreter.__name__
    assert torch.equal(found, exact)
    assert torch.equal(ids, exact_ids)
    assert found.isfinite().all()
    assert ids.unique().numel() > 40


@pytest.mark.parametrize("fails", [False, True])
def test_the_language_is_then_as_it_was(fails: bool) -> None:
    watched = [
        (tl, "load"),
        (core, "load"),
        (tl, "range"),
        (core, "reduce"),
        (tl.tensor, "__add__"),
        (tl.dtype, "to_ir"),
    ]
    before = [getattr(owner, name) for owner, name in watched]
    if fails:
        with pytest.raises(interpreter.InterpreterError, match="incompatible dimensions"):
            run(fails=True)
    else:
        run()
    assert [getattr(owner, name) for owner, name in watched] == before


@pytest.mark.parametrize("shape", [[3], [4, 6], []])
def test_a_bad_shape_is_refused_as_before(shape: list) -> None:
    for make in (quick_interpreter._init_block_type, quick_interpreter._block_type):
        with pytest.raises((TypeError, ValueError), match=r"power of 2|0d block"):
            make(object.__new__(tl.block_type), tl.int32, shape)
