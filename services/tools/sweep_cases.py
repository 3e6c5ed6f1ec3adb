"""What `thimble bench sweep-kernels` measures: linears and norms of a sweep at the real shapes, and what is right.

Owns random weights and inputs, launches and definitions; bench_sweep_kernels.py owns the clock.
"""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from kernels.linear.sweep import Finish, Tiles, linear
from kernels.norm import sweep as norm
from services.tools.dense_cases import (
    EPS,
    EXPERTS,
    HIDDEN,
    LATENT,
    SHARED,
    SIZES,
    VOCABULARY,
    Dense,
    check_rows,
    relative_error,
)
from services.tools.sweep_attention import AttentionCase

Tensor = torch.Tensor

TOKENS = (64, 512, 2048)
BOUND = 1e-5  # most relative root mean square error of a float32 result
ROUNDED_BOUND = 3e-3  # of one that is rounded to BF16
PRECISE_BOUND = 2e-5  # of products with 16 bits of the input
CUTS = (1, 3, 65)  # rows of the pieces, by turns

UNPACKED = [Tiles(bm, bn, bk, w, s) for bm, bn, bk, w, s in (
    (128, 128, 64, 8, 2), (128, 128, 64, 8, 4), (128, 128, 64, 4, 2), (128, 128, 64, 4, 3), (128, 128, 128, 8, 2),
    (256, 128, 64, 8, 2), (256, 128, 64, 8, 3), (256, 128, 32, 8, 4), (256, 64, 64, 4, 2), (128, 64, 64, 4, 3),
    (64, 128, 64, 4, 3), (64, 128, 64, 8, 4), (128, 256, 64, 8, 2),
)]  # fmt: skip
PLAIN = [*UNPACKED, Tiles(128, 128, 32, 4, 4), Tiles(128, 128, 64, 8, 3)]
HALVED = [Tiles(bm, bn, bk, w, s) for bm, bn, bk, w, s in (
    (64, 64, 32, 4, 2), (64, 64, 64, 4, 2), (128, 64, 32, 4, 3), (64, 128, 32, 8, 3), (128, 128, 32, 8, 3),
    (32, 64, 64, 4, 3), (32, 128, 64, 4, 2),
)]  # fmt: skip


class Case(Protocol):
    """A kernel, its inputs for the number of rows that was prepared last, and what is right."""

    name: str
    tokens: tuple[int, ...]
    tiles: list[Tiles]
    bound: float

    def prepare(self, tokens: int) -> None: ...
    def launch(self, configuration: Tiles | None = None) -> None: ...
    def rival(self) -> Callable[[], object] | None: ...
    def flop(self) -> float: ...
    def moved_bytes(self) -> float: ...
    def error(self) -> float: ...
    def same_when_cut(self) -> bool: ...


class LinearCase:
    """One linear of the sweep; its rival is cuBLAS with BF16 weights."""

    def __init__(
        self, dense: Dense, name: str, form: str, rows: int, columns: int, finish: Finish, kind: torch.dtype,
        precise: bool = False, tokens: tuple[int, ...] = TOKENS,
    ) -> None:  # fmt: skip
        self.name, self.tokens, self._dense, self._finish, self._kind = name, tokens, dense, finish, kind
        self._precise = precise
        self.tiles = HALVED if precise else PLAIN if form == "BF16" else UNPACKED
        self.bound = ROUNDED_BOUND if kind == torch.bfloat16 else PRECISE_BOUND if precise else BOUND
        self._weights, self._meaning = dense.linear(form, rows, columns)

    def prepare(self, tokens: int) -> None:
        rows, columns = self._weights.rows, self._weights.columns
        x = self._dense.randn(tokens, columns)
        self._x = x if self._precise else x.bfloat16()
        self._before = self._dense.randn(tokens, rows) if self._finish == "add" else None
        self._out = torch.empty(tokens, rows, dtype=self._kind, device=self._dense.device)

    def launch(self, configuration: Tiles | None = None) -> None:
        linear(self._x, self._weights, self._out, self._finish, self._precise, configuration)

    def rival(self) -> Callable[[], object] | None:
        rows, columns = self._weights.rows, self._weights.columns
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=self._dense.device)
        for part in torch.split(weight, 8192):
            part.copy_(self._dense.randn(*part.shape, scale=0.02))
        return partial(torch.mm, self._x.bfloat16(), weight.T)

    def flop(self) -> float:
        return 2.0 * len(self._x) * self._weights.rows * self._weights.columns

    def moved_bytes(self) -> float:
        reads = 2 if self._finish == "add" else 1
        return self._weights.size_bytes + self._x.nbytes + reads * self._out.nbytes

    def _result(self, cuts: tuple[int, ...]) -> Tensor:
        self._out.copy_(torch.full_like(self._out, torch.nan) if self._before is None else self._before)
        first, turn = 0, 0
        while first < len(self._x):
            end = first + cuts[turn % len(cuts)]
            linear(self._x[first:end], self._weights, self._out[first:end], self._finish, self._precise)
            first, turn = end, turn + 1
        return self._out.clone()

    def error(self) -> float:
        at = check_rows(self._weights.rows).to(self._dense.device)
        exact = self._x.double() @ self._meaning(at).to(self._dense.device).double().T
        if self._finish == "relu2":
            exact = exact.clamp(min=0.0) ** 2
        if self._before is not None:
            exact += self._before[:, at]
        return relative_error(self._result((len(self._x),))[:, at], exact)

    def same_when_cut(self) -> bool:
        return torch.equal(self._result((len(self._x),)), self._result(CUTS))


class NormCase:
    """The norm before a layer, or behind a Mamba layer's recurrence (gated)."""

    bound = ROUNDED_BOUND
    tokens: tuple[int, ...] = TOKENS

    def __init__(self, dense: Dense, name: str, gated: bool) -> None:
        self.name, self._dense, self._gated = name, dense, gated
        self.tiles: list[Tiles] = []
        self._columns = SIZES.inner if gated else HIDDEN
        self._weight = dense.randn(self._columns, scale=0.2) + 1.0

    def prepare(self, tokens: int) -> None:
        self._x = self._dense.randn(tokens, self._columns, scale=3.0)
        self._z = self._dense.randn(tokens, SIZES.rows)[:, : self._columns] if self._gated else self._x
        self._out = torch.empty(tokens, self._columns, dtype=torch.bfloat16, device=self._dense.device)

    def launch(self, configuration: Tiles | None = None) -> None:
        self._run(slice(None))

    def _run(self, rows: slice) -> None:
        if self._gated:
            group = self._columns // SIZES.groups
            norm.gated_group_rms_norm(self._x[rows], self._z[rows], self._weight, group, EPS, self._out[rows])
        else:
            norm.rms_norm(self._x[rows], self._weight, EPS, self._out[rows])

    def rival(self) -> Callable[[], object] | None:
        return None

    def flop(self) -> float:
        return 0.0

    def moved_bytes(self) -> float:
        return self._x.nbytes * (2 if self._gated else 1) + self._out.nbytes

    def error(self) -> float:
        self._out.fill_(torch.nan)
        self.launch()
        x, group = self._x.double(), self._columns
        if self._gated:
            x, group = x * torch.nn.functional.silu(self._z.double()), self._columns // SIZES.groups
        groups = x.view(len(x), -1, group)
        exact = groups / (groups.square().mean(-1, keepdim=True) + EPS).sqrt()
        return relative_error(self._out, exact.flatten(1) * self._weight.double())

    def same_when_cut(self) -> bool:
        self.launch()
        whole = self._out.clone()
        self._out.fill_(torch.nan)
        for first in range(0, len(self._x), CUTS[-1]):
            self._run(slice(first, first + CUTS[-1]))
        return torch.equal(whole, self._out)


def sweep_cases(dense: Dense) -> dict[str, Callable[[], Case]]:
    """Builders, so that one case's weights can be freed before the next one's are made."""
    f32, bf16 = torch.float32, torch.bfloat16
    linears: list[tuple[str, str, int, int, Finish, torch.dtype]] = [
        ("in_proj FP8", "FP8", SIZES.rows, HIDDEN, "store", f32),
        ("out_proj FP8", "FP8", HIDDEN, SIZES.inner, "add", f32),
        ("shared up NVFP4", "NVFP4", SHARED, HIDDEN, "relu2", bf16),
        ("shared down NVFP4", "NVFP4", HIDDEN, SHARED, "add", f32),
        ("q BF16", "BF16", HIDDEN, HIDDEN, "store", f32),
        ("k BF16", "BF16", 256, HIDDEN, "store", f32),
        ("o BF16", "BF16", HIDDEN, HIDDEN, "add", f32),
        ("fc1 BF16", "BF16", LATENT, HIDDEN, "store", bf16),
        ("fc2 BF16", "BF16", HIDDEN, LATENT, "add", f32),
    ]
    cases: dict[str, Callable[[], Case]] = {each[0]: partial(LinearCase, dense, *each) for each in linears}
    cases["gate precise BF16"] = partial(
        LinearCase, dense, "gate precise BF16", "BF16", EXPERTS, HIDDEN, "store", f32, precise=True
    )
    cases["lm_head NVFP4"] = partial(
        LinearCase, dense, "lm_head NVFP4", "NVFP4", VOCABULARY, HIDDEN, "store", f32, tokens=(1, 64)
    )
    for name, gated in (("rms norm", False), ("gated norm", True)):
        cases[name] = partial(NormCase, dense, name, gated)
    for form in ("BF16", "FP8"):
        for context in (2048, 32768):
            name = f"attend {form} {context}"
            cases[name] = partial(AttentionCase, dense, name, context, form == "FP8")
    return cases
