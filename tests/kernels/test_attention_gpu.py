"""Paged attention in Triton against the reference, BF16 and FP8 pages, everything that may not be read poisoned."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

from kernels.attention.gpu import SPLIT_PAGES, ShapeError, Workspace, attend, check
from kernels.attention.pages import Pages, qkv, to_bf16, to_e4m3
from kernels.attention.reference import attend as reference
from kernels.linear.gpu import Linear, Norm, Tiling
from kernels.linear.octets import from_octets, to_octets
from kernels.linear.reference import linear
from kernels.norm.reference import rms_norm

FP8 = torch.float8_e4m3fn
DEMO = json.loads((Path(__file__).parents[2] / "demo/config.json").read_text())["llm_config"]


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    size: int
    page: int

    @property
    def lengths(self) -> list[int]:
        """The first token; a run that is just full; three runs, the last one begun in the middle of a page."""
        run = SPLIT_PAGES * self.page
        return [1, run, 2 * run + self.page + self.page // 3]

    @property
    def room(self) -> int:
        return 3 * SPLIT_PAGES * self.page


# All of them are shapes that a GPU takes: the same tests run there.
SMALLEST = Shape(6, 2, 16, 16)
OF_DEMO = Shape(DEMO["num_attention_heads"], DEMO["num_key_value_heads"], DEMO["head_dim"], page=64)
SHAPES = pytest.mark.parametrize("shape", [SMALLEST, OF_DEMO], ids=["smallest", "demo"])
# On a GPU a product of two matrices takes three TF32 parts of its float32 operand.
ATTEND_BOUND = 1e-5


class Sequences:
    """Three sequences' tokens in pages in random order; pages beyond them, and places beyond their ends, are NaN."""

    def __init__(self, dtype: torch.dtype, shape: Shape = SMALLEST) -> None:
        self.shape = shape
        scales = (0.02, 0.03) if dtype == FP8 else (1.0, 1.0)
        pages = (40, shape.page, shape.kv_heads, shape.size)
        keys, values = (torch.full(pages, float("nan")).to(dtype) for _ in range(2))
        self.tables = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:36].view(3, 12).int()
        self.keys = [randn(n, shape.kv_heads, shape.size, seed=n) for n in shape.lengths]
        self.values = [randn(n, shape.kv_heads, shape.size, seed=n + 1) for n in shape.lengths]
        for tensors, half, scale in ((self.keys, keys, scales[0]), (self.values, values, scales[1])):
            for sequence, tokens in enumerate(tensors):
                stored = (tokens / scale).to(dtype)
                for token, value in enumerate(stored):
                    half[self.tables[sequence, token // shape.page], token % shape.page] = value
                tensors[sequence] = stored.float() * scale
        self.pages = Pages(here(keys), here(values), *scales)
        self.query = randn(3, shape.heads * shape.size, seed=9, scale=2)

    def run(self, rows: slice = slice(0, 3), rooms: int = 1) -> Tensor:
        query, tables = here(self.query[rows]), here(self.tables)[rows]
        lengths = here(torch.tensor(self.shape.lengths[rows], dtype=torch.int32))
        heads, _, size, page = self.shape
        workspace = Workspace(len(query), heads, size, rooms * self.shape.room, page, DEVICE)
        for buffer in (workspace.mixed, workspace.best, workspace.total):
            buffer.fill_(torch.nan)
        out = poisoned(*query.shape)
        attend(query, self.pages, tables, lengths, workspace, out)
        return from_octets(out).cpu()

    def expected(self, row: int) -> Tensor:
        query = self.query[row].view(1, self.shape.heads, self.shape.size)
        return reference(query, self.keys[row], self.values[row], self.shape.lengths[row] - 1).flatten()


@SHAPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_is_the_reference(dtype: torch.dtype, shape: Shape) -> None:
    sequences = Sequences(dtype, shape)
    found = sequences.run()
    for row in range(3):
        assert relative_error(found[row], sequences.expected(row)) < ATTEND_BOUND
    sequences.values[2][shape.room // 2] += 3.0
    assert relative_error(found[2], sequences.expected(2)) > 10 * ATTEND_BOUND, "one token of many must show"


@SHAPES
def test_bits_depend_neither_on_the_batch_nor_on_the_room(shape: Shape) -> None:
    sequences = Sequences(torch.bfloat16, shape)
    together = sequences.run(rooms=3)
    for row in range(3):
        assert torch.equal(sequences.run(slice(row, row + 1))[0], together[row])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((6, 2, 8, 16), "heads of 8 numbers: attention takes powers of two, 16 or more"),
        ((6, 2, 48, 16), "heads of 48 numbers"),
        ((6, 2, 16, 8), "pages of 8 tokens: attention takes powers of two, 16 or more"),
        ((32, 2, 128, 128), "pages of 128 tokens with heads of 128 numbers: attention takes up to 64 tokens a page"),
        ((7, 2, 16, 16), "7 heads on 2 KV heads: attention takes a whole number of heads"),
        ((64, 2, 128, 64), "64 heads on 2 KV heads: attention takes a whole number of heads, 1 to 16"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(shape: tuple[int, int, int, int], message: str) -> None:
    """Before anything is launched, in the interpreter too."""
    with pytest.raises(ShapeError, match=message):
        check(*shape)
    heads, kv_heads, size, page = shape
    pages = Pages(*(torch.zeros(1, page, kv_heads, size, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)))
    query, table = torch.zeros(1, heads * size, device=DEVICE), torch.zeros(1, 1, dtype=torch.int32, device=DEVICE)
    out = poisoned(1, heads * size)
    with pytest.raises(ShapeError):
        attend(query, pages, table, table[0] + 1, Workspace(1, heads, size, page, page, DEVICE), out)
    assert out.isnan().all()


def test_shapes_of_models_are_not_refused() -> None:
    for shape in (OF_DEMO, SMALLEST, Shape(32, 2, 128, 64)):
        check(*shape)


@triton.jit
def _convert(x, bf16, e4m3, N: tl.constexpr):
    at = tl.arange(0, N)
    values = tl.load(x + at)
    tl.store(bf16 + at, to_bf16(values).to(tl.int16))
    tl.store(e4m3 + at, to_e4m3(values).to(tl.uint8))


def test_rounding_into_pages_is_torch_s() -> None:
    codes = torch.arange(128, dtype=torch.uint8)[:127].view(FP8).float()
    halfway = (codes[1:] + codes[:-1]) / 2  # ties
    values = torch.cat([codes, halfway, halfway * 1.0001, -halfway * 0.9999, randn(2000) * 30, randn(2000) / 100])
    values = torch.cat([values, torch.zeros(8192 - len(values))]).clamp(-448, 448)
    bf16 = torch.zeros(8192, dtype=torch.int16, device=DEVICE)
    e4m3 = torch.zeros(8192, dtype=torch.uint8, device=DEVICE)
    _convert[(1,)](here(values), bf16, e4m3, N=8192)
    assert torch.equal(bf16.cpu(), values.bfloat16().view(torch.int16))
    assert torch.equal(e4m3.cpu(), values.to(FP8).view(torch.uint8))
    _convert[(1,)](here(values * 0 + 1e6), bf16, e4m3, N=8192)
    assert (e4m3 == 0x7E).all(), "beyond 448 saturates"


@SHAPES
@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_query_key_and_value_of_the_new_token(dtype: torch.dtype, shape: Shape) -> None:
    hidden = 32
    heads, kv_heads, size, page_tokens = shape
    shapes = [heads * size, kv_heads * size, kv_heads * size]
    weights = [randn(rows, hidden, seed=rows + i, scale=0.2).bfloat16() for i, rows in enumerate(shapes)]
    x, norm_weight = randn(3, hidden), randn(hidden, seed=1) + 1.0
    sequences = Sequences(dtype, shape)
    pages, query = sequences.pages, poisoned(3, shapes[0])
    before = [half.view(torch.uint8).clone() for half in (pages.keys, pages.values)]
    q_proj, k_proj, v_proj = (Linear.pack("BF16", here(weight)) for weight in weights)
    qkv(
        here(to_octets(x)), Norm(here(to_octets(norm_weight)), 1e-5), (q_proj, k_proj, v_proj), pages,
        here(sequences.tables), here(torch.tensor(shape.lengths, dtype=torch.int32)), query, Tiling(64, 1, False),
    )  # fmt: skip
    normed = rms_norm(x, norm_weight, 1e-5)
    assert relative_error(query, linear(normed, weights[0].float())) < BOUND
    for half, old, weight, scale in (
        (pages.keys, before[0], weights[1], pages.key_scale),
        (pages.values, before[1], weights[2], pages.value_scale),
    ):
        exact = linear(normed, weight.float())
        for row, length in enumerate(shape.lengths):
            page, place = int(sequences.tables[row, (length - 1) // page_tokens]), (length - 1) % page_tokens
            stored = half[page, place].float().cpu().flatten() * scale
            assert relative_error(stored, exact[row]) < (0.06 if dtype == FP8 else 0.004), (
                "half a unit in the last place"
            )
            half[page, place] = old[page, place].view(dtype)
        assert torch.equal(half.view(torch.uint8), old), "nothing else is written"
