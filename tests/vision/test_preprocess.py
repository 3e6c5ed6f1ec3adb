"""Pixels to patches: the family's float arithmetic, whatever the strips; the classic shortcuts are seen."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from services.engine.vision import preprocess
from services.engine.vision.config import CLIP_MEAN, CLIP_STD
from services.engine.vision.preprocess import patches, resize


def _pixels(height: int, width: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (height, width, 3), generator=random, dtype=torch.uint8)


def _whole(pixels: Tensor, height: int, width: int, **options: bool) -> Tensor:
    """What torchvision's resize of a float tensor calls."""
    values = pixels.permute(2, 0, 1)[None].float()
    return interpolate(values, size=(height, width), mode="bicubic", **{"antialias": True, **options})[0]


@pytest.mark.parametrize("size", [(100, 60), (64, 64), (33, 200), (300, 17), (1, 1)])
@pytest.mark.parametrize("strip", [300, 1 << 22])
def test_resize_is_torchs_in_any_strips(size: tuple[int, int], strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preprocess, "_STRIP_VALUES", strip)
    pixels = _pixels(*size)
    assert torch.allclose(resize(pixels, 64, 96), _whole(pixels, 64, 96), atol=2e-4, rtol=0)


def test_the_same_size_is_left_alone() -> None:
    pixels = _pixels(48, 32)
    assert torch.equal(resize(pixels, 48, 32), pixels.permute(2, 0, 1).float())


def test_overshoot_is_neither_clamped_nor_rounded() -> None:
    pixels = torch.zeros(32, 32, 3, dtype=torch.uint8)
    pixels[:, 16:] = 255
    resized = resize(pixels, 64, 64)
    assert resized.min() < -1
    assert resized.max() > 256
    assert (resized != resized.round()).any()


def test_the_kernel_is_catmull_roms() -> None:
    """Twice as large, the weights between four equal neighbours are known: a = -0.5 gives these, -0.75 others."""
    row = torch.tensor([0, 0, 0, 255, 0, 0, 0, 0], dtype=torch.uint8)
    pixels = row[None, :, None].expand(8, 8, 3).contiguous()
    got = resize(pixels, 8, 16)[0, 0] / 255

    def weight(x: float, a: float = -0.5) -> float:
        x = abs(x)
        if x < 1:
            return (a + 2) * x**3 - (a + 3) * x**2 + 1
        return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0

    wanted = [weight((i + 0.5) / 2 - 0.5 - 3) for i in range(16)]
    assert torch.allclose(got[4:12], torch.tensor(wanted[4:12]), atol=1e-5)
    assert abs(weight(1.25, -0.75) - weight(1.25)) > 0.01, "the control"


def test_shrinking_without_antialias_would_be_seen() -> None:
    pixels = _pixels(200, 200)
    assert (resize(pixels, 32, 32) - _whole(pixels, 32, 32, antialias=False)).abs().max() > 20


def test_patches_are_row_by_row_and_channel_major() -> None:
    pixels = torch.zeros(4, 6, 3, dtype=torch.uint8)
    pixels[2, 5, 1] = 255  # row 2, column 5, green: patch (1, 2), y 0, x 1
    plain = patches(pixels, (2, 3), 2, (0, 0, 0), (1, 1, 1))
    assert plain.shape == (6, 12)
    assert plain.nonzero().tolist() == [[5, 1 * 4 + 0 * 2 + 1]]


def test_values_are_normalised() -> None:
    pixels = torch.full((32, 32, 3), 255, dtype=torch.uint8)
    found = patches(pixels, (2, 2), 16, CLIP_MEAN, CLIP_STD)
    white = [(1 - mean) / std for mean, std in zip(CLIP_MEAN, CLIP_STD, strict=True)]
    assert torch.allclose(found.view(4, 3, 256), torch.tensor(white)[None, :, None].expand(4, 3, 256), atol=1e-6)
