"""Settings of a service: one frozen dataclass, read once from the environment, printed once at start.

Owns how a field becomes a variable and how a bad value is reported; the fields themselves are in each service's
config.py. An unknown variable with the service's prefix is an error, so that a typing mistake is never ignored.
"""

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

T = TypeVar("T")


class SettingError(ValueError):
    """A variable that is unknown or has a value that does not fit. The message names it and says what to do."""


def setting(default: Any, unit: str, text: str) -> Any:
    """A dataclass field with its default, unit ("" if none) and the sentence that documents it."""
    return dataclasses.field(default=default, metadata={"unit": unit, "text": text})


def load(cls: type[T], prefix: str, environ: Mapping[str, str], other_prefixes: tuple[str, ...] = ()) -> T:
    """Build `cls` from variables named `prefix` + FIELD. `other_prefixes` belong to other services and are skipped."""
    hints = get_type_hints(cls)
    names = {prefix + field.name.upper(): field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(prefix) or variable.startswith(other_prefixes or ("\0",)):
            continue
        if variable not in names:
            near = difflib.get_close_matches(variable, names, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(names))}"
            raise SettingError(f"unknown setting {variable}{hint}")
        name = names[variable]
        values[name] = _convert(variable, text, hints[name])
    try:
        return cls(**values)
    except SettingError:
        raise
    except ValueError as error:
        raise SettingError(str(error)) from error


def describe(config: Any, secret: frozenset[str] = frozenset()) -> str:
    """One line per setting for the log at start; the values of `secret` fields are hidden."""
    lines = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        shown = "(set)" if field.name in secret and value else repr(value) if isinstance(value, str) else str(value)
        unit = field.metadata.get("unit", "")
        lines.append(f"  {field.name} = {shown}{' ' + unit if unit else ''}")
    return "\n".join(lines)


WANTED: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number", Path: "a folder"}


def _convert(variable: str, text: str, hint: Any) -> Any:
    if not text.strip() and hint is not str:
        raise SettingError(f"{variable} is empty: give {WANTED.get(hint)}, or leave the variable out")
    try:
        if hint is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if hint in (int, float, str, Path):
            return hint(text)
    except (ValueError, KeyError) as error:
        raise SettingError(f"{variable}={text!r} does not fit: give {WANTED[hint]}") from error
    raise TypeError(f"{variable}: settings of type {hint} are not supported")
