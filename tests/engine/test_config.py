"""Every setting has a unit, a sentence and limits; a bad value names its variable and what to do."""

import dataclasses

import pytest

from services.engine.config import LIMITS, EngineConfig, read_config, variable
from services.settings import SettingError, describe


def test_defaults_are_valid_and_every_number_has_limits() -> None:
    config = read_config({})
    numbers = {f.name for f in dataclasses.fields(EngineConfig) if f.type in (int, float)}
    assert numbers == set(LIMITS)
    assert all(f.metadata["text"] for f in dataclasses.fields(EngineConfig))
    assert config.host == config.metrics_host == "127.0.0.1"


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_a_number_out_of_range_is_named(name: str) -> None:
    low, high = LIMITS[name]
    kind = EngineConfig.__annotations__[name]
    for value in (low - 1, high + 1):
        with pytest.raises(SettingError, match=rf"{variable(name)}=.*from {low} to {high}"):
            read_config({variable(name): str(kind(value))})
    assert getattr(read_config({variable(name): str(kind(high))}), name) == high


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"THIMBLE_ENGINE_PROT": "1"}, "unknown setting THIMBLE_ENGINE_PROT; did you mean THIMBLE_ENGINE_PORT"),
        ({"THIMBLE_ENGINE_PORT": "eight"}, "THIMBLE_ENGINE_PORT='eight' does not fit: give a whole number"),
        ({"THIMBLE_ENGINE_KV_GB": "nan"}, "THIMBLE_ENGINE_KV_GB=nan is out of range"),
        ({"THIMBLE_ENGINE_HOST": " "}, "THIMBLE_ENGINE_HOST is empty"),
        ({"THIMBLE_ENGINE_MODEL_NAME": "my model"}, "THIMBLE_ENGINE_MODEL_NAME='my model'"),
        ({"THIMBLE_ENGINE_EXPERT_SLOTS": "9", "THIMBLE_ENGINE_EXPERT_CACHE_GB": "1"}, "both .* are set: keep one"),
        ({"THIMBLE_ENGINE_PORT": "8601"}, "THIMBLE_ENGINE_PORT and THIMBLE_ENGINE_METRICS_PORT are both 8601"),
    ],
    ids=["unknown", "type", "nan", "no host", "name", "two sizes", "same port"],
)
def test_a_bad_setting_says_what_to_do(environ: dict[str, str], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read_config(environ)


def test_two_free_ports_may_both_be_zero() -> None:
    assert read_config({"THIMBLE_ENGINE_PORT": "0", "THIMBLE_ENGINE_METRICS_PORT": "0"}).port == 0


def test_the_settings_in_force_are_printed() -> None:
    text = describe(read_config({"THIMBLE_ENGINE_EXPERT_SLOTS": "44"}))
    assert "expert_slots = 44 blocks" in text
    assert len(text.splitlines()) == len(dataclasses.fields(EngineConfig))
