"""Settings: each field is documented, bounded, and a bad value names its variable."""

import dataclasses
from pathlib import Path

import pytest

from services.api.config import LIMITS, PREFIX, SECRET, ApiConfig, read_config
from services.settings import SettingError, describe


def test_every_field_says_what_it_is() -> None:
    for field in dataclasses.fields(ApiConfig):
        assert len(field.metadata["text"]) > 10, field.name
        if field.type in (int, float) and field.name != "port":
            assert field.metadata["unit"], field.name
    numbers = {field.name for field in dataclasses.fields(ApiConfig) if field.type in (int, float)}
    assert set(LIMITS) == numbers


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_have_limits(name: str) -> None:
    low, high = LIMITS[name]
    kind = next(field.type for field in dataclasses.fields(ApiConfig) if field.name == name)
    for value in (low, high):
        read_config({PREFIX + name.upper(): str(kind(value))})  # type: ignore[operator]
    for value in ((low - 1), (high + 1)):
        with pytest.raises(SettingError, match=PREFIX + name.upper()):
            read_config({PREFIX + name.upper(): str(kind(value))})  # type: ignore[operator]
    with pytest.raises(SettingError, match=PREFIX + name.upper()):
        read_config({PREFIX + name.upper(): "nan" if kind is float else "many"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ENGINES", " , "),
        ("HOST", " "),
        ("LOG_LEVEL", "loud"),
        ("REDIS_URL", "http://x"),
        ("REDIS_URL", "localhost:6379"),
        ("REDIS_READER_URL", "rediss://x"),
        ("REDDIS_URL", "redis://x"),
        ("SNAPSHOT_DISK_DIR", "states"),  # for what a store loses, and there is none
    ],
)
def test_bad_values_are_named(variable: str, value: str) -> None:
    with pytest.raises(SettingError, match=PREFIX + variable):
        read_config({PREFIX + variable: value})


def test_good_values() -> None:
    config = read_config({PREFIX + "ENGINES": "a:1, b:2,", PREFIX + "REDIS_URL": "rediss://u:p@h:1/2", "OTHER": "x"})
    assert config.engine_addresses == ("a:1", "b:2")
    assert read_config({PREFIX + "REDIS_URL": "embedded"}).redis_url == "embedded"
    assert read_config({PREFIX + "REDIS_URL": "embedded", PREFIX + "SNAPSHOT_DISK_DIR": "x"}).snapshot_disk_dir == "x"
    assert read_config({PREFIX + "CORS_ORIGINS": "*"}).cors_origin_list == ("*",)


def test_secrets_are_not_shown() -> None:
    config = ApiConfig(api_key="hush", redis_url="redis://:hush@h", redis_reader_url="redis://reader:hush@h")
    assert "hush" not in describe(config, SECRET)
    assert "hush" in describe(config), "the check above cannot fail"


def test_api_key(tmp_path: Path) -> None:
    assert ApiConfig().read_api_key() == ""
    assert ApiConfig(api_key="k").read_api_key() == "k"
    with pytest.raises(SettingError, match="both"):
        ApiConfig(api_key="k", api_key_file="f")
    with pytest.raises(SettingError, match="cannot read"):
        ApiConfig(api_key_file=str(tmp_path / "none")).read_api_key()
    (tmp_path / "key").write_text("\nsecond")
    with pytest.raises(SettingError, match="empty"):
        ApiConfig(api_key_file=str(tmp_path / "key")).read_api_key()
