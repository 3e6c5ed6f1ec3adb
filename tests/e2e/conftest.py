"""Two stacks for the session: the ordinary one, and one without snapshots whose expert cache holds a tenth."""

from collections.abc import Iterator

import pytest
from running import Running

from services.engine.experts.store import Store


def _stopped(running: Running) -> Iterator[Running]:
    try:
        yield running.wait_until_ready()
        assert running.stop() == 0, running.output
        assert running.processes() == []
    finally:
        running.close()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """As `make up` starts it: it makes the demo's store itself, keeps snapshots, and every expert has a slot."""
    # A store that is slow only because this machine is busy is not left alone.
    yield from _stopped(Running(tmp_path_factory.mktemp("stack"), THIMBLE_API_REDIS_TIMEOUT_MS="10000"))


@pytest.fixture(scope="session")
def bare_stack(tmp_path_factory: pytest.TempPathFactory, demo_store: Store) -> Iterator[Running]:
    """Never restores a state, and has slots for 10 % of the experts."""
    experts = sum(map(len, demo_store.blocks))
    environ = {
        "THIMBLE_ENGINE_STORE": str(demo_store.folder),
        "THIMBLE_ENGINE_EXPERT_SLOTS": str(experts // 10),
        "THIMBLE_ENGINE_HOT_STATES_GB": "0",
        "THIMBLE_API_REDIS_URL": "",
    }
    yield from _stopped(Running(tmp_path_factory.mktemp("bare"), **environ))
