"""`thimble settings`: every setting of both services with its default, unit and sentence, as .env.example lists them.

Owns the listing; the settings themselves are in each service's config.py.
"""

import argparse
import dataclasses
import textwrap
from typing import Any

from services.api import config as api
from services.engine import config as engine

WIDTH = 118


def listing() -> str:
    """Commented lines `#VARIABLE=default`, each under its sentence; a line without # sets the variable."""
    sections = [
        _section("The engine", engine.PREFIX, engine.EngineConfig),
        _section("The api", api.PREFIX, api.ApiConfig),
    ]
    return "\n".join(sections)


def _section(title: str, prefix: str, config: type[Any]) -> str:
    lines = [f"# {title}: {prefix}*", ""]
    for field in dataclasses.fields(config):
        unit = f" [{field.metadata['unit']}]" if field.metadata["unit"] else ""
        lines += textwrap.wrap(field.metadata["text"] + unit, WIDTH, initial_indent="# ", subsequent_indent="#   ")
        value = str(field.default).lower() if isinstance(field.default, bool) else field.default
        lines += [f"#{prefix}{field.name.upper()}={value}", ""]
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # there is nothing to choose


def run(args: argparse.Namespace) -> int:
    del args
    print(listing(), end="")
    return 0
