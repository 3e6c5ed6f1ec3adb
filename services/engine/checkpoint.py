"""A checkpoint folder as it was downloaded: its files, and every tensor of the language model by its canonical name.

Takes one file or shards with an index, names with or without `language_model.`, `backbone.` or `model.`. Vision and
sound tensors are none of the language model and are left out, the multi-token-prediction block is kept aside; both are
counted. What the tensors mean is in weights.py.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from services.engine.errors import CheckpointError
from services.engine.model_config import ModelConfig, read_config
from services.engine.tensorfile import Entry, read_header
from services.engine.weights import Format, check_tensors, dense_tensors, expert_tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OTHER_PARTS = ("vision_", "mlp1.", "sound_")
BODY_PREFIXES = ("backbone.", "model.")


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` and `formats` are complete and checked; nothing but headers has been read."""

    folder: Path
    architecture: str
    config: ModelConfig
    tensors: dict[str, Entry]
    formats: dict[str, Format]  # of every linear, by its name without `.weight`
    mtp: dict[str, Entry]
    other_tensors: int  # vision and sound tensors, left where they are

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Raises CheckpointError if the folder holds no model of ours, or not all of it."""
        raw = read_config(folder)
        config = ModelConfig.from_hf(raw)
        tensors: dict[str, Entry] = {}
        mtp: dict[str, Entry] = {}
        others = 0
        for path in weight_files(folder):
            for name, entry in read_header(path).items():
                canonical = name.removeprefix("language_model.")
                if canonical.startswith(OTHER_PARTS):
                    others += 1
                    continue
                target = mtp if canonical.startswith("mtp.") else tensors
                for prefix in BODY_PREFIXES:
                    canonical = canonical.removeprefix(prefix)
                if canonical in target:
                    twice = target[canonical]
                    raise CheckpointError(
                        f"tensor {canonical}: present twice, as {twice.name} in {twice.path.name} "
                        f"and as {name} in {path.name}"
                    )
                target[canonical] = entry
        formats = check_tensors(tensors, dense_tensors(config), expert_tensors(config))
        architecture = (raw.get("architectures") or [str(raw.get("model_type"))])[0]
        return Checkpoint(folder, architecture, config, tensors, formats, mtp, others)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises CheckpointError if there are none or the index is damaged."""
    if not (folder / INDEX).exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}; give the checkpoint's folder")
        return [folder / SINGLE]
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder / INDEX}: cannot be read: {error!r}; fetch the file again") from error
    if any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise CheckpointError(f"{folder / INDEX}: names a file outside the checkpoint's folder")
    return [folder / name for name in sorted(names)]
