"""A checkpoint folder as it was downloaded: its files, and every tensor of the language model by its canonical name.

Takes one file or shards with an index. Names are put into one form by names.py, vision tensors by vision/names.py; the
multi-token-prediction block is kept aside, sound tensors are counted. What the tensors mean is in weights.py, what the
config says of their formats in quantisation.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.engine import quantisation
from services.engine.errors import CheckpointError
from services.engine.model_config import ModelConfig, read_config
from services.engine.names import Part, canonical
from services.engine.parsing import parse_json
from services.engine.tensorfile import Entry, read_header
from services.engine.vision.names import VisionTensor, vision_tensors
from services.engine.weights import (
    Format,
    check_tensors,
    dense_tensors,
    draft_expert_tensors,
    draft_tensors,
    expert_tensors,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """`tensors` and `formats` are complete and checked; nothing but headers has been read."""

    folder: Path
    architecture: str
    config: ModelConfig
    tensors: dict[str, Entry]
    formats: dict[str, Format]  # of every linear, by its name without `.weight`
    mtp: dict[str, Entry]  # not checked: `draft_formats` does
    vision: dict[str, VisionTensor]  # by one set of names
    sound_tensors: int

    @staticmethod
    def open(folder: Path) -> "Checkpoint":
        """Raises CheckpointError if the folder holds no model of ours, or not all of it, or contradicts itself."""
        raw = read_config(folder)
        config = ModelConfig.from_hf(raw)
        parts: dict[Part, dict[str, Entry]] = {"language": {}, "mtp": {}, "vision": {}, "sound": {}}
        for name, entry in _entries(folder):
            part, ours = canonical(name)
            if ours in parts[part]:
                twice = parts[part][ours]
                raise CheckpointError(
                    f"tensor {ours}: present twice, as {twice.name} in {twice.path.name} "
                    f"and as {name} in {entry.path.name}"
                )
            parts[part][ours] = entry
        tensors = parts["language"]
        experts = config.experts * len(config.moe_layers)
        if experts > len(tensors):  # before all of their names are made: the number may be any
            raise CheckpointError(f"config: {experts} experts in all, but the files have only {len(tensors)} tensors")
        formats = check_tensors(tensors, dense_tensors(config), expert_tensors(config))
        quantisation.check(quantisation.descriptions(folder, raw), formats)
        architecture = (raw.get("architectures") or [str(raw.get("model_type"))])[0]
        vision = vision_tensors(parts["vision"], raw)
        return Checkpoint(folder, architecture, config, tensors, formats, parts["mtp"], vision, len(parts["sound"]))

    def draft_formats(self) -> dict[str, Format]:
        """Of every linear of the multi-token-prediction block. Raises CheckpointError if it is not as this engine
        computes it, which does not make the model unusable."""
        return check_tensors(self.mtp, draft_tensors(self.config), draft_expert_tensors(self.config))


def _entries(folder: Path) -> Iterator[tuple[str, Entry]]:
    """Every tensor of every file. Raises CheckpointError where the index and a shard disagree."""
    listed: dict[str, set[str]] = {}
    for name, file in (_weight_map(folder) or {}).items():
        listed.setdefault(file, set()).add(name)
    for path in weight_files(folder):
        header = read_header(path)
        if listed:
            for name in sorted(listed[path.name] ^ header.keys()):
                here = name in header
                known, other = ("is there", "does not list it") if here else ("missing there", "lists it")
                raise CheckpointError(f"tensor {name}: {path.name} {known}, but {INDEX} {other}; fetch both again")
        yield from header.items()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint. Raises CheckpointError if there are none or the index is damaged."""
    listed = _weight_map(folder)
    if listed is None:
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder}: holds neither {SINGLE} nor {INDEX}; give the checkpoint's folder")
        return [folder / SINGLE]
    return [folder / name for name in sorted(set(listed.values()))]


def _weight_map(folder: Path) -> dict[str, str] | None:
    """File name by tensor name, as the index has it; None without an index."""
    path = folder / INDEX
    if not path.exists():
        return None
    try:
        files = dict(parse_json(path.read_text(encoding="utf-8"))["weight_map"].items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error!r}; fetch the file again") from error
    if not all(isinstance(name, str) for name in files.values()) or any(Path(n).name != n for n in {*files.values()}):
        raise CheckpointError(f"{path}: names a file outside the checkpoint's folder")
    return files
