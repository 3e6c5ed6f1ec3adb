"""A small random model with a multi-token-prediction block, as the engine reads it from a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.engine.experts.store import Store
from services.engine.experts.streamer import PythonExperts, open_experts
from services.engine.model import Model
from services.engine.mtp import DraftHead
from services.engine.pages import PagePool
from services.engine.state import State
from services.tools import small_checkpoint
from services.tools.repack import repack


def small_store(folder: Path) -> Store:
    return repack(small_checkpoint.write(folder / "c"), folder / "store", say=lambda _: None)


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
