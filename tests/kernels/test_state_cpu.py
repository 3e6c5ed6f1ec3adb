"""The small kernels in C++ against their references: equal in every bit, for odd shapes, odd memory and odd values."""

import ctypes
import itertools
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_memory import framed, randn
from torch import Tensor

import kernels.attention.cpu
import kernels.attention.reference
import kernels.mamba.cpu
import kernels.mamba.reference
import kernels.norm.cpu
import kernels.norm.reference
import kernels.router.cpu
import kernels.router.reference
from kernels import build
from kernels.elementary import binding
from kernels.workers.pool import available_isas

ODD = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, math.inf, -math.inf, math.nan, 88.8, -104.0, 1e-20])


@pytest.fixture(autouse=True)
def library_is_there() -> None:
    """Without it the references would be compared with themselves."""
    assert binding.bind(*kernels.norm.cpu.RMS) is not None


def bits(tensor: Tensor) -> Tensor:
    """Every bit but which NaN it is."""
    tensor = tensor.contiguous()
    return torch.where(tensor.isnan(), -1, tensor.view(torch.int32)) if tensor.dtype == torch.float32 else tensor


def odd(tensor: Tensor) -> Tensor:
    """Odd values sprinkled in, a few of them."""
    flat = tensor.clone().view(-1)
    flat[:: max(1, len(flat) // len(ODD))][: len(ODD)] = ODD[: len(flat[:: max(1, len(flat) // len(ODD))])]
    return flat.view_as(tensor)


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 100), (7, 256), (5, 4096)], ids=str)
@pytest.mark.parametrize("values", [framed, odd], ids=["framed", "odd"])
def test_rms_norm(shape: tuple[int, int], values) -> None:
    x, weight = values(randn(*shape, scale=3)), randn(shape[1], seed=1)
    expected = kernels.norm.reference.rms_norm(x, weight, 1e-5)
    assert torch.equal(bits(kernels.norm.cpu.rms_norm(x, weight, 1e-5)), bits(expected))


@pytest.mark.parametrize(("columns", "group"), [(1, 1), (126, 63), (300, 100), (512, 256), (8192, 1024)])
@pytest.mark.parametrize("values", [framed, odd], ids=["framed", "odd"])
def test_gated_norm(columns: int, group: int, values) -> None:
    y, z, weight = values(randn(5, columns)), values(randn(5, columns, seed=1, scale=4)), randn(columns, seed=2)
    expected = kernels.norm.reference.gated_group_rms_norm(y, z, weight, group, 1e-5)
    assert torch.equal(bits(kernels.norm.cpu.gated_group_rms_norm(y, z, weight, group, 1e-5)), bits(expected))


@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (63, 6), (64, 64), (512, 22)])
@pytest.mark.parametrize("normalise", [True, False])
def test_choice(experts: int, top_k: int, normalise: bool) -> None:
    logits, bias = randn(21, experts, scale=3), randn(experts, seed=1)
    logits[5:10] = logits[5:10].round()  # many ties
    logits[10] = -1000.0
    logits[11:14] = odd(logits[11:14])
    expected = kernels.router.reference.choose(framed(logits), bias.round(), top_k, 2.5, normalise)
    found = kernels.router.cpu.choose(framed(logits), bias.round(), top_k, 2.5, normalise)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(bits(ours), bits(theirs))


@pytest.mark.parametrize(("rows", "channels", "taps"), [(1, 1, 1), (2, 7, 4), (33, 768, 4), (1, 100, 3)])
@pytest.mark.parametrize("values", [framed, odd], ids=["framed", "odd"])
def test_convolution(rows: int, channels: int, taps: int, values) -> None:
    x, weight, bias = values(randn(rows, channels, scale=3)), randn(channels, taps, seed=1), randn(channels, seed=2)
    state, expected_state = (randn(channels, taps - 1, seed=3) for _ in range(2))
    expected = kernels.mamba.reference.causal_conv(x, expected_state, weight, bias)
    assert torch.equal(bits(kernels.mamba.cpu.causal_conv(x, state, weight, bias)), bits(expected))
    assert torch.equal(bits(state), bits(expected_state))


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (6, 5, 3, 7), (8, 64, 2, 64), (4, 3, 1, 100)], ids=str)
@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize("values", [framed, odd], ids=["framed", "odd"])
def test_scan(sizes: tuple[int, int, int, int], rows: int, values) -> None:
    heads, size, groups, columns = sizes
    inputs = (
        values(randn(rows, heads, size, seed=1)),
        values(randn(rows, heads, seed=2, scale=3)),
        framed(randn(rows, groups, columns, seed=3)),
        framed(randn(rows, groups, columns, seed=4)),
        -randn(heads, seed=5).exp(),
        randn(heads, seed=6),
        randn(heads, seed=7),
    )
    state, expected_state = (randn(heads, size, columns, seed=8) for _ in range(2))
    expected = kernels.mamba.reference.selective_scan(*inputs, expected_state)
    assert torch.equal(bits(kernels.mamba.cpu.selective_scan(*inputs, state)), bits(expected))
    assert torch.equal(bits(state), bits(expected_state))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (6, 3, 7), (8, 2, 32), (4, 4, 100)], ids=str)
@pytest.mark.parametrize(("rows", "first"), [(1, 0), (1, 99), (30, 0), (13, 50)])
def test_attention(sizes: tuple[int, int, int], rows: int, first: int) -> None:
    heads, kv_heads, size = sizes
    query = framed(randn(rows, heads, size, scale=3))
    key, value = (framed(randn(first + rows, kv_heads, size, seed=seed)) for seed in (1, 2))
    for changed in (query, key):
        expected = kernels.attention.reference.attend(query, key, value, first)
        assert torch.equal(bits(kernels.attention.cpu.attend(query, key, value, first)), bits(expected))
        changed[-1] = 1e18  # then scores that overflow


@pytest.mark.parametrize("flags", [("-O1",), ("-mavx2",)], ids=["plain", "avx2"])
def test_other_instruction_sets(flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes the best that this processor has; the others must give the same bits."""
    if flags == ("-mavx2",) and "avx2" not in available_isas():
        pytest.skip("this processor has no AVX2")
    target = tmp_path / "small.so"
    sources = [build.ROOT / f"kernels/{name}/{name}.cpp" for name in ("norm", "router", "mamba", "attention")]
    command = [build.compiler()[0], *build.FLAGS, *flags, "-DTHIMBLE_CLONES=", "-shared", *sources, "-o", target]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))

    def bind(name: str, *arguments: type) -> Any:
        function = library[name]
        function.argtypes, function.restype = arguments, None
        return function

    for module in (kernels.norm.cpu, kernels.router.cpu, kernels.mamba.cpu, kernels.attention.cpu):
        monkeypatch.setattr(module, "bind", bind)
    test_rms_norm((5, 4096), odd)
    test_gated_norm(512, 256, odd)
    test_choice(64, 64, True)
    test_convolution(33, 768, 4, odd)
    test_scan((8, 64, 2, 64), 19, odd)
    test_attention((8, 2, 32), 13, 50)


def test_rows_do_not_see_each_other_in_cpp_either() -> None:
    x, weight, bias = randn(63, 101), randn(101, 4, seed=1), randn(101, seed=2)
    whole_state, state = torch.zeros(101, 3), torch.zeros(101, 3)
    whole = kernels.mamba.cpu.causal_conv(x, whole_state, weight, bias)
    parts = [kernels.mamba.cpu.causal_conv(part, state, weight, bias) for part in torch.split(x, [1, 2, 60])]
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(state, whole_state)


def test_one_changed_bit_shows() -> None:
    """Else the equalities above would show nothing."""
    x, weight = randn(3, 64), randn(64, seed=1)
    out = kernels.norm.cpu.rms_norm(x, weight, 1e-5)
    for row, column in itertools.product((0, 2), (0, 63)):
        changed = out.clone()
        changed.view(torch.int32)[row, column] ^= 1
        assert not torch.equal(bits(changed), bits(out))


def test_without_a_library_the_references_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kernels.norm.cpu, kernels.router.cpu, kernels.mamba.cpu, kernels.attention.cpu):
        monkeypatch.setattr(module, "bind", lambda *_: None)
    x, weight, state = randn(3, 8), randn(8, 4, seed=1), torch.zeros(8, 3)
    assert kernels.norm.cpu.rms_norm(x, weight[:, 0].contiguous(), 1e-5).shape == (3, 8)
    assert kernels.norm.cpu.gated_group_rms_norm(x, x, weight[:, 0].contiguous(), 4, 1e-5).shape == (3, 8)
    assert kernels.router.cpu.choose(x, x[0], 2, 1.0, True)[0].shape == (3, 2)
    assert kernels.mamba.cpu.causal_conv(x, state, weight, x[0]).shape == (3, 8)
    scanned = kernels.mamba.cpu.selective_scan(
        x[:, :, None], x, x[:, :1, None], x[:, :1, None], -x[0].abs(), x[0], x[0], torch.zeros(8, 1, 1)
    )
    assert scanned.shape == (3, 8, 1)
    assert kernels.attention.cpu.attend(x[:, :, None], x[:, :1, None], x[:, :1, None], 0).shape == (3, 8, 1)
