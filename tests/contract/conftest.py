"""Two engines on the demo model: one holds all experts, one a tenth of them."""

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from engine_process import EngineProcess, start_engine, stop_engine

from services.engine.experts.store import Store


def running(store: Store, log: Path, **settings: str) -> Iterator[EngineProcess]:
    engine = start_engine(store.folder, log, hot_states_gb="0.1", **settings)
    try:
        yield engine
    finally:
        assert stop_engine(engine) == 0


@pytest.fixture(scope="session")
def ample(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    yield from running(demo_store, tmp_path_factory.mktemp("engine") / "ample.log")


@pytest.fixture(scope="session")
def scarce(demo_store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    log = tmp_path_factory.mktemp("engine") / "scarce.log"
    yield from running(demo_store, log, expert_slots="44", prefill_chunk_tokens="7", max_sequences="2", queue_limit="1")


@pytest.fixture(scope="session")
def channel(ample: EngineProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(ample.address) as channel:
        yield channel


@pytest.fixture(scope="session")
def scarce_channel(scarce: EngineProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(scarce.address) as channel:
        yield channel
