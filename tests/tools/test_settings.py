"""Settings as people type them: what does not fit is named with its variable and with what to give, before anything is
started. Every setting of both services."""

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from services.api import config as api
from services.engine import config as engine
from services.settings import SettingError
from services.tools.stack import StackError, plan_stack

SERVICES: list[tuple[Any, Any]] = [(engine, engine.EngineConfig), (api, api.ApiConfig)]
FIELDS = [(module, field, get_type_hints(kind)[field]) for module, kind in SERVICES
          for field in (one.name for one in dataclasses.fields(kind))]  # fmt: skip
WRONG = {
    int: ("x", "1.5", "1e3", "nan", "9" * 30, "-1"),
    float: ("x", "nan", "inf", "1e999", "-1"),
    bool: ("on", "2", "maybe"),
    Path: (),
    str: (),
}


@pytest.mark.parametrize(("module", "name", "kind"), FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_what_does_not_fit_is_named_with_what_to_give(module: Any, name: str, kind: type) -> None:
    variable = module.variable(name)
    for text in (*WRONG[kind], *(() if kind is str else ("", "  "))):
        with pytest.raises(SettingError, match=rf"{variable}(=| is empty).*give ") as told:
            module.read_config({variable: text})
        assert not {"int", "float", "Path"} & set(str(told.value).replace(":", " ").split()), "Python's words"


@pytest.mark.parametrize("key", [" secret", "secret\n", "schlüssel", "a\tb", "\x00"])
def test_a_key_that_no_client_can_send_is_refused(key: str, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"THIMBLE_API_API_KEY: .*give such a key"):
        api.read_config({"THIMBLE_API_API_KEY": key})
    file = tmp_path / "key"
    file.write_text(f"x{key}x\n" if key.strip() == "secret" else f"x{key}\n")
    config = api.read_config({"THIMBLE_API_API_KEY_FILE": str(file)})
    if key.strip() == "secret":
        assert config.read_api_key() == f"x{key}x".partition("\n")[0], "a space inside can be sent"
    else:
        with pytest.raises(SettingError, match=r"KEY_FILE: .*give such a key"):
            config.read_api_key()


@pytest.mark.parametrize("engines", ["nonsense", "a:8600,b", "a:", "a:x", "a:0", "a:99999", "http://a", ":"])
def test_an_engine_s_address_without_a_port_is_refused(engines: str) -> None:
    with pytest.raises(SettingError, match=r"THIMBLE_API_ENGINES: .*give HOST:PORT"):
        api.read_config({"THIMBLE_API_ENGINES": engines})


@pytest.mark.parametrize("engines", ["a:8600", "127.0.0.1:1, [::1]:65535", "unix:/run/engine", "dns:///engine:8600"])
def test_an_engine_s_address_may_be_any_that_grpc_knows(engines: str) -> None:
    assert api.read_config({"THIMBLE_API_ENGINES": engines}).engine_addresses


@pytest.mark.parametrize("variable", ["THIMBLE_API_HOST", "THIMBLE_ENGINE_HOST", "THIMBLE_ENGINE_METRICS_HOST"])
@pytest.mark.parametrize("host", ["nonsense.invalid", "a..b", "203.0.113.7", "x" * 300])
def test_an_address_that_is_not_this_machine_s_is_named(variable: str, host: str) -> None:
    ports = {f"THIMBLE_{name}_PORT": "0" for name in ("API", "ENGINE", "ENGINE_METRICS")}
    with pytest.raises(StackError, match=rf"{variable}=.*no such address; give one of its own"):
        plan_stack({variable: host} | ports, Path("store"), None)


def test_a_key_s_file_that_cannot_be_read_is_told_before_anything_starts() -> None:
    with pytest.raises(SettingError, match="cannot read /none"):
        plan_stack({"THIMBLE_API_API_KEY_FILE": "/none"}, Path("store"), 0)
