"""What the vision side of a checkpoint is, from its config.json and the shapes of its tensors. Owns no tensor.

Three places of a checkpoint tell the limits of a picture; `vision_config.args` counts first, then `vision_config`, then
preprocessor_config.json. What this engine does not compute is refused.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.errors import CheckpointError
from services.engine.parsing import parse_json

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HEADS = {"vit_huge_patch16_224": 16}
LEAST_PATCHES, MOST_PATCHES = 1024, 13312
FIXED = {"downsample_ratio": 0.5, "ps_version": "v2"}  # absent is read as these


@dataclass(frozen=True)
class VisionConfig:
    """Sizes are counts of elements; a picture has `least_patches` to `most_patches`."""

    patch: int  # pixels a side
    width: int  # of the tower's residual stream
    heads: int
    inner: int  # of its MLP
    blocks: int
    prefix: int  # class and register rows before the patches
    table: int  # positions a side
    projector: int  # hidden width
    hidden: int  # the language model's
    least_patches: int
    most_patches: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise CheckpointError(f"vision config: {field.name} is {value!r}, expected a positive whole number")
        if self.width % self.heads:
            raise CheckpointError(f"vision config: {self.width} channels do not divide into {self.heads} heads")
        if self.least_patches > self.most_patches:
            raise CheckpointError(
                f"vision config: at least {self.least_patches} patches, but at most {self.most_patches}"
            )
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3 or not all(isinstance(v, float) and math.isfinite(v) for v in values):
                raise CheckpointError(f"vision config: {name} is {values!r}, expected three finite numbers")
        if min(self.std) <= 0:
            raise CheckpointError(f"vision config: std is {self.std!r}, expected positive numbers")

    @property
    def normal_patches(self) -> int:
        """The limit where a picture need not be read letter by letter."""
        return min(4 * self.least_patches, self.most_patches)

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "mean": list(self.mean), "std": list(self.std)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "VisionConfig":
        """The inverse of `to_json`. Raises CheckpointError on unknown, missing or wrong values."""
        known = {field.name for field in dataclasses.fields(VisionConfig)}
        if set(values) != known:
            raise CheckpointError(f"vision config: unexpected or missing keys {sorted(set(values) ^ known)}")
        return VisionConfig(**{**values, "mean": tuple(values["mean"]), "std": tuple(values["std"])})


def read_vision_config(folder: Path, raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> VisionConfig:
    """Of the checkpoint in `folder`: `raw` is its config.json, `shapes` those of the tensors by our names.

    Raises CheckpointError that names what is missing or contradicts itself.
    """
    for key, only in FIXED.items():
        if raw.get(key, only) != only:
            raise CheckpointError(f"config: {key} is {raw[key]!r}; this engine computes only {only!r}")
    vision = _object(raw, "vision_config")
    args = _object(vision, "args")
    places: tuple[Mapping[str, Any], ...] = (args, vision, _preprocessor(folder), raw)
    width, patch_values = shapes["embedder"]
    patch = _first(places[1:], ("patch_size",), 16)
    if type(patch) is not int or patch_values != 3 * patch**2:
        raise CheckpointError(f"config: patch_size is {patch!r}, but the embedder takes {patch_values} values")
    positions = shapes["position"][-2]
    if math.isqrt(positions) ** 2 != positions:
        raise CheckpointError(f"vision tensor position: {positions} positions are no square")
    heads = _first((vision,), ("num_attention_heads",), HEADS.get(str(args.get("model")), max(1, width // 80)))
    return VisionConfig(
        patch=patch,
        width=width,
        heads=heads,
        inner=shapes["blocks.0.fc1.weight"][0],
        blocks=1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks.")),
        prefix=shapes["class_tokens"][0],
        table=math.isqrt(positions),
        projector=shapes["projector.up"][0],
        hidden=shapes["projector.down"][0],
        least_patches=_first(places, ("min_num_patches",), LEAST_PATCHES),
        most_patches=_first(places, ("max_num_patches",), MOST_PATCHES),
        mean=_three(_first(places, ("norm_mean", "image_mean"), CLIP_MEAN)),
        std=_three(_first(places, ("norm_std", "image_std"), CLIP_STD)),
    )


def _object(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = holder.get(name) or {}
    if not isinstance(found, Mapping):
        raise CheckpointError(f"config: {name} is {str(found)[:80]!r}, expected an object")
    return found


def _first(places: tuple[Mapping[str, Any], ...], names: tuple[str, ...], otherwise: Any) -> Any:
    return next((place[name] for place in places for name in names if place.get(name) is not None), otherwise)


def _three(values: Any) -> tuple[float, float, float]:
    try:
        red, green, blue = (float(value) for value in values)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(f"config: {str(values)[:200]} given as mean or std, expected three numbers") from error
    return red, green, blue


def _preprocessor(folder: Path) -> Mapping[str, Any]:
    path = folder / "preprocessor_config.json"
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {}
