"""What `thimble bench sweep-kernels` measures, attention: the last tokens of a long prompt at the real shape.

Owns random pages and queries, the launches and what is right; bench_sweep_kernels.py owns the clock.
"""

import math
from collections.abc import Callable

import torch

from kernels.attention.pages import Pages
from kernels.attention.sweep import Segment, Segments, attend, store_kv
from kernels.linear.sweep import Tiles
from services.tools.dense_cases import Dense, relative_error

Tensor = torch.Tensor

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 32, 2, 128, 64
CHECKED_TOKENS = 16
# Query, shares and result in BF16: 2.8e-3 by the definition (kernels/attention/reference.py) at scores of deviation 1.
BOUND = 3.5e-3
CUTS = (1, 3, 65, 8)  # tokens of the pieces, by turns


class AttentionCase:
    """The last T of `context` tokens see all before them. The pages' numbers are in random order."""

    bound = BOUND
    tokens: tuple[int, ...] = (64, 512, 2048)

    def __init__(self, dense: Dense, name: str, context: int, fp8: bool) -> None:
        self.name, self._dense, self._context = name, dense, context
        self.tiles: list[Tiles] = []
        count = -(-context // PAGE_TOKENS)
        kind = torch.float8_e4m3fn if fp8 else torch.bfloat16
        shape = (count, PAGE_TOKENS, KV_HEADS, HEAD_DIM)
        halves = [torch.zeros(shape, dtype=kind, device=dense.device) for _ in range(2)]
        self._pages = Pages(halves[0], halves[1], *((0.02, 0.03) if fp8 else (1.0, 1.0)))
        order = torch.randperm(count, device=dense.device, generator=dense.generator)
        self._tables = order.int()[None, :].contiguous()
        for first in range(0, context, 4096):
            rows = min(4096, context - first)
            key, value = (dense.randn(rows, KV_HEADS * HEAD_DIM) for _ in range(2))
            store_kv(key, value, self._pages, self._tables, Segments([Segment(0, rows, first, 0)], dense.device))

    def prepare(self, tokens: int) -> None:
        tokens = min(tokens, self._context)
        self._first = self._context - tokens
        self._query = self._dense.randn(tokens, HEADS * HEAD_DIM)
        self._out = torch.empty(tokens, HEADS * HEAD_DIM, dtype=torch.bfloat16, device=self._dense.device)
        self._whole = Segments([Segment(0, tokens, self._first, 0)], self._dense.device)

    def launch(self, configuration: Tiles | None = None) -> None:
        attend(self._query, self._pages, self._tables, self._whole, self._out)

    def rival(self) -> Callable[[], object] | None:
        return None

    def flop(self) -> float:
        tokens = len(self._query)
        seen = tokens * self._first + tokens * (tokens + 1) / 2
        return 4.0 * HEADS * HEAD_DIM * seen

    def moved_bytes(self) -> float:
        return self._pages.keys.nbytes + self._pages.values.nbytes + self._query.nbytes + self._out.nbytes

    def error(self) -> float:
        """Of some tokens, from float64."""
        self._out.fill_(torch.nan)
        self.launch()
        at = torch.linspace(0, len(self._query) - 1, CHECKED_TOKENS, device=self._dense.device).long()
        order = self._tables[0].long()
        key = self._pages.keys[order].double().flatten(0, 1)[: self._context] * self._pages.key_scale
        value = self._pages.values[order].double().flatten(0, 1)[: self._context] * self._pages.value_scale
        query = self._query[at].double().view(CHECKED_TOKENS, KV_HEADS, -1, HEAD_DIM)
        hidden = torch.arange(self._context, device=at.device)[None, :] > (self._first + at)[:, None]
        scores = torch.einsum("mgad,tgd->mgat", query, key) / math.sqrt(HEAD_DIM)
        shares = scores.masked_fill(hidden[:, None, None, :], -math.inf).softmax(3)
        return relative_error(self._out[at], torch.einsum("mgat,tgd->mgad", shares, value).reshape(len(at), -1))

    def same_when_cut(self) -> bool:
        """In pieces, all of them in one launch, the last piece first."""
        self.launch()
        whole = self._out.clone()
        pieces: list[Segment] = []
        row = 0
        while row < len(self._query):
            rows = min(CUTS[len(pieces) % len(CUTS)], len(self._query) - row)
            pieces.append(Segment(row, rows, self._first + row, 0))
            row += rows
        self._out.fill_(torch.nan)
        attend(self._query, self._pages, self._tables, Segments(pieces[::-1], self._dense.device), self._out)
        return torch.equal(whole, self._out)
