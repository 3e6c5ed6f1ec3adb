"""What `thimble bench dense` measures, part one: a case, random weights, and the plain linears at the real shapes.

Owns random weights and inputs, the launches, and what each must compute; bench_dense.py owns the clock. Weights are
random codes with plausible scales, in several sets, so that a launch finds none of its bytes in a cache.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

import kernels.fp8.reference as fp8
import kernels.mamba.gpu as mamba
import kernels.norm.reference as norm_reference
import kernels.nvfp4.reference as nvfp4
from kernels.linear.gpu import Finish, Linear, Norm, Tiling, linears
from kernels.linear.octets import from_octets, to_octets

Tensor = torch.Tensor
Launch = Callable[[int, slice, Tiling | None], None]  # set, tokens, tiling

HIDDEN, EPS = 4096, 1e-5
SIZES = mamba.Sizes(heads=128, head_dim=64, state=128, groups=8)
EXPERTS, LATENT, SHARED, VOCABULARY = 512, 1024, 5376, 131072
SET_BYTES = 512 << 20  # of all sets of a case together: several times any card's cache
TOKENS = 4
CHECKED_ROWS = 96
BOUND = 3e-6  # most relative root mean square error


@dataclass
class Case:
    """One launch to measure.

    `reset` poisons the outputs and restores the states of set 0; `compare` says how far the outputs of the first tokens
    are from what they should be after one launch of set 0.
    """

    name: str
    size_bytes: int  # that one launch for one token must move
    sets: int
    launch: Launch
    reset: Callable[[], None]
    compare: Callable[[int], float]
    outputs: list[Tensor]  # float32, tokens first
    tilings: list[Tiling] = field(default_factory=list)  # candidates of a sweep
    more_bytes: int = 0  # that every further token moves
    bound: float = BOUND

    def error(self, tokens: int, configuration: Tiling | None) -> float:
        self.reset()
        self.launch(0, slice(0, tokens), configuration)
        return self.compare(tokens)


class Dense:
    """Random tensors on `device` from one seed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(1)

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=self.device, generator=self.generator) * scale

    def bytes(self, *shape: int, low: int = 0, high: int = 256) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=self.generator)

    def linear(self, form: str, rows: int, columns: int) -> tuple[Linear, Callable[[Tensor], Tensor]]:
        """A linear and what its given rows are, in float32 on the CPU."""
        if form == "NVFP4":
            codes, scales = self.bytes(rows, columns // 2), self.bytes(rows, columns // 16, low=0x28, high=0x40)
            scale_2 = torch.tensor(0.01)
            packed = Linear.pack(form, codes, scales, scale_2)
            return packed, lambda at: nvfp4.dequantise(codes[at].cpu(), scales[at].cpu(), scale_2)
        if form == "FP8":
            weight = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=self.device)
            for part in torch.split(weight, 4096):
                part.copy_(self.randn(*part.shape))
            scale = torch.tensor(0.02)
            packed = Linear.pack(form, weight, scale)
            return packed, lambda at: fp8.dequantise(weight.view(torch.uint8)[at].cpu(), scale)
        plain = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        for part in torch.split(plain, 8192):
            part.copy_(self.randn(*part.shape, scale=0.02))
        return Linear.pack(form, plain), lambda at: plain[at].float().cpu()


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Root mean square of the difference over that of what is exact; inf for anything not finite."""
    error = (found.double().cpu() - exact.double().cpu()).norm() / exact.double().cpu().norm()
    return float(torch.nan_to_num(error, nan=float("inf")))


def sweep(form: str, columns: int) -> list[Tiling]:
    values = {"NVFP4": 32, "FP8": 16, "BF16": 8}[form]
    found = []
    for warps in (4, 2, 1):
        several = columns > values * 32 * warps  # steps of a program
        found += [Tiling(tile, warps, several) for tile in (8, 4, 16, 2)]
        found += [Tiling(8, warps, False)] if several else []
    return found


def check_rows(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    some = torch.randperm(rows, generator=generator)[: CHECKED_ROWS - 2]
    return torch.cat([torch.tensor([0, rows - 1]), some])


def linear_case(dense: Dense, name: str, parts: list[tuple[str, int, Finish]], columns: int, norm: bool) -> Case:
    """parts: format, rows and finish of each linear of the launch."""
    made = [dense.linear(form, rows, columns) for form, rows, _ in parts]
    size_bytes = sum(linear.size_bytes for linear, _ in made)
    sets = max(2, min(24, SET_BYTES // size_bytes))
    weights = [[linear for linear, _ in made]]
    weights += [[dense.linear(form, rows, columns)[0] for form, rows, _ in parts] for _ in range(sets - 1)]
    plain_x, plain_weight = dense.randn(TOKENS, columns), dense.randn(columns, scale=0.2) + 1.0
    x, norms = to_octets(plain_x), Norm(to_octets(plain_weight), EPS) if norm else None
    outs = [torch.empty(TOKENS, rows, device=dense.device) for _, rows, _ in parts]
    before = [dense.randn(TOKENS, rows) for _, rows, _ in parts]

    def launch(which: int, rows: slice, configuration: Tiling | None) -> None:
        given = [
            (linear, out[rows], finish) for linear, out, (_, _, finish) in zip(weights[which], outs, parts, strict=True)
        ]
        linears(x[rows], given, norms, configuration)

    def reset() -> None:
        for out, old, (_, _, finish) in zip(outs, before, parts, strict=True):
            out.copy_(old if finish == "add" else torch.full_like(out, torch.nan))

    def compare(tokens: int) -> float:
        source = plain_x[:tokens].cpu()
        if norm:
            source = norm_reference.rms_norm(source, plain_weight.cpu(), EPS)
        worst = 0.0
        for (_, rows_of), (_, rows, finish), out, old in zip(made, parts, outs, before, strict=True):
            at = check_rows(rows)
            exact = source.double() @ rows_of(at.to(dense.device)).double().T
            if finish == "relu2":
                exact = exact.clamp(min=0.0) ** 2
            if finish == "add":
                exact = exact + from_octets(old)[:tokens].cpu()[:, at]
            found = out[:tokens] if finish == "store" else from_octets(out[:tokens])
            assert torch.isfinite(found).all(), "an output was not written"
            worst = max(worst, relative_error(found.cpu()[:, at], exact))
        return worst

    return Case(name, size_bytes, sets, launch, reset, compare, outs, sweep(parts[0][0], columns))


def linear_cases(dense: Dense) -> dict[str, Callable[[], Case]]:
    """Builders, so that one case's weights can be freed before the next one's are made."""
    shapes: dict[str, tuple[list[tuple[str, int, Finish]], int, bool]] = {}
    for form in ("FP8", "NVFP4", "BF16"):
        shapes[f"out_proj {form}"] = [(form, HIDDEN, "add")], SIZES.inner, False
    for form in ("NVFP4", "FP8"):
        shapes[f"shared up {form}"] = [(form, SHARED, "relu2")], HIDDEN, True
        shapes[f"shared down {form}"] = [(form, HIDDEN, "add")], SHARED, False
    gates: list[tuple[str, int, Finish]] = [("BF16", rows, "store") for rows in (EXPERTS, LATENT, EXPERTS)]
    shapes["gate fc1 gate BF16"] = gates, HIDDEN, True
    shapes["fc2 BF16"] = [("BF16", HIDDEN, "add")], LATENT, False
    for form in ("BF16", "FP8"):
        shapes[f"o_proj {form}"] = [(form, HIDDEN, "add")], HIDDEN, False
    for form in ("NVFP4", "BF16"):
        shapes[f"lm_head {form}"] = [(form, VOCABULARY, "store")], HIDDEN, True

    def build(name: str) -> Case:
        parts, columns, norm = shapes[name]
        return linear_case(dense, name, parts, columns, norm)

    return {name: partial(build, name) for name in shapes}
