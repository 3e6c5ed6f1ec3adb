"""Traces of the demo model's routing, recorded once a test module."""

from pathlib import Path

from services.engine.experts.store import Store
from services.tools.record import record


def recorded(store: Store, folder: Path, slots: int = 107, dialogs: int = 5) -> list[Path]:
    """With room for a quarter of the experts and nothing read ahead."""
    return record(store, folder, slots=slots, answer_tokens=24, dialogs=dialogs)
