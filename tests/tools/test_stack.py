"""Ports and environment of `thimble up`: the owner's choices win, what is taken is named."""

import socket
from pathlib import Path

import pytest

from services.settings import SettingError
from services.tools.stack import StackError, plan_stack

STORE = Path("/somewhere/store")


def test_free_ports_are_chosen_and_the_api_knows_the_engine() -> None:
    stack = plan_stack({"PATH": "/bin"}, STORE, port=0)
    ports = {stack.api.port, stack.engine.port, stack.engine.metrics_port}
    assert len(ports) == 3
    assert 0 not in ports
    assert stack.api.engine_addresses == (stack.engine_address,) == (f"127.0.0.1:{stack.engine.port}",)
    assert stack.url == f"http://127.0.0.1:{stack.api.port}"
    assert stack.engine.store == stack.api.model_dir == STORE
    assert stack.api.redis_url == "embedded"
    assert stack.environ["PATH"] == "/bin"


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = listener.getsockname()[1]
        with pytest.raises(StackError, match=rf"port {taken} on 127\.0\.0\.1.*--port N"):
            plan_stack({}, STORE, port=taken)
        with pytest.raises(StackError, match=rf"port {taken}.*THIMBLE_ENGINE_PORT=N"):
            plan_stack({"THIMBLE_ENGINE_PORT": str(taken)}, STORE, port=0)
    assert plan_stack({}, STORE, port=taken).api.port == taken


def test_a_default_port_that_is_taken_moves() -> None:
    first = plan_stack({}, STORE, port=0)
    with socket.create_server(("127.0.0.1", first.engine.port)):
        second = plan_stack({}, STORE, port=0)
    assert second.engine.port != first.engine.port


def test_the_owners_settings_win() -> None:
    chosen = {
        "THIMBLE_API_REDIS_URL": "redis://elsewhere:6379/0",
        "THIMBLE_API_ENGINES": "elsewhere:8600",
        "THIMBLE_ENGINE_READERS": "7",
    }
    stack = plan_stack(chosen, STORE, port=0)
    assert stack.api.redis_url == "redis://elsewhere:6379/0"
    assert stack.api.engines == "elsewhere:8600"
    assert stack.engine.readers == 7


def test_a_bad_setting_is_told_before_anything_starts() -> None:
    with pytest.raises(SettingError, match="THIMBLE_ENGINE_READERS"):
        plan_stack({"THIMBLE_ENGINE_READERS": "many"}, STORE, port=0)
    with pytest.raises(SettingError, match="THIMBLE_API_PORT"):
        plan_stack({}, STORE, port=70000)
