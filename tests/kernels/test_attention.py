"""Attention against torch and float64; a query's bits do not depend on what is beside or behind it."""

import math

import pytest
import torch
from odd_memory import distance, framed, randn, tolerance
from torch import Tensor

from kernels.attention.reference import attend

TOLERANCE = tolerance("attention")

Sizes = tuple[int, int, int]  # heads, kv_heads, head_dim
SIZES = [(1, 1, 1), (6, 3, 7), (8, 2, 32), (4, 4, 100)]


def inputs(tokens: int, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    heads, kv_heads, size = sizes
    return randn(tokens, heads, size), randn(tokens, kv_heads, size, seed=1), randn(tokens, kv_heads, size, seed=2)


def exactly(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    by_head = (tensor.double().transpose(0, 1) for tensor in (query, key, value))
    mixed = torch.nn.functional.scaled_dot_product_attention(*by_head, is_causal=True, scale=scale, enable_gqa=True)
    return mixed.transpose(0, 1)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 63, 100])
def test_is_torch(tokens: int, sizes: Sizes) -> None:
    query, key, value = inputs(tokens, sizes)
    exact = exactly(query, key, value)
    assert distance(attend(framed(query), framed(key), framed(value), 0), exact) < TOLERANCE
    if tokens > 1 and sizes[2] > 1:
        assert distance(exactly(query, key, value, scale=1.0), exact) > 1e-2, "the scale must show"


def test_positions_are_not_encoded() -> None:
    """Without RoPE a query's earlier tokens may be permuted; with it this would show."""
    query, key, value = inputs(40, (8, 2, 32))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(3))
    plain, mixed = attend(query[-1:], key, value, 39), attend(query[-1:], key[order], value[order], 39)
    assert distance(mixed, plain) < TOLERANCE
    angles = torch.arange(40.0)[:, None] * torch.logspace(0, -3, 16)
    turn = torch.stack([angles.cos(), angles.sin()], dim=2)[:, None]
    pairs = torch.view_as_complex(key.view(40, 2, 16, 2)) * torch.view_as_complex(turn.contiguous())
    rotated = torch.view_as_real(pairs).flatten(2)
    assert distance(attend(query[-1:], rotated, value, 39), plain) > 0.1, "a rotation must show"


@pytest.mark.parametrize("cut", [(1,) * 100, (37, 63), (99, 1), (3, 50, 47)], ids=lambda cut: str(cut[:3]))
@pytest.mark.parametrize("products", [1, 50_000, 1 << 21])
def test_any_cut_gives_the_same_bits(cut: tuple[int, ...], products: int, monkeypatch) -> None:
    query, key, value = inputs(100, (8, 2, 32))
    whole = attend(query, key, value, 0)
    monkeypatch.setattr("kernels.attention.reference.PRODUCTS_AT_ONCE", products)
    found, first = [], 0
    for part in torch.split(query, cut):
        seen = first + len(part)
        found.append(attend(part, framed(key[:seen]), framed(value[:seen]), first))
        first = seen
    assert torch.equal(torch.cat(found), whole)


def test_later_tokens_are_not_seen() -> None:
    query, key, value = inputs(50, (4, 2, 16))
    before = attend(query[:20], key, value, 0)
    key[20:], value[20:] = 1e6, -1e6
    assert torch.equal(attend(query[:20], key, value, 0), before)
    key[19] = 3.0
    assert not torch.equal(attend(query[:20], key, value, 0)[19], before[19])


def test_large_scores_do_not_overflow() -> None:
    query, key, value = inputs(9, (2, 1, 8))
    mixed = attend(query * 1e4, key * 1e4, value, 0)
    assert torch.isfinite(mixed).all()
    assert distance(mixed, exactly(query * 1e4, key * 1e4, value)) < TOLERANCE


def test_equal_keys_give_the_mean() -> None:
    _, _, value = inputs(7, (2, 2, 4))
    mixed = attend(torch.zeros(1, 2, 4), torch.ones(7, 2, 4), value, 6)
    assert distance(mixed[0], value.double().mean(0)) < TOLERANCE
    assert math.isclose(mixed.square().sum().item(), value.mean(0).square().sum().item(), rel_tol=1e-5)
