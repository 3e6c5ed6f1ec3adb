"""Real servers for the api's tests: the api under uvicorn in a thread, a scripted engine, an embedded store."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_api import MODEL_DIR, RunningApi
from scripted_engine import ScriptedEngine

from services.api.config import ApiConfig
from services.api.embedded import EmbeddedStore
from services.api.model_folder import ModelFolder, load_model_folder


@pytest.fixture(scope="session")
def folder() -> ModelFolder:
    return load_model_folder(MODEL_DIR)


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
        config = ApiConfig(model_dir=MODEL_DIR, engines=engine.address, stop_timeout_s=1)
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
