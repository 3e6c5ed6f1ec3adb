"""Attention of a sweep in Triton: against its definition and float64, however prompts are cut, whoever is beside.

What may not be read or written is poisoned: pages of nobody, places beyond a prompt's end, rows of no segment.
"""

import itertools
import math
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from gpu_checks import DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

from kernels.attention.gpu import ShapeError
from kernels.attention.pages import Pages, _store_in_page
from kernels.attention.reference import attend_rounded
from kernels.attention.sweep import Segment, Segments, attend, store_kv, tile_tokens

FP8 = torch.float8_e4m3fn
PAGES = 24
TABLES = torch.randperm(PAGES, generator=torch.Generator().manual_seed(1)).view(3, 8).int()
# Query and shares in BF16 and float32 sums, beside the same in another order: a share may round the other way.
DEFINITION_BOUND = 5e-4
OUT_BOUND = 2.5e-3  # and the result in BF16
# Against float64: what BF16 costs in all, as a root mean square.
FLOAT64_BOUND = 3e-3


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    size: int
    page: int


# Groups of 3 leave rows of a tile empty; of 16, as in the real model, a page is several tiles.
ODD = Shape(6, 2, 16, 16)
WIDE = Shape(16, 1, 16, 32)
SHAPES = pytest.mark.parametrize("shape", [ODD, WIDE], ids=["odd", "wide"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])


class Prompts:
    """Three prompts, and the pages that hold them."""

    LENGTHS = (45, 32, 19)

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.bfloat16) -> None:
        self.shape = shape
        scales = (0.02, 0.03) if dtype == FP8 else (1.0, 1.0)
        halves = [torch.full((PAGES, shape.page, shape.kv_heads, shape.size), torch.nan).to(dtype) for _ in range(2)]
        self.pages = Pages(here(halves[0]), here(halves[1]), *scales)
        self.query, self.key, self.value = (
            [randn(length, heads * shape.size, seed=10 * i + length, scale=scale) for length in self.LENGTHS]
            for i, (heads, scale) in enumerate([(shape.heads, 2.0), (shape.kv_heads, 1.0), (shape.kv_heads, 1.0)])
        )

    def batch(self, parts: list[tuple[int, int, int]]) -> tuple[Segments, Tensor, Tensor, Tensor]:
        """(prompt, first, rows) of each -> segments, query, key and value, with three poisoned rows before each."""
        segments, pieces = [], []
        row = 0
        for prompt, first, rows in parts:
            segments.append(Segment(row + 3, rows, first, prompt))
            pieces.append((prompt, slice(first, first + rows)))
            row += 3 + rows
        found = []
        for tensors in (self.query, self.key, self.value):
            gap = torch.full((3, tensors[0].shape[1]), torch.nan)
            # Columns of a wider tensor: rows need not be neighbours in memory.
            together = torch.cat([piece for prompt, rows in pieces for piece in (gap, tensors[prompt][rows])])
            found.append(here(torch.cat([together, torch.full((len(together), 32), torch.nan)], 1))[:, :-32])
        return Segments(segments, DEVICE), found[0], found[1], found[2]

    def run(self, parts: list[tuple[int, int, int]]) -> list[Tensor]:
        """One sweep: what each part's tokens get."""
        segments, query, key, value = self.batch(parts)
        store_kv(key, value, self.pages, here(TABLES), segments)
        out = poisoned(*query.shape).bfloat16()
        attend(query, self.pages, here(TABLES), segments, out)
        rows = torch.ones(len(out), dtype=torch.bool)
        for each in segments.each:
            rows[each.row : each.row + each.rows] = False
        assert out.cpu()[rows].isnan().all(), "rows of no segment are left alone"
        return [out[each.row : each.row + each.rows].cpu() for each in segments.each]

    def stored(self, prompt: int) -> tuple[Tensor, Tensor]:
        """Key and value [tokens, kv_heads, size] as the pages should have them."""
        found = []
        for tensors, scale in ((self.key, self.pages.key_scale), (self.value, self.pages.value_scale)):
            rounded = (tensors[prompt] / scale).to(self.pages.keys.dtype).float() * scale
            found.append(rounded.view(-1, self.shape.kv_heads, self.shape.size))
        return found[0], found[1]

    def exact(self, prompt: int) -> Tensor:
        """In float64, from a query that is not rounded."""
        key, value = (half.double() for half in self.stored(prompt))
        group = self.shape.heads // self.shape.kv_heads
        query = self.query[prompt].double().view(len(key), self.shape.heads, self.shape.size).transpose(0, 1)
        key, value = (half.repeat_interleave(group, dim=1).transpose(0, 1) for half in (key, value))
        scores = query @ key.transpose(1, 2) / math.sqrt(self.shape.size)
        hidden = torch.ones(len(key[0]), len(key[0]), dtype=torch.bool).triu(1)
        return (scores.masked_fill(hidden, -math.inf).softmax(2) @ value).transpose(0, 1).flatten(1)

    def defined(self, prompt: int) -> Tensor:
        query = self.query[prompt].view(-1, self.shape.heads, self.shape.size)
        return attend_rounded(query, *self.stored(prompt), 0, self.shape.page).flatten(1)


@DTYPES
@SHAPES
def test_is_the_definition_and_near_float64(shape: Shape, dtype: torch.dtype) -> None:
    prompts = Prompts(shape, dtype)
    (found,) = prompts.run([(0, 0, 45)])
    assert relative_error(found, prompts.defined(0)) < OUT_BOUND
    assert relative_error(found, prompts.exact(0)) < FLOAT64_BOUND
    assert relative_error(found, prompts.defined(0).bfloat16()) < DEFINITION_BOUND
    prompts.value[0][33] += 3.0
    assert relative_error(found, prompts.exact(0)) > 10 * FLOAT64_BOUND, "one token of many must show"


@DTYPES
@SHAPES
def test_bits_do_not_depend_on_where_a_prompt_is_cut(shape: Shape, dtype: torch.dtype) -> None:
    (whole,) = Prompts(shape, dtype).run([(0, 0, 45)])
    tile = tile_tokens(shape.heads // shape.kv_heads, shape.page)
    for cuts in ({1, tile - 1, tile, tile + 1, shape.page - 1, shape.page + 1} - {0}, {shape.page, 44}):
        prompts = Prompts(shape, dtype)
        parts = [prompts.run([(0, first, end - first)])[0] for first, end in itertools.pairwise([0, *sorted(cuts), 45])]
        assert torch.equal(torch.cat(parts), whole), cuts
    prompts.query[0][44, 0] += 1.0
    assert not torch.equal(prompts.run([(0, 44, 1)])[0], whole[44:]), "a query that differs must show"


@DTYPES
@SHAPES
def test_prompts_in_one_launch_are_as_alone(shape: Shape, dtype: torch.dtype) -> None:
    parts = [(0, 0, 33), (2, 5, 14), (1, 31, 1), (0, 33, 12)]
    beside = Prompts(shape, dtype)
    beside.run([(1, 0, 31), (2, 0, 5)])
    together = beside.run(parts)
    for part, found in zip(parts, together, strict=True):
        alone = Prompts(shape, dtype)
        if part[1]:
            alone.run([(part[0], 0, part[1])])
        assert torch.equal(alone.run([part])[0], found), part
    assert not torch.equal(together[0], Prompts(shape, dtype).run([(0, 0, 32)])[0]), "lengths are compared too"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, at NaN
@pytest.mark.parametrize("spoilt", ["query", "key", "value"])
def test_what_is_not_finite_reaches_only_those_who_may_see_it(spoilt: str) -> None:
    (clean,) = Prompts(WIDE).run([(0, 0, 45)])
    for number in (math.inf, math.nan):
        prompts = Prompts(WIDE)
        getattr(prompts, spoilt)[0][37, :] = number
        (found,) = prompts.run([(0, 0, 45)])
        assert torch.equal(found[:37], clean[:37]), "nobody before it"
        if spoilt == "query":
            assert torch.equal(found[38:], clean[38:]), "nobody else"
    assert found[37].isnan().all()
    assert spoilt == "query" or found[38:].isnan().all()


@triton.jit
def _decode_store(y, pages, inverse_scale, table, lengths, ROWS: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr):
    row = tl.arange(0, ROWS)
    y = tl.load(y + row)[None, :]
    _store_in_page(y, row, (row < ROWS)[None, :], pages, inverse_scale, table, 0, lengths, 1, ROWS, PAGE, FP8)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, at NaN
@DTYPES
@SHAPES
def test_pages_are_as_decode_leaves_them(shape: Shape, dtype: torch.dtype) -> None:
    """Ties, numbers beyond the largest, subnormals, zeros of both signs and infinities too; nothing else is written."""
    prompts, decoded = Prompts(shape, dtype), Prompts(shape, dtype)
    odd = torch.tensor([0.0, -0.0, 1e30, -1e30, math.inf, -math.inf, math.nan, 1e-40, 1 + 2**-8, 1 + 3 * 2**-8])
    for tensors in (prompts.key, prompts.value):
        tensors[0][11, : len(odd)] = odd
        tensors[0][12] *= 1e-3
    for part in ((0, 0, 9), (0, 9, 36)):
        segments, _, key, value = prompts.batch([part])
        store_kv(key, value, prompts.pages, here(TABLES), segments)
    table, columns = here(TABLES[0]), shape.kv_heads * shape.size
    for half, scale, tensors in zip(
        decoded.pages.raw(), (decoded.pages.key_scale, decoded.pages.value_scale), (prompts.key, prompts.value),
        strict=True,
    ):  # fmt: skip
        for token in range(45):
            length = here(torch.tensor([token + 1], dtype=torch.int32))
            _decode_store[(1,)](
                here(tensors[0][token]), half, 1.0 / scale, table, length, columns, shape.page, dtype == FP8,
                enable_fp_fusion=False,
            )  # fmt: skip
    for found, expected in zip(prompts.pages.raw(), decoded.pages.raw(), strict=True):
        assert torch.equal(found, expected)
        assert (found == Prompts(shape, dtype).pages.raw()[0]).any(), "places of nobody keep their poison"


def test_every_code_of_fp8_is_read_exactly() -> None:
    """One key a token, so that a share is one and the result is the value itself."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = codes.view(FP8).float()
    pages = Pages(*(here(torch.full((16, 16, 1, 16), torch.nan).to(FP8)) for _ in range(2)))
    tables = here(torch.arange(16, dtype=torch.int32)[:, None])
    value = here(torch.cat([values, torch.zeros(2)]).view(16, 16))
    segments = Segments([Segment(row, 1, 0, row) for row in range(16)], DEVICE)
    store_kv(torch.zeros_like(value), value, pages, tables, segments)
    out = torch.empty(16, 16, dtype=torch.bfloat16, device=DEVICE)
    attend(torch.zeros_like(value), pages, tables, segments, out)
    assert torch.equal(out.float(), value)


def test_what_a_gpu_cannot_do_is_refused() -> None:
    pages = Pages(*(torch.zeros(1, 128, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))
    query, table = torch.zeros(1, 32 * 128, device=DEVICE), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    out = poisoned(1, 32 * 128).bfloat16()
    with pytest.raises(ShapeError, match="attention takes up to 64 tokens a page"):
        attend(query, pages, table, Segments([Segment(0, 1, 0, 0)], DEVICE), out)
    assert out.isnan().all()
