"""From a decoded picture to the tower's patches, exactly as the family's processors do it. Owns no file format.

Bicubic with antialias in float32 on 0..255, not rounded and not clamped, then (x/255 - mean) / std. Rows and columns
are resized apart and in strips: the whole picture is never held in float32.
"""

import torch
from torch import Tensor
from torch.nn.functional import interpolate

_STRIP_VALUES = 1 << 22


def patches(
    pixels: Tensor, grid: tuple[int, int], patch: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """uint8 [height, width, 3] -> float32 [rows * columns, 3 * patch * patch].

    Patches row by row; inside one channel, then y, then x.
    """
    rows, columns = grid
    whole = resize(pixels, rows * patch, columns * patch)
    whole.div_(255).sub_(torch.tensor(mean).view(3, 1, 1)).div_(torch.tensor(std).view(3, 1, 1))
    cut = whole.view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, 3 * patch * patch)


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """uint8 [h, w, 3] -> float32 [3, height, width]. The same size is only converted."""
    old_height, old_width, _ = pixels.shape
    narrow = torch.empty(3, old_height, width)
    at_once = max(1, _STRIP_VALUES // (3 * old_width))
    for start in range(0, old_height, at_once):
        strip = pixels[start : start + at_once].permute(2, 0, 1).float()
        narrow[:, start : start + at_once] = _bicubic(strip, strip.shape[1], width)
    if height == old_height:
        return narrow
    low = torch.empty(3, height, width)
    at_once = max(1, _STRIP_VALUES // (3 * old_height))
    for start in range(0, width, at_once):
        strip = narrow[:, :, start : start + at_once].contiguous()
        low[:, :, start : start + at_once] = _bicubic(strip, height, strip.shape[2])
    return low


def _bicubic(values: Tensor, height: int, width: int) -> Tensor:
    """[3, h, w], of which one side stays as it is. A single line is resized as two: torch's resize of one column, which
    it takes for another layout of memory, is wrong."""
    if values.shape[1:] == (height, width):
        return values
    if 1 in values.shape[1:]:
        doubled = values.expand(3, *(2 if side == 1 else side for side in values.shape[1:]))
        size = (max(2, height), max(2, width))
        return _bicubic(doubled.contiguous(), *size)[:, :height, :width]
    return interpolate(values[None], size=(height, width), mode="bicubic", align_corners=False, antialias=True)[0]
