"""Paged attention in Triton against the reference, BF16 and FP8 pages, everything that may not be read poisoned."""

import pytest
import torch
import triton
import triton.language as tl
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

from kernels.attention.gpu import SPLIT_PAGES, Workspace, attend
from kernels.attention.pages import Pages, qkv, to_bf16, to_e4m3
from kernels.attention.reference import attend as reference
from kernels.linear.gpu import Linear, Norm, Tiling
from kernels.linear.octets import from_octets, to_octets
from kernels.linear.reference import linear
from kernels.norm.reference import rms_norm

HEADS, KV_HEADS, SIZE, PAGE, COUNT = 6, 2, 16, 8, 12
FP8 = torch.float8_e4m3fn
LENGTHS = [1, SPLIT_PAGES * PAGE, 75]  # the first token; a run that is just full; three runs, the last one begun
# On a GPU a product of two matrices takes three TF32 parts of its float32 operand.
ATTEND_BOUND = 1e-5


class Sequences:
    """Three sequences' tokens in pages in random order; pages beyond them, and places beyond their ends, are NaN."""

    def __init__(self, dtype: torch.dtype) -> None:
        scales = (0.02, 0.03) if dtype == FP8 else (1.0, 1.0)
        shape = (40, PAGE, KV_HEADS, SIZE)
        keys, values = (torch.full(shape, float("nan")).to(dtype) for _ in range(2))
        self.tables = torch.randperm(40, generator=torch.Generator().manual_seed(1))[: 3 * COUNT].view(3, COUNT).int()
        self.keys = [randn(n, KV_HEADS, SIZE, seed=n) for n in LENGTHS]
        self.values = [randn(n, KV_HEADS, SIZE, seed=n + 1) for n in LENGTHS]
        for tensors, pages, scale in ((self.keys, keys, scales[0]), (self.values, values, scales[1])):
            for sequence, tokens in enumerate(tensors):
                stored = (tokens / scale).to(dtype)
                for token, value in enumerate(stored):
                    pages[self.tables[sequence, token // PAGE], token % PAGE] = value
                tensors[sequence] = stored.float() * scale
        self.pages = Pages(here(keys), here(values), *scales)
        self.query = randn(3, HEADS * SIZE, seed=9, scale=2)

    def run(self, rows: slice = slice(0, 3), room: int = 96) -> Tensor:
        query, tables = here(self.query[rows]), here(self.tables)[rows]
        lengths = here(torch.tensor(LENGTHS[rows], dtype=torch.int32))
        workspace = Workspace(len(query), HEADS, SIZE, room, PAGE, DEVICE)
        for buffer in (workspace.mixed, workspace.best, workspace.total):
            buffer.fill_(torch.nan)
        out = poisoned(*query.shape)
        attend(query, self.pages, tables, lengths, workspace, out)
        return from_octets(out).cpu()

    def expected(self, row: int) -> Tensor:
        query = self.query[row].view(1, HEADS, SIZE)
        return reference(query, self.keys[row], self.values[row], LENGTHS[row] - 1).flatten()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_is_the_reference(dtype: torch.dtype) -> None:
    sequences = Sequences(dtype)
    found = sequences.run()
    for row in range(3):
        assert relative_error(found[row], sequences.expected(row)) < ATTEND_BOUND
    sequences.values[2][70] += 1.0
    assert relative_error(found[2], sequences.expected(2)) > 10 * ATTEND_BOUND, "one token of many must show"


def test_bits_depend_neither_on_the_batch_nor_on_the_room() -> None:
    sequences = Sequences(torch.bfloat16)
    together = sequences.run(room=256)
    for row in range(3):
        assert torch.equal(sequences.run(slice(row, row + 1), room=96)[0], together[row])


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_query_key_and_value_of_the_new_token(dtype: torch.dtype) -> None:
    hidden = 32
    shapes = [HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE]
    weights = [randn(rows, hidden, seed=rows + i, scale=0.2).bfloat16() for i, rows in enumerate(shapes)]
    x, norm_weight = randn(3, hidden), randn(hidden, seed=1) + 1.0
    sequences = Sequences(dtype)
    pages, query = sequences.pages, poisoned(3, shapes[0])
    before = [half.view(torch.uint8).clone() for half in (pages.keys, pages.values)]
    q_proj, k_proj, v_proj = (Linear.pack("BF16", here(weight)) for weight in weights)
    qkv(
        here(to_octets(x)), Norm(here(to_octets(norm_weight)), 1e-5), (q_proj, k_proj, v_proj), pages,
        here(sequences.tables), here(torch.tensor(LENGTHS, dtype=torch.int32)), query, Tiling(64, 1, False),
    )  # fmt: skip
    normed = rms_norm(x, norm_weight, 1e-5)
    assert relative_error(query, linear(normed, weights[0].float())) < BOUND
    for half, old, weight, scale in (
        (pages.keys, before[0], weights[1], pages.key_scale),
        (pages.values, before[1], weights[2], pages.value_scale),
    ):
        exact = linear(normed, weight.float())
        for row, length in enumerate(LENGTHS):
            page, place = int(sequences.tables[row, (length - 1) // PAGE]), (length - 1) % PAGE
            stored = half[page, place].float().cpu().flatten() * scale
            assert relative_error(stored, exact[row]) < (0.06 if dtype == FP8 else 0.004), (
                "half a unit in the last place"
            )
            half[page, place] = old[page, place].view(dtype)
        assert torch.equal(half.view(torch.uint8), old), "nothing else is written"
