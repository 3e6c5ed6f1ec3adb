"""Which experts were in RAM, kept over a restart. Owns the file: written whole or not at all, refused if it is damaged
or of another model. Losing it costs a slow first reply, so nothing here is ever an error.

    {"format": "thimble-warm", "version": 1, "fingerprint": ..., "count": ..., "xxh64": ...}\n   then int32 keys,
    layer * experts + expert, the longest unused first
"""

import json
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from services.engine.parsing import parse_json

log = logging.getLogger(__name__)

NAME = "warm.experts"
OFF = "-"  # instead of a folder: nothing is kept
SAVE_S = 120.0  # between two saves while something changes
Keys = npt.NDArray[np.int32]


class WarmSet:
    """The file of one model. `blocks` is the number of its experts in all layers."""

    def __init__(self, path: Path, fingerprint: str, blocks: int) -> None:
        self.path = path
        self._fingerprint, self._blocks = fingerprint, blocks
        self._saved: bytes | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def load(self) -> Keys:
        """What was in RAM; empty if nothing is known of it."""
        nothing = np.empty(0, np.int32)
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
            known = parse_json(head)
            keys = np.frombuffer(body, "<i4").astype(np.int32)
            expected = self._head(body)
        except FileNotFoundError:
            return nothing
        except (OSError, ValueError) as error:
            log.warning("%s cannot be used, the expert cache starts empty: %s", self.path, error)
            return nothing
        if known != expected or len(np.unique(keys)) != len(keys) or ((keys < 0) | (keys >= self._blocks)).any():
            log.warning("%s is damaged or of another model, the expert cache starts empty", self.path)
            return nothing
        return keys

    def save(self, keys: Keys) -> None:
        """Put the file in the place of the old one, unless it says the same. An empty set is not worth saving."""
        body = keys.astype("<i4").tobytes()
        if body == self._saved or not body:
            return
        beside = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with beside.open("wb") as file:
                file.write(json.dumps(self._head(body)).encode() + b"\n" + body)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(self.path)
        except OSError as error:
            if self._saved is None:  # said once
                log.warning("the next start will be cold: %s cannot be written: %s", self.path, error.strerror)
            beside.unlink(missing_ok=True)
        self._saved = body

    def keep(self, resident: Callable[[], Keys], every_s: float = SAVE_S) -> None:
        """Save what `resident` says from time to time, on a thread of its own, until `close`."""

        def saving() -> None:
            while not self._stop.wait(every_s):
                self.save(resident())

        self._thread = threading.Thread(target=saving, name="warm set", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; a save under way is finished."""
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _head(self, body: bytes) -> dict[str, object]:
        return {
            "format": "thimble-warm",
            "version": 1,
            "fingerprint": self._fingerprint,
            "count": len(body) // 4,
            "xxh64": xxhash.xxh64_hexdigest(body),
        }
