"""A small random model with a multi-token-prediction block, as the engine reads it from a store."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from services.engine.experts.store import Store
from services.engine.experts.streamer import PythonExperts, open_experts
from services.engine.model import Model
from services.engine.mtp import DraftHead
from services.engine.pages import PagePool
from services.engine.state import State
from services.tools import small_checkpoint
from services.tools.demo import CHECKPOINT
from services.tools.repack import repack

LOUD = 25.0  # embeddings, in the size of what layers add
QUIET = 0.3


def small_store(folder: Path) -> Store:
    return repack(small_checkpoint.write(folder / "c"), folder / "store", say=lambda _: None)


def foreseeable_store(folder: Path) -> Store:
    """One whose block is often right, and often wrong: in the network and in the block most of the next id is decided
    by the last one alone, by the same weights. Its ids are the demo's words."""
    checkpoint = small_checkpoint.write(folder / "c", edit=_foreseeable, vocabulary=4096)
    shutil.copyfile(CHECKPOINT / "tokenizer.json", checkpoint / "tokenizer.json")
    return repack(checkpoint, folder / "store", say=lambda _: None)


def _foreseeable(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    def scaled(tensor: torch.Tensor, by: float) -> torch.Tensor:
        return (tensor.float() * by).bfloat16()

    tensors["backbone.embeddings.weight"] = scaled(tensors["backbone.embeddings.weight"], LOUD)
    for name, tensor in [each for each in tensors.items() if each[0].startswith("mtp.")]:
        if tensor.ndim == 2:
            tensors[name] = scaled(tensor, QUIET * tensor.shape[1] ** -0.5)
        elif "norm" in name:
            tensors[name] = torch.ones_like(tensor)
    tensors["mtp.layers.1.final_layernorm.weight"] = tensors["backbone.norm_f.weight"].clone()
    joined = tensors["mtp.layers.0.eh_proj.weight"].float()
    joined += LOUD * torch.eye(*joined.shape)  # the half that reads the embedding
    tensors["mtp.layers.0.eh_proj.weight"] = joined.bfloat16()


@contextmanager
def drafting_model(store: Store, python: bool = False) -> Iterator[tuple[Model, DraftHead]]:
    slots = sum(map(len, store.layers))
    experts = PythonExperts(store, slots=slots) if python else open_experts(store, slots=slots, drafts=True)
    model = Model(store.dense(), store.config, experts)
    weights = store.draft()
    assert weights is not None
    model.head = head = DraftHead(model, weights, experts)
    try:
        yield model, head
    finally:
        experts.close()


def new_state(model: Model, pages: int = 4) -> State:
    """Of a pool of its own, whose memory is rubbish."""
    pool = PagePool(model.config, pages, drafts=model.head is not None)
    pool.keys.fill_(float("nan"))
    pool.values.fill_(float("nan"))
    return State(model.config, pool)
