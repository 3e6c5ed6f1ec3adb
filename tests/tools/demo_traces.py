"""Traces of the demo model's routing, recorded once a test module."""

from pathlib import Path

from services.engine.experts.store import Store
from services.tools.record import record


def recorded(store: Store, folder: Path, slots: int | None = None, dialogs: int = 5) -> list[Path]:
    """With room for 24 % of the experts and nothing read ahead."""
    slots = int(0.24 * sum(map(len, store.blocks))) if slots is None else slots
    return record(store, folder, slots=slots, answer_tokens=24, dialogs=dialogs)
