"""The tower's kernels by their definitions, in torch and float64, where Triton's interpreter would take minutes.

Each has its own test against the same definition (tests/kernels/test_vision_kernels.py); here only what is done with
them in which order and memory is tested.
"""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm
from torch.nn.functional import layer_norm as torch_layer_norm

from kernels.linear.gpu import Linear
from kernels.norm.vision import Places
from services.engine.vision import device, projector


def linear(x: Tensor, weights: Linear, out: Tensor, finish: str = "store", *, bias: Tensor | None = None) -> None:
    assert x.dtype == torch.bfloat16
    weight = weights.weight.view(torch.bfloat16).view(weights.rows, weights.columns)
    total = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    finishes = {"store": total, "relu2": total.clamp(min=0) ** 2, "gelu": gelu(total), "add": total + out.double()}
    out.copy_(finishes[finish])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    out.copy_(torch_layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps))


def shuffled_norm(
    x: Tensor, grid: tuple[int, int], weight: Tensor, bias: Tensor, eps: float, outer: Tensor, outer_eps: float,
    out: Tensor,
) -> None:  # fmt: skip
    rows = torch_layer_norm(x.double(), weight.shape, weight.double(), bias.double(), eps)
    out.copy_(rms_norm(projector.shuffle(rows, grid), outer.shape, outer.double(), outer_eps))


def add_positions(x: Tensor, lines: Tensor, places: Places, patches: tuple[int, int], first_line: int) -> None:
    patch = torch.arange(*patches)
    row, column = patch // places.columns, patch % places.columns
    upper, lower = (each[row] - first_line for each in places.down.view(2, -1))
    left, right = (each[column] for each in places.across.view(2, -1))
    above, below = (
        torch.lerp(lines[line, left].float(), lines[line, right].float(), places.beside[column, None])
        for line in (upper, lower)
    )
    x[patches[0] : patches[1]] += torch.lerp(above, below, places.below[row, None])


def attend(query: Tensor, kv: Tensor, heads: int, out: Tensor) -> None:
    query, key, value = (part.double().unflatten(1, (heads, -1)).transpose(0, 1) for part in (query, *kv.chunk(2, 1)))
    shares = (query @ key.mT / query.shape[2] ** 0.5).softmax(2)
    out.copy_((shares @ value).transpose(0, 1).flatten(1))


def use(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(device.dense, "linear", linear)
    patch.setattr(device.attention, "attend", attend)
    for function in (layer_norm, shuffled_norm, add_positions):
        patch.setattr(device.norm, function.__name__, function)
