"""The real demo model in a real engine, inside the test's process."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer
from toy_engine import Call

from services.engine.config import EngineConfig
from services.engine.engine import Engine
from services.engine.experts.store import Store
from services.engine.load import load
from services.engine.request import Request

STOP = frozenset({2, 11})


class Demo:
    def __init__(self, engine: Engine, registry: CollectorRegistry, store: Store) -> None:
        self.engine, self._registry, self._store = engine, registry, store

    def ask(self, ids: list[int] | tuple[int, ...], max_tokens: int = 24, **more: Any) -> Call:
        return Call(self.engine, Request("r", tuple(ids), max_tokens, stop_ids=STOP, **more))

    def answer(self, ids: list[int] | tuple[int, ...], **more: Any) -> list[int]:
        call = self.ask(ids, **more)
        call.finish()
        call.handle.cancel()
        return call.tokens

    def value(self, name: str, **labels: str) -> float:
        found = self._registry.get_sample_value(f"thimble_{name}", {"model_name": self.engine.info.model, **labels})
        assert found is not None, f"no series {name} {labels}"
        return found

    def prompt(self, *turns: str) -> list[int]:
        """User, assistant, user, ... as the demo's template writes them, and the begin of the next answer."""
        return prompt(self._store.folder, *turns)

    def text(self, ids: list[int]) -> str:
        return str(tokenizer(self._store.folder).decode([id_ for id_ in ids if id_ not in STOP]))


@contextmanager
def demo(store: Store, **settings: Any) -> Iterator[Demo]:
    registry = CollectorRegistry()
    # How many reads at once are best is measured at every start, over half a second: once is enough for all tests.
    config = EngineConfig(store=store.folder, **{"hot_states_gb": 0.1, "warm_dir": "-", "readers": 2, **settings})
    parts = load(config, registry, say=lambda text: None)
    engine = Engine(parts.info, parts.scheduler, parts.experts, parts.grammars, parts.sight)
    running = Demo(engine, registry, store)
    try:
        yield running
    finally:
        engine.close()
    assert engine.ended.exception() is None
    assert running.value("kv_pages", state="used") == 0


@cache
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def prompt(folder: Path, *turns: str) -> list[int]:
    text = "<|im_start|>system\n<|im_end|>\n"
    for number, turn in enumerate(turns):
        role, think = ("assistant", "<think></think>") if number % 2 else ("user", "")
        text += f"<|im_start|>{role}\n{think}{turn}<|im_end|>\n"
    text += "<|im_start|>assistant\n<think></think>"
    return list(tokenizer(folder).encode(text, add_special_tokens=False).ids)
