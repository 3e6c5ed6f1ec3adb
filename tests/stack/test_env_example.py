""".env.example names every setting with its true default, and the compose file asks for none that is not in it."""

import dataclasses
import re
from pathlib import Path

from services.api.config import ApiConfig
from services.api.config import read_config as read_api_config
from services.engine.config import EngineConfig
from services.engine.config import read_config as read_engine_config
from services.tools.settings import listing

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / ".env.example").read_text()
COMPOSE = (ROOT / "docker-compose.yml").read_text()


def assignments(text: str) -> dict[str, str]:
    """Both kinds of line: set, and shown as a default."""
    return dict(re.findall(r"^#?([A-Z_]+)=(.*)$", text, re.MULTILINE))


def test_the_listing_is_fresh() -> None:
    assert EXAMPLE.endswith(listing()), "copy the output of `thimble settings` to the end of .env.example"


def test_every_default_is_true_and_valid() -> None:
    values = assignments(EXAMPLE)
    assert read_engine_config(values) == EngineConfig()
    assert read_api_config(values) == ApiConfig()


def test_every_setting_has_a_sentence() -> None:
    for config in (EngineConfig, ApiConfig):
        for field in dataclasses.fields(config):
            assert len(field.metadata["text"].split()) >= 2, field.name


def undocumented(compose: str, example: str) -> set[str]:
    asked = dict(re.findall(r"\$\{([A-Z_]+):-([^}]*)\}", compose))
    shown = assignments(example)
    return {name for name, default in asked.items() if shown.get(name) != default}


def test_compose_asks_for_nothing_else() -> None:
    assert undocumented(COMPOSE, EXAMPLE) == set()
    known = set(assignments(EXAMPLE)) - {"COMPOSE_PROFILES"}
    assert {
        name for name in known if name not in COMPOSE and not name.startswith(("THIMBLE_ENGINE_", "THIMBLE_API_"))
    } == set()
    assert re.findall(r"\$\{[^}]*\}", COMPOSE) == re.findall(r"\$\{[A-Z_]+:-[^}]*\}", COMPOSE), (
        "every variable has a default"
    )


def test_the_compose_check_can_fail() -> None:
    assert undocumented("image: ${A_NEW_ONE:-x}", EXAMPLE) == {"A_NEW_ONE"}
    assert undocumented("port: ${THIMBLE_PORT:-9999}", EXAMPLE) == {"THIMBLE_PORT"}
