"""NVFP4: nibble order, rounding, scales."""

import pytest
import torch

import kernels.nvfp4.reference as nvfp4

ALL_SCALES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def test_low_nibble_is_the_even_element() -> None:
    # 0x21: low nibble 1 = 0.5, high nibble 2 = 1.0; a vector published with vLLM and Megatron-Bridge.
    weight = torch.tensor([[0x21] + [0] * 7], dtype=torch.uint8)
    values = nvfp4.dequantise(weight, torch.ones(1, 1).to(torch.float8_e4m3fn), 1.0)
    assert values[0, :4].tolist() == [0.5, 1.0, 0.0, 0.0]
    swapped = nvfp4.dequantise(weight << 4 | weight >> 4, torch.ones(1, 1).to(torch.float8_e4m3fn), 1.0)
    assert swapped[0, :2].tolist() == [1.0, 0.5]


def test_every_code_and_scale_dequantises_to_the_product() -> None:
    codes = torch.arange(16, dtype=torch.uint8).reshape(1, 16)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    signed = torch.tensor(values + [-v for v in values])
    for code in range(127):
        scale = torch.tensor([[code]], dtype=torch.uint8)
        found = nvfp4.dequantise(nvfp4.pack_codes(codes), scale, 0.25)
        assert torch.equal(found[0].double(), signed.double() * ALL_SCALES[code].double() * 0.25)


def test_a_scale_belongs_to_its_sixteen_inputs() -> None:
    weight = torch.full((2, 32), 0x22, dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0, 4.0, 8.0], [0.5, 1.0, 0.0, 448.0]]).to(torch.float8_e4m3fn)
    found = nvfp4.dequantise(weight, scale, 1.0)
    assert torch.equal(found, scale.float().repeat_interleave(16, dim=1))


def test_packing_is_undone_by_unpacking() -> None:
    packed = torch.randint(0, 256, (5, 24), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    assert torch.equal(nvfp4.pack_codes(nvfp4.unpack_codes(packed)), packed)


@pytest.mark.parametrize(
    ("midpoint", "even"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)],
)
def test_a_tie_goes_to_the_even_code(midpoint: float, even: float) -> None:
    here = torch.tensor(midpoint)
    below, above = torch.nextafter(here, torch.tensor(0.0)), torch.nextafter(here, torch.tensor(9.0))
    rounded = nvfp4.nearest(torch.stack([below, here, above, -here]))
    lower, upper = max(v for v in nvfp4.MAGNITUDES if v < midpoint), min(v for v in nvfp4.MAGNITUDES if v > midpoint)
    assert rounded.tolist() == [lower, even, upper, -even]
    assert int(nvfp4.encode(rounded[1:2])) % 2 == 0


def test_rounding_is_to_the_nearest_value_everywhere() -> None:
    values = torch.linspace(-8, 8, 4001)
    distance = (values[:, None] - nvfp4.E2M1[None]).abs().amin(dim=1)
    assert torch.equal((nvfp4.nearest(values) - values).abs(), distance)


def test_encoding_is_undone_by_the_table() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(nvfp4.encode(nvfp4.E2M1[codes.int()]), codes)


def test_what_is_representable_survives() -> None:
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (8, 64), generator=random, dtype=torch.uint8)
    codes[:, ::16] = 7  # each block's largest is 6, so that the scale that fits is the one used
    scale = torch.tensor([0.25, 1.0, 448.0, 3.5]).expand(8, 4).contiguous().to(torch.float8_e4m3fn)
    weights = nvfp4.dequantise(nvfp4.pack_codes(codes), scale, 0.125)
    for choose in ("max", "mse"):
        again = nvfp4.dequantise(*nvfp4.quantise(weights, choose))
        assert torch.equal(again, weights), choose


@pytest.mark.parametrize("shape", [(3, 16), (7, 48), (33, 160)], ids=str)
def test_least_squares_is_no_worse_in_any_block_and_better_in_all(shape: tuple[int, int]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 0.05

    def block_errors(choose: nvfp4.Choice) -> torch.Tensor:
        wrong = nvfp4.dequantise(*nvfp4.quantise(weights, choose)) - weights
        return wrong.reshape(-1, 16).square().sum(dim=1)

    plain, least = block_errors("max"), block_errors("mse")
    assert (least <= plain * (1 + 1e-5)).all()
    assert least.sum() < plain.sum()


def test_least_squares_finds_what_a_search_of_every_scale_finds() -> None:
    weights = torch.randn(6, 32, generator=torch.Generator().manual_seed(4))
    _, scales, scale_2 = nvfp4.quantise(weights, "mse")
    blocks = weights.reshape(-1, 16)
    every = ALL_SCALES[1:127] * scale_2
    errors = (nvfp4.nearest(blocks[:, None] / every[:, None]) * every[:, None] - blocks[:, None]).square().sum(dim=-1)
    chosen = errors.gather(1, scales.view(torch.uint8).long().reshape(-1, 1) - 1).squeeze(1)
    assert torch.allclose(chosen, errors.amin(dim=1), rtol=1e-5)
    assert not torch.allclose(chosen, errors[:, 60], rtol=1e-5)  # any other scale would not do


def test_scales_stay_within_e4m3_and_zero_blocks_get_one() -> None:
    weights = torch.zeros(3, 48)
    weights[0, 0] = 1e4
    weights[1, 16:32] = 1e-9  # far below the smallest scale
    for choose in ("max", "mse"):
        _, scales, scale_2 = nvfp4.quantise(weights, choose)
        values = scales.float()
        assert scale_2 == torch.tensor(1e4) / (6 * 448)
        assert values.amin() == 2.0**-9
        assert values.amax() == 448
        assert (values[2] == 1).all()


def test_an_all_zero_tensor_stays_zero() -> None:
    weight, scale, scale_2 = nvfp4.quantise(torch.zeros(2, 16))
    assert scale_2 == 1
    assert not nvfp4.dequantise(weight, scale, scale_2).any()


def test_rows_are_cut_into_pieces_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.randn(9, 32, generator=torch.Generator().manual_seed(5))
    whole = nvfp4.quantise(weights)
    monkeypatch.setattr(nvfp4, "_ROWS_AT_ONCE_WEIGHTS", 64)
    for a, b in zip(whole, nvfp4.quantise(weights), strict=True):
        assert torch.equal(a.float(), b.float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        nvfp4.quantise(torch.tensor([[bad] * 16]))


@pytest.mark.parametrize("shape", [(2, 17), (16,), (2, 3, 16)], ids=str)
def test_shapes_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        nvfp4.quantise(torch.zeros(shape))
