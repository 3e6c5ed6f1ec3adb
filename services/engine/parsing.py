"""JSON in files of others. Owns that every way in which it can be wrong is one exception."""

import json
from collections.abc import Callable
from typing import Any


def parse_json(text: str | bytes, pairs: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """As json.loads; `pairs` makes the objects. Raises ValueError, also for what is nested too deeply to be read."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
