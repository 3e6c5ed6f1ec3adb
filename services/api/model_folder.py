"""The model's text side, read once at start from a folder: tokenizer, chat template, defaults of generation. Owns the
meaning of generation_config.json and of the model ids that clients choose from; the engine owns everything else."""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

from services.api.errors import ModelFolderError, ModelNotFound
from services.api.templates import ChatTemplate, load_template
from services.api.tokens import TextTokenizer, load_tokenizer
from services.rpc import engine_pb2 as pb

THINK_SUFFIX = "-think"
DOCUMENT_SUFFIX = "-doc"  # pictures at the largest resolution


@dataclass(frozen=True)
class GenerationDefaults:
    """What applies when a request does not say. Temperature 0 is greedy."""

    temperature: float
    top_p: float
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class ModelFolder:
    tokenizer: TextTokenizer
    template: ChatTemplate
    defaults: GenerationDefaults


def load_model_folder(folder: Path) -> ModelFolder:
    """Raises ModelFolderError, which names the file and what is wrong with it."""
    if not folder.is_dir():
        raise ModelFolderError(
            f"{folder} is not a folder: THIMBLE_API_MODEL_DIR must name the store or checkpoint folder"
        )
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    return ModelFolder(tokenizer, load_template(folder, tokenizer), _load_defaults(folder / "generation_config.json"))


def model_ids(info: pb.InfoResponse) -> dict[str, bool]:
    """The ids a model is offered under -> whether it thinks. Those for documents only if it sees pictures."""
    suffixes = ("", DOCUMENT_SUFFIX) if info.vision else ("",)
    return {
        info.model + think + document: bool(think)
        for document, think in itertools.product(suffixes, ("", THINK_SUFFIX))
    }


def thinks(model_id: str, info: pb.InfoResponse) -> bool:
    """Raises ModelNotFound, which lists what there is."""
    ids = model_ids(info)
    if model_id not in ids:
        raise ModelNotFound(f"the model {model_id!r} does not exist; there are: {', '.join(ids)}", "model")
    return ids[model_id]


def _load_defaults(path: Path) -> GenerationDefaults:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        eos = config["eos_token_id"]
        stop_ids = tuple(eos) if isinstance(eos, list) else (eos,)
        greedy = config.get("do_sample") is False
        temperature = 0.0 if greedy else float(config.get("temperature", 1.0))
        defaults = GenerationDefaults(temperature, float(config.get("top_p", 1.0)), stop_ids)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ModelFolderError(f"cannot read {path}: {error!r}") from error
    if not stop_ids or not all(isinstance(i, int) and i >= 0 for i in stop_ids):
        raise ModelFolderError(f"{path}: eos_token_id must be a token id or a list of them")
    if not (defaults.temperature >= 0 and 0 < defaults.top_p <= 1):
        raise ModelFolderError(f"{path}: temperature or top_p is out of range")
    return defaults
