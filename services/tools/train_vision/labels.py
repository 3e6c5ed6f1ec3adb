"""What the tower is taught first, without language: what a scene is made of, as numbers, and a head that tells them.

The head is thrown away; what it needed the tower to see stays.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from services.tools.train_vision.scenes import COLOURS, DIGITS, KINDS, LETTERS, MOST, ROWS, SHAPES, Scene

NONE = -1  # does not apply to this scene
_ROW = LETTERS + 2 + 4  # characters of a row: item, quantity, price without its point
_PAIRS = len(COLOURS) * len(SHAPES)
CHARACTERS = "_abcdefghijklmnopqrstuvwxyz0123456789"  # _: none
COUNT = 2 + len(SHAPES) + len(COLOURS) + _PAIRS + LETTERS + ROWS * _ROW
CLASSES = len(CHARACTERS)
assert DIGITS <= LETTERS
assert max(len(COLOURS), len(KINDS), MOST + 2) <= CLASSES


def labels(seen: Scene) -> list[int]:
    """COUNT numbers below CLASSES, or NONE: the kind, the background, how many there are of each shape, of each colour,
    whether there is any of both, then the characters of the text, and those of each row."""
    found = [KINDS.index(seen.kind), COLOURS.index(seen.background)]
    if seen.kind in ("things", "nothing"):
        groups = seen.groups
        found += [sum(g.count for g in groups if g.shape == shape) for shape in SHAPES]
        found += [sum(g.count for g in groups if g.colour == colour) for colour in COLOURS]
        there = {(g.colour, g.shape) for g in groups}
        found += [int((colour, shape) in there) for colour in COLOURS for shape in SHAPES]
    found += [NONE] * (2 + len(SHAPES) + len(COLOURS) + _PAIRS - len(found))
    found += _characters(seen.text, LETTERS) if seen.text else [NONE] * LETTERS
    for row in seen.rows:
        price = row.price.replace(".", "").rjust(4, "_")
        found += [*_characters(row.item, LETTERS), *_characters(row.quantity.rjust(2, "_") + price, 6)]
    return found + [NONE] * (COUNT - len(found))


def _characters(text: str, length: int) -> list[int]:
    return [CHARACTERS.index(one) for one in text.ljust(length, "_")]


class Head(nn.Module):
    """A query for each label looks at all of a picture's tokens."""

    def __init__(self, features: int, width: int = 192, heads: int = 4) -> None:
        super().__init__()
        self._heads = heads
        self.queries = nn.Parameter(torch.randn(COUNT, width) * 0.5)
        self.seen = nn.Linear(features, 2 * width)
        self.telling = nn.Parameter(torch.randn(COUNT, CLASSES, width) * width**-0.5)
        self.widened, self.narrowed = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, features: Tensor) -> Tensor:
        """[pictures, tokens, features] -> logits [pictures, COUNT, CLASSES]."""
        key, value = (
            torch.unflatten(t, -1, (self._heads, -1)).transpose(1, 2) for t in self.seen(features).chunk(2, -1)
        )
        query = torch.unflatten(self.queries.to(key.dtype), -1, (self._heads, -1)).transpose(0, 1)
        x = scaled_dot_product_attention(query.expand(len(key), -1, -1, -1), key, value).transpose(1, 2).flatten(2)
        x = x + self.narrowed(torch.relu(self.widened(layer_norm(x, x.shape[-1:]))))
        return torch.einsum("pld,lcd->plc", layer_norm(x, x.shape[-1:]), self.telling.to(x.dtype))

    def loss(self, features: Tensor, wanted: Tensor) -> Tensor:
        """Mean over pictures; `wanted` [pictures, COUNT], of `labels`. Pairs, which are many, count little."""
        each = cross_entropy(
            self(features).float().flatten(0, 1), wanted.flatten(), ignore_index=NONE, reduction="none"
        ).view(wanted.shape)
        pairs = slice(COUNT - ROWS * _ROW - LETTERS - _PAIRS, COUNT - ROWS * _ROW - LETTERS)
        weight = torch.ones(COUNT, device=each.device)
        weight[pairs] = 0.15
        return (each * weight).sum() / (8 * len(wanted))
