"""The sweep's linears against float64, and the same bits however rows are cut. In the interpreter, or on a GPU."""

import numpy as np
import pytest
import torch
from gpu_checks import DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

import kernels.fp8.reference as fp8
import kernels.nvfp4.reference as nvfp4
from kernels.linear.gpu import Linear
from kernels.linear.sweep import FINGERPRINT, Finish, Tiles, linear, tiles

FORMATS = ["NVFP4", "FP8", "BF16", "F16", "F32"]
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
BOUND = 1e-5  # float32 sums; tensor cores cut off where others round
SPLIT_BOUND = 2e-5  # 16 bits of an operand
SMALL = Tiles(16, 32, 64, 4, 2)


def packed(form: str, weights: Tensor) -> tuple[Linear, Tensor]:
    """A linear on the device, behind and before rows of ones or NaN, and what it means in float32."""
    if form == "NVFP4":
        codes, scales, scale_2 = nvfp4.quantise(weights, "max")
        meaning = nvfp4.dequantise(codes, scales, scale_2)
        return Linear.pack(form, between(codes), between(scales.view(torch.uint8)), scale_2), meaning
    if form == "FP8":
        codes, scale = fp8.quantise(weights, "max")
        return Linear.pack(form, between(codes.view(torch.uint8)), scale), fp8.dequantise(codes, scale)
    plain = weights.to(FLOATS[form])
    return Linear.pack(form, between(plain)), plain.float()


def between(rows: Tensor) -> Tensor:
    """The rows on the device, contiguous, between others that are NaN where the type has it."""
    around = torch.full((len(rows) + 2, rows.shape[1]), 0xFF if rows.dtype == torch.uint8 else torch.nan)
    frame = around.to(DEVICE, rows.dtype)
    frame[1:-1] = rows.to(DEVICE)
    return frame[1:-1]


def run(
    weights: Linear,
    x: Tensor,
    configuration: Tiles | None = SMALL,
    finish: Finish = "store",
    precise: bool = False,
    kind: torch.dtype = torch.bfloat16,
) -> Tensor:
    out = poisoned(len(x), weights.rows)
    x = between(x if precise else x.to(kind))
    linear(x, weights, out, finish, precise, configuration)
    return out.cpu()


def exact(x: Tensor, meaning: Tensor, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(kind).double() @ meaning.double().T


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("columns", [128, 224])  # whole steps; a last one that is not full
def test_is_the_definition_for_odd_sizes(form: str, columns: int) -> None:
    weights, meaning = packed(form, randn(37, columns, seed=1, scale=0.1))
    x = randn(19, columns)
    bound = SPLIT_BOUND if form == "F32" else BOUND
    assert relative_error(run(weights, x), exact(x, meaning)) < bound
    assert relative_error(run(weights, x), x.double() @ meaning.double().T) > 1e-3, "x is rounded to BF16"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("columns", [128, 224])
def test_halves_of_more_bits_lose_less(form: str, columns: int) -> None:
    weights, meaning = packed(form, randn(37, columns, seed=1, scale=0.1))
    x = randn(19, columns)
    found = run(weights, x, kind=torch.float16)
    assert relative_error(found, exact(x, meaning, torch.float16)) < (5e-4 if form == "F32" else BOUND)
    assert 1e-5 < relative_error(found, x.double() @ meaning.double().T) < 5e-4
    alone = [run(weights, row[None], None, kind=torch.float16) for row in x]
    assert torch.equal(torch.cat(alone), run(weights, x, None, kind=torch.float16))


def test_what_float16_cannot_hold_is_its_largest_number_or_kept_by_a_gain() -> None:
    weights, meaning = packed("FP8", torch.full((16, 32), 8.0))
    x = torch.full((3, 32), 1024.0)
    x[1, 0] = torch.inf
    x[2, 0] = torch.nan
    for gain, expected in ((1.0, 65504.0), (2.0**-3, float(x[0] @ meaning[0]) / 8)):
        out = torch.zeros(3, 16, dtype=torch.float16, device=DEVICE)
        linear(here(x.half()), weights, out, configuration=SMALL, gain=gain)
        assert (out[0] == expected).all()
        assert (out[1] == torch.inf).all()
        assert out[2].isnan().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("precise", [False, True])
def test_bits_do_not_depend_on_how_rows_are_cut(form: str, precise: bool) -> None:
    """With the fixed tiles: a row in another tile, at another place of one, beside others or alone."""
    weights, _ = packed(form, randn(24, 192, seed=1, scale=0.1))
    x = randn(131, 192)
    together = run(weights, x, None, precise=precise)
    for first, end in ((0, 1), (1, 70), (70, 131), (130, 131)):
        assert torch.equal(run(weights, x[first:end], None, precise=precise), together[first:end])
    others = x.clone()
    others[:65] = randn(65, 192, seed=5) * 1e4
    assert torch.equal(run(weights, others, None, precise=precise)[65:], together[65:])


def test_another_order_of_sums_has_other_bits() -> None:
    """What the test above would see."""
    weights, meaning = packed("BF16", randn(24, 192, seed=1, scale=0.1))
    x, backwards = randn(9, 192), torch.arange(191, -1, -1)
    turned = Linear.pack("BF16", between(meaning[:, backwards].bfloat16()))
    assert relative_error(run(turned, x[:, backwards]), exact(x, meaning)) < BOUND
    assert not torch.equal(run(turned, x[:, backwards]), run(weights, x))


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bk", [32, 64])
def test_every_code_means_what_the_checkpoint_says(bk: int, kind: torch.dtype) -> None:
    """Input rows with a single one select columns: the output is the weight itself, every bit of it."""
    configuration = Tiles(16, 32, bk, 4, 2)
    codes = torch.arange(256, dtype=torch.uint8)
    all_pairs, scales = codes.repeat(4).view(32, 32), torch.arange(0, 0x7F, dtype=torch.uint8).repeat(2)[:128]
    nvfp4_linear = Linear.pack("NVFP4", here(all_pairs), here(scales.view(32, 4)), torch.tensor(0.37))
    meaning = nvfp4.dequantise(all_pairs, scales.view(32, 4), 0.37)
    assert torch.equal(run(nvfp4_linear, torch.eye(64), configuration, kind=kind), meaning.T + 0.0)
    numbers = codes[(codes & 0x7F) != 0x7F].repeat(2)[:256].view(4, 64)
    fp8_linear = Linear.pack("FP8", here(numbers), torch.tensor(0.11))
    assert torch.equal(run(fp8_linear, torch.eye(64), configuration, kind=kind), fp8.dequantise(numbers, 0.11).T + 0.0)
    swapped = Linear.pack("NVFP4", here(all_pairs >> 4 | all_pairs << 4), here(scales.view(32, 4)), torch.tensor(0.37))
    assert not torch.equal(run(swapped, torch.eye(64), configuration, kind=kind), meaning.T + 0.0)


@pytest.mark.parametrize("form", ["NVFP4", "BF16", "F32"])
def test_precise_keeps_what_bfloat16_loses(form: str) -> None:
    weights, meaning = packed(form, randn(37, 192, seed=1, scale=0.1))
    x = randn(19, 192)
    correct = x.double() @ meaning.double().T
    assert relative_error(run(weights, x, None, precise=True), correct) < SPLIT_BOUND
    assert relative_error(run(weights, x, None), correct) > 1e-3


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_finishes_write_their_part_of_wider_rows(kind: torch.dtype) -> None:
    weights, _ = packed("FP8", randn(24, 96, seed=1, scale=0.3))
    x = randn(19, 96)
    stored = run(weights, x)
    for finish, result in {"store": stored, "relu2": stored.clamp(min=0.0) ** 2}.items():
        wide = poisoned(19, 40).to(kind)
        linear(here(x.bfloat16()), weights, wide[:, 8:32], finish, configuration=SMALL)  # type: ignore[arg-type]
        assert torch.equal(wide[:, 8:32].cpu(), result.to(kind))
        assert wide[:, :8].isnan().all()
        assert wide[:, 32:].isnan().all()
    before = randn(19, 24, seed=3)
    added = here(before.clone())
    linear(here(x.bfloat16()), weights, added, "add", configuration=SMALL)
    assert torch.equal(added.cpu(), before + stored)


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("form", ["NVFP4", "F32"])
def test_what_is_not_finite_stays_in_its_row(form: str, precise: bool) -> None:
    weights, _ = packed(form, randn(24, 96))
    x = randn(19, 96)
    clean = run(weights, x, precise=precise)
    x[3, 17], x[5, 95] = float("nan"), float("inf")
    with np.errstate(invalid="ignore"):
        for finish in ("store", "relu2"):
            out = run(weights, x, finish=finish, precise=precise)  # type: ignore[arg-type]
            assert out[3].isnan().all()
            assert not out[5].isfinite().any() or finish == "relu2"
        out = run(weights, x, precise=precise)
    rest = [row for row in range(19) if row not in (3, 5)]
    assert torch.equal(out[rest], clean[rest])


def test_no_rows_are_no_work() -> None:
    weights, _ = packed("BF16", randn(24, 96))
    assert run(weights, torch.empty(0, 96)).shape == (0, 24)


def test_the_fingerprint_names_what_changes_bits() -> None:
    for form in FORMATS:
        made = tiles(form, False)
        assert f":{made.bn}x{made.bm}x{made.bk}" in FINGERPRINT
