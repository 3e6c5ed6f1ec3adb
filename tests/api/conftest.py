"""Real servers for the api's tests: the api under uvicorn in a thread, a scripted engine, an embedded store."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from running_api import MODEL_DIR, PATIENT_MS, RunningApi
from scripted_engine import ScriptedEngine

from services.api.config import ApiConfig
from services.api.embedded import EmbeddedStore
from services.api.model_folder import ModelFolder, load_model_folder


@pytest.fixture(scope="session")
def folder() -> ModelFolder:
    return load_model_folder(MODEL_DIR)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is slow only because this machine is busy is waited for."""
    monkeypatch.setattr("services.api.client.ADMISSION_S", 20.0)
    monkeypatch.setattr("services.api.client.INFO_TIMEOUT_S", 20.0)
    monkeypatch.setattr("services.api.answer.STOP_GRACE_S", 20.0)


@pytest.fixture
def engine(folder: ModelFolder) -> Iterator[ScriptedEngine]:
    scripted = ScriptedEngine()
    scripted.script = folder.tokenizer.encode("Hello there, friend.")
    yield scripted
    scripted.close()


@pytest.fixture
def start_api(engine: ScriptedEngine) -> Iterator[Callable[..., RunningApi]]:
    running: list[RunningApi] = []

    def start(**settings: Any) -> RunningApi:
        # A store that is slow for that reason is no store in trouble, either.
        config = ApiConfig(model_dir=MODEL_DIR, engines=engine.address, stop_timeout_s=1, redis_timeout_ms=PATIENT_MS)
        running.append(RunningApi(dataclasses.replace(config, **settings)))
        return running[-1]

    yield start
    for api in running:
        api.close()


@pytest.fixture
def api(start_api: Callable[..., RunningApi]) -> RunningApi:
    """With the engine's hot states only."""
    return start_api()


@pytest.fixture
def store() -> Iterator[EmbeddedStore]:
    with EmbeddedStore(64) as embedded:
        yield embedded


@pytest.fixture
def client(store: EmbeddedStore) -> Iterator["redis.Redis"]:
    """Of the store, beside the api's own."""
    with redis.Redis.from_url(store.url) as connected:
        yield connected
