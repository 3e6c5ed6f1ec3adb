"""Convolution and scan against transformers and a float64 recurrence; any cut of a prompt gives the same bits."""

import itertools

import pytest
import torch
from odd_memory import distance, framed, randn, tolerance
from torch import Tensor

from kernels.mamba.reference import causal_conv, selective_scan

TOLERANCE = tolerance("mamba")

Sizes = tuple[int, int, int, int]  # heads, head_dim, groups, state
SIZES = [(1, 1, 1, 1), (6, 5, 3, 7), (8, 64, 2, 64), (4, 3, 1, 100)]
CUTS = [(1,) * 63, (63,), (1, 62), (31, 32), (7, 13, 43), (60, 3)]


def scan_inputs(tokens: int, sizes: Sizes, dt_shift: float = 0.0) -> tuple[Tensor, ...]:
    """x, dt, b, c, a, d, dt_bias."""
    heads, head_dim, groups, state = sizes
    return (
        randn(tokens, heads, head_dim, seed=1),
        randn(tokens, heads, seed=2) + dt_shift,
        randn(tokens, groups, state, seed=3),
        randn(tokens, groups, state, seed=4),
        -randn(heads, seed=5).exp(),
        randn(heads, seed=6),
        randn(heads, seed=7),
    )


def scan_exactly(inputs: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence in float64, written with loops over heads."""
    x, dt, b, c, a, d, dt_bias = (tensor.double() for tensor in inputs)
    state, outputs = state.double().clone(), torch.empty_like(x)
    for token, head in itertools.product(range(len(x)), range(x.shape[1])):
        group = head // (x.shape[1] // b.shape[1])
        step = torch.log1p(torch.exp(dt[token, head] + dt_bias[head]))
        state[head] = state[head] * torch.exp(a[head] * step) + step * torch.outer(x[token, head], b[token, group])
        outputs[token, head] = state[head] @ c[token, group] + d[head] * x[token, head]
    return outputs, state


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_scan_is_the_recurrence(sizes: Sizes) -> None:
    heads, head_dim, _, columns = sizes
    inputs, before = scan_inputs(19, sizes), randn(heads, head_dim, columns, seed=9)
    exact, exact_state = scan_exactly(inputs, before)
    state = framed(before)
    found = selective_scan(*map(framed, inputs), state)
    assert distance(found, exact) < TOLERANCE
    assert distance(state, exact_state) < TOLERANCE


@pytest.mark.parametrize("tokens", [1, 5, 130])
def test_scan_is_transformers_chunk_scan(tokens: int) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    inputs, state = scan_inputs(tokens, (8, 16, 2, 32)), torch.zeros(8, 16, 32)
    x, dt, b, c, a, d, dt_bias = inputs
    theirs, their_state = mamba2_chunk_scan(
        x[None], dt[None], a, b[None], c[None], 64, D=d, dt_bias=dt_bias, dt_softplus=True, return_final_states=True
    )
    found = selective_scan(*inputs, state)
    assert distance(found, theirs[0]) < TOLERANCE
    assert distance(state, their_state[0]) < TOLERANCE


def test_the_time_step_is_not_clamped() -> None:
    inputs, state, clamped = scan_inputs(9, (4, 8, 1, 8), dt_shift=-12.0), torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)
    exact, exact_state = scan_exactly(inputs, state)
    assert distance(selective_scan(*inputs, state), exact) < TOLERANCE
    assert distance(state, exact_state) < TOLERANCE
    floor = torch.log(torch.expm1(torch.tensor(1e-3)))  # softplus(floor) = 0.001, transformers' prefill limit
    x, dt, b, c, a, d, dt_bias = inputs
    selective_scan(x, (dt + dt_bias).clamp(min=floor) - dt_bias, b, c, a, d, dt_bias, clamped)
    assert distance(clamped, exact_state) > 1, "a clamp must show"


def test_heads_share_b_and_c_by_group() -> None:
    x, dt, b, c, a, d, dt_bias = scan_inputs(5, (6, 4, 3, 8))
    whole = selective_scan(x, dt, b, c, a, d, dt_bias, torch.zeros(6, 4, 8))
    swapped = selective_scan(x, dt, b.flip(1), c.flip(1), a, d, dt_bias, torch.zeros(6, 4, 8))
    assert torch.equal(whole[:, 2:4], swapped[:, 2:4])  # the middle group
    assert not torch.equal(whole[:, :2], swapped[:, :2])


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(map(str, cut[:3])))
@pytest.mark.parametrize("at_once", [1, 1 << 19], ids=["one-by-one", "blocks"])
def test_any_cut_of_a_scan_gives_the_same_bits(cut: tuple[int, ...], at_once: int, monkeypatch) -> None:
    inputs, whole_state, state = scan_inputs(63, (8, 64, 2, 64)), torch.zeros(8, 64, 64), torch.zeros(8, 64, 64)
    whole = selective_scan(*inputs, whole_state)
    monkeypatch.setattr("kernels.mamba.reference.STATES_AT_ONCE", at_once)
    parts = [torch.split(tensor, cut) for tensor in inputs[:4]]
    found = torch.cat([selective_scan(*tokens, *inputs[4:], state) for tokens in zip(*parts, strict=True)])
    assert torch.equal(found, whole)
    assert torch.equal(state, whole_state)


@pytest.mark.parametrize(("channels", "taps"), [(1, 1), (7, 4), (768, 4), (100, 3)])
def test_convolution_is_transformers(channels: int, taps: int) -> None:
    from transformers.models.nemotron_h.modeling_nemotron_h import causal_conv1d_fn

    x, weight, bias = randn(33, channels), randn(channels, taps, seed=1), randn(channels, seed=2)
    state = framed(torch.zeros(channels, taps - 1))
    theirs = causal_conv1d_fn(x.T[None], weight, bias, activation="silu")[0].T
    found = causal_conv(framed(x), state, framed(weight), framed(bias))
    assert distance(found, theirs) < TOLERANCE
    assert torch.equal(state, x.T[:, 33 - (taps - 1) :])
    assert distance(causal_conv(x, torch.zeros_like(state), weight, 0 * bias), theirs) > 0.01, "the bias must show"
    if taps > 1:
        flipped = causal_conv(x, torch.zeros_like(state), weight.flip(1), bias)
        assert distance(flipped, theirs) > 0.1, "the order of taps must show"


@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "-".join(map(str, cut[:3])))
def test_any_cut_of_a_convolution_gives_the_same_bits(cut: tuple[int, ...]) -> None:
    x, weight, bias = randn(63, 101), randn(101, 4, seed=1), randn(101, seed=2)
    whole_state, state = torch.zeros(101, 3), torch.zeros(101, 3)
    whole = causal_conv(x, whole_state, weight, bias)
    found = torch.cat([causal_conv(part, state, weight, bias) for part in torch.split(x, cut)])
    assert torch.equal(found, whole)
    assert torch.equal(state, whole_state)


def test_a_state_that_is_not_carried_shows() -> None:
    x, weight, bias = randn(8, 5), randn(5, 4, seed=1), randn(5, seed=2)
    whole = causal_conv(x, torch.zeros(5, 3), weight, bias)
    assert not torch.equal(causal_conv(x[4:], torch.zeros(5, 3), weight, bias), whole[4:])
    inputs = scan_inputs(8, (2, 3, 1, 4))
    whole = selective_scan(*inputs, torch.zeros(2, 3, 4))
    late = [tensor[4:] for tensor in inputs[:4]]
    assert not torch.equal(selective_scan(*late, *inputs[4:], torch.zeros(2, 3, 4)), whole[4:])
