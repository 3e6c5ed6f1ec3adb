"""What the tower is taught first, without language: what a scene is made of, as numbers, and a head that tells them,
of the whole picture and of each of its patches.

The head is thrown away; what it needed the tower to see stays.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, scaled_dot_product_attention

from services.tools.train_vision.marks import CHARACTERS, PER_PATCH, SIDE_BY_SIDE, SYMBOLS
from services.tools.train_vision.scenes import COLOURS, DIGITS, KINDS, LETTERS, MOST, ROWS, SHAPES, Scene

NONE = -1  # does not apply to this scene
_ROW = LETTERS + 2 + 4  # characters of a row: item, quantity, price without its point
_PAIRS = len(COLOURS) * len(SHAPES)
# Groups of labels, how many of each, and what the mean of a group counts. Means, for a picture's loss to be of one
# size whatever is in it: summed, the letters of invoices drowned what is learnt first.
_GROUPS = {
    "kind": (1, 1.0),
    "background": (1, 1.0),
    "shapes": (len(SHAPES), 3.0),
    "colours": (len(COLOURS), 3.0),
    "pairs": (_PAIRS, 3.0),
    "text": (LETTERS, 4.0),
    "rows": (ROWS * _ROW, 6.0),
}
COUNT = sum(count for count, _ in _GROUPS.values())
CLASSES = len(CHARACTERS)
PATCHES_WEIGHT = 8.0
NOTHING_WEIGHT = 0.1  # of a patch that nothing is on, as most are
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
    """A query for each label looks at all of a picture's tokens; each patch is told by itself."""

    def __init__(self, features: int, width: int = 192, heads: int = 4) -> None:
        super().__init__()
        self._heads = heads
        self.queries = nn.Parameter(torch.randn(COUNT, width) * 0.5)
        self.seen = nn.Linear(features, 2 * width)
        self.telling = nn.Parameter(torch.randn(COUNT, CLASSES, width) * width**-0.5)
        self.widened, self.narrowed = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.patch = nn.Linear(features // 4, SIDE_BY_SIDE * len(SYMBOLS) + len(COLOURS) + 1)

    def forward(self, features: Tensor, real: Tensor) -> Tensor:
        """[pictures, tokens, features], bool [pictures, tokens]: those there are -> [pictures, COUNT, CLASSES]."""
        key, value = (
            torch.unflatten(t, -1, (self._heads, -1)).transpose(1, 2) for t in self.seen(features).chunk(2, -1)
        )
        query = torch.unflatten(self.queries.to(key.dtype), -1, (self._heads, -1)).transpose(0, 1)
        mask = real[:, None, None, :].expand(-1, -1, COUNT, -1)
        x = scaled_dot_product_attention(query.expand(len(key), -1, -1, -1), key, value, mask)
        x = x.transpose(1, 2).flatten(2)
        x = x + self.narrowed(torch.relu(self.widened(layer_norm(x, x.shape[-1:]))))
        return torch.einsum("pld,lcd->plc", layer_norm(x, x.shape[-1:]), self.telling.to(x.dtype))

    def losses(self, features: Tensor, real: Tensor, wanted: Tensor, on_patches: Tensor) -> tuple[Tensor, Tensor]:
        """Mean over pictures, and for each whether all is told right (but for patches).

        `wanted` [pictures, COUNT], of `labels`; `on_patches` [pictures, 4 tokens, PER_PATCH], as `marks` has them, NONE
        where a picture has no patch.
        """
        told, wanted = self(features, real).float(), wanted.long()
        applies = wanted != NONE
        each = cross_entropy(told.flatten(0, 1), wanted.flatten(), ignore_index=NONE, reduction="none")
        loss, at = each.new_zeros(()), 0
        for count, weight in _GROUPS.values():
            part, used = each.view(wanted.shape)[:, at : at + count], applies[:, at : at + count]
            loss = loss + weight * (part.sum(1) / used.sum(1).clamp(min=1)).mean()
            at += count
        right = ((told.argmax(-1) == wanted) | ~applies).all(1)
        return loss + PATCHES_WEIGHT * self._patches_loss(features, on_patches.long()), right

    def _patches_loss(self, features: Tensor, wanted: Tensor) -> Tensor:
        told = self.patch(torch.unflatten(features, 2, (4, -1)).flatten(1, 2)).float()
        loss: Tensor = told.new_zeros(())
        at = 0
        for part in range(PER_PATCH):
            classes = len(SYMBOLS) if part < SIDE_BY_SIDE else len(COLOURS) + 1
            target = wanted[:, :, part].flatten()
            each = cross_entropy(
                told[:, :, at : at + classes].flatten(0, 1), target, ignore_index=NONE, reduction="none"
            )
            weight = torch.where(target > 0, 1.0, NOTHING_WEIGHT) * (target != NONE)
            loss = loss + (each * weight).sum() / weight.sum().clamp(min=1)
            at += classes
        return loss / PER_PATCH
