"""Names of tensors and modules: from what checkpoints write to one set. Owns prefixes, nothing of shapes or formats.

Language model names are written with or without `language_model.`, then `backbone.`, `model.` or nothing. Canonical is
without any: `layers.0.norm.weight`, `lm_head.weight`, `mtp.layers.0.norm.weight`.
"""

from typing import Literal

Part = Literal["language", "mtp", "vision", "sound"]

WRAPPER = "language_model."
BODIES = ("backbone.", "model.")
OTHER_PARTS: dict[str, Part] = {
    "vision_model.": "vision",
    "vision_projector.": "vision",
    "mlp1.": "vision",
    "sound_": "sound",
    "mtp.": "mtp",
}
_OTHERS = tuple(OTHER_PARTS)


def canonical(name: str) -> tuple[Part, str]:
    """The part of the checkpoint that a name belongs to, and its canonical name there (vision: as written)."""
    name = name.removeprefix(WRAPPER)
    for prefix in BODIES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name.startswith(_OTHERS):  # a checkpoint has 165,000 names, nearly all of them the language model's
        return next((part, name) for prefix, part in OTHER_PARTS.items() if name.startswith(prefix))
    return "language", name
