"""The Triton linears against the reference; a row's bits are the same in any batch. In the interpreter, or on a GPU."""

import pytest
import torch
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

import kernels.fp8.reference as fp8
import kernels.nvfp4.reference as nvfp4
from kernels.linear.gpu import FINGERPRINT, Linear, Norm, Tiling, linear, linears, tiling
from kernels.linear.octets import from_octets, to_octets
from kernels.linear.reference import linear as reference
from kernels.norm.reference import rms_norm

FORMATS = ["NVFP4", "FP8", "BF16", "F16", "F32"]
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ONE_WARP = Tiling(32, 1, False)  # few programs: the interpreter is slow
EPS = 1e-5


def packed(form: str, weights: Tensor) -> tuple[Linear, Tensor]:
    """A linear on the device, and what it means in float32."""
    if form == "NVFP4":
        codes, scales, scale_2 = nvfp4.quantise(weights, "max")
        return Linear.pack(form, here(codes), here(scales), scale_2), nvfp4.dequantise(codes, scales, scale_2)
    if form == "FP8":
        codes, scale = fp8.quantise(weights, "max")
        return Linear.pack(form, here(codes), scale), fp8.dequantise(codes, scale)
    plain = weights.to(FLOATS[form])
    return Linear.pack(form, here(plain)), plain.float()


def run(weights: Linear, x: Tensor, configuration: Tiling | None = ONE_WARP) -> Tensor:
    out = poisoned(len(x), weights.rows)
    linear(here(to_octets(x)), weights, out, configuration=configuration)
    return out.cpu()


@pytest.mark.parametrize("form", FORMATS)
def test_is_the_reference_for_any_rows(form: str) -> None:
    """An odd number of outputs, a last step that is not full, weights on their way a step ahead."""
    weights, meaning = packed(form, randn(21, 1056, seed=1, scale=0.1))
    x = randn(4, 1056)
    together = run(weights, x, Tiling(16, 1, True))
    assert relative_error(together, reference(x, meaning)) < BOUND
    for row in range(4):
        assert torch.equal(run(weights, x[row : row + 1], Tiling(32, 1, False))[0], together[row])


@pytest.mark.parametrize("rows", [2, 3])
def test_bits_do_not_depend_on_the_number_of_rows(rows: int) -> None:
    """With the fixed configurations, whose tiles differ."""
    weights, _ = packed("NVFP4", randn(8, 1056, scale=0.1))
    x = randn(4, 1056)
    assert len({tiling("NVFP4", 8, 1056, tokens).tile for tokens in (1, 2)}) == 2
    together = run(weights, x[:rows], None)
    assert torch.equal(together, run(weights, x, None)[:rows])
    assert torch.equal(together[1:2], run(weights, x[1:2], None))


def test_another_order_of_sums_has_other_bits() -> None:
    """What the two tests above would see."""
    weights, _ = packed("BF16", randn(9, 512, scale=0.1))
    x = randn(1, 512)
    assert not torch.equal(run(weights, x, Tiling(16, 1, False)), run(weights, x, Tiling(16, 2, False)))


def test_every_code_means_what_the_checkpoint_says() -> None:
    """Input rows with a single one select columns: the output is the weight itself, every bit of it."""
    codes = torch.arange(256, dtype=torch.uint8)
    x = torch.eye(32)
    all_pairs, scales = codes.view(16, 16), torch.arange(0, 0x7F, 4, dtype=torch.uint8).view(16, 2)
    nvfp4_linear = Linear.pack("NVFP4", here(all_pairs), here(scales), torch.tensor(0.37))
    meaning = nvfp4.dequantise(all_pairs, scales, 0.37)
    numbers = codes[(codes & 0x7F) != 0x7F].repeat(2)[:256].view(8, 32)
    fp8_linear = Linear.pack("FP8", here(numbers), torch.tensor(0.11))
    for first in range(0, 32, 4):
        some = x[first : first + 4]
        assert torch.equal(run(nvfp4_linear, some), meaning.T[first : first + 4] + 0.0)
        assert torch.equal(run(fp8_linear, some), fp8.dequantise(numbers, 0.11).T[first : first + 4] + 0.0)
    swapped = Linear.pack("NVFP4", here(all_pairs >> 4 | all_pairs << 4), here(scales), torch.tensor(0.37))
    assert not torch.equal(run(swapped, x[:4]), meaning.T[:4] + 0.0)


def test_norm_before_and_finishes_after() -> None:
    weights, meaning = packed("FP8", randn(24, 96, seed=1, scale=0.3))
    x, norm_weight = randn(3, 96) * 40, randn(96, seed=2) + 1.0
    norm = Norm(here(to_octets(norm_weight)), EPS)
    exact = reference(rms_norm(x, norm_weight, EPS), meaning)
    stored, octets, squared = poisoned(3, 24), poisoned(3, 24), poisoned(3, 24)
    linear(here(to_octets(x)), weights, stored, "store", norm, ONE_WARP)
    linear(here(to_octets(x)), weights, octets, "octets", norm, ONE_WARP)
    linear(here(to_octets(x)), weights, squared, "relu2", norm, ONE_WARP)
    added = here(to_octets(randn(3, 24, seed=3)))
    expected = from_octets(added) + stored
    linear(here(to_octets(x)), weights, added, "add", norm, ONE_WARP)
    assert relative_error(stored, exact) < BOUND
    assert torch.equal(from_octets(octets), stored)
    assert torch.equal(from_octets(squared), stored.clamp(min=0.0) ** 2)
    assert torch.equal(from_octets(added), expected)
    assert relative_error(stored, reference(x, meaning)) > 0.1, "the norm must show"


@pytest.mark.parametrize("stopped", [0, 1])
def test_nothing_is_added_once_the_token_has_stopped(stopped: int) -> None:
    weights, _ = packed("BF16", randn(24, 64, seed=1))
    before = here(randn(3, 24, seed=3))
    added = before.clone()
    stop = torch.full((1,), stopped, dtype=torch.int32, device=DEVICE)
    linear(here(randn(3, 64, seed=2)), weights, added, "add", configuration=ONE_WARP, stop=stop)
    assert torch.equal(added, before) == bool(stopped)


def test_three_linears_in_one_launch_are_the_three_alone() -> None:
    x = here(to_octets(randn(2, 64)))
    made = [
        packed(form, randn(rows, 64, seed=rows, scale=0.1))[0]
        for form, rows in (("BF16", 9), ("FP8", 40), ("NVFP4", 5))
    ]
    outs = [poisoned(2, part.rows) for part in made]
    linears(x, [(part, out, "store") for part, out in zip(made, outs, strict=True)], configuration=ONE_WARP)
    for part, out in zip(made, outs, strict=True):
        alone = poisoned(2, part.rows)
        linear(x, part, alone, configuration=ONE_WARP)
        assert torch.equal(out, alone)


def test_a_nan_stays_in_its_row() -> None:
    weights, _ = packed("BF16", randn(8, 64))
    x = randn(2, 64)
    clean = run(weights, x)
    x[0, 17] = float("nan")
    out = run(weights, x)
    assert out[0].isnan().all()
    assert torch.equal(out[1], clean[1])


def test_columns_that_no_16_bytes_hold_are_refused() -> None:
    with pytest.raises(ValueError, match="16 columns in NVFP4"):
        Linear.pack(
            "NVFP4", torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 1, dtype=torch.uint8), torch.tensor(1.0)
        )


def test_octet_order_is_a_permutation() -> None:
    x = torch.arange(48.0).view(2, 24)
    assert to_octets(x)[0, :4].tolist() == [0, 8, 16, 1]
    assert torch.equal(from_octets(to_octets(x)), x)


def test_the_fingerprint_names_what_changes_bits() -> None:
    for form in FORMATS:
        assert f"{form}:{tiling(form, 4096, 4096, 1).warps}" in FINGERPRINT
