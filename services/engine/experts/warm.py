"""Which experts were in RAM and how hot each was, kept over a restart. Owns the file: written whole or not at all,
refused if it is damaged or of another model. Losing it costs a slow first reply, so nothing here is ever an error.

    {"format": "thimble-warm", "version": 2, "fingerprint": ..., "count": ..., "xxh64": ...}\n   then int32 keys,
    layer * experts + expert, the longest unused first, and uint32 heat of all blocks (kernels/experts/host/heat.h)
"""

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
Heat = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Warm:
    """What a cache held, the longest unused first, and the heat of every block of the model, held or not; of a cache
    that is cold both are empty."""

    keys: Keys = field(default_factory=lambda: np.empty(0, np.int32))
    heat: Heat = field(default_factory=lambda: np.empty(0, np.uint32))


class WarmSet:
    """The file of one model. `blocks` is the number of its experts in all layers."""

    def __init__(self, path: Path, fingerprint: str, blocks: int) -> None:
        self.path = path
        self._fingerprint, self._blocks = fingerprint, blocks
        self._saved: bytes | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def load(self) -> Warm:
        """What was in RAM; empty if nothing is known of it."""
        nothing = Warm()
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
            known = parse_json(head)
            words = np.frombuffer(body, "<u4")
            expected = self._head(body)
        except FileNotFoundError:
            return nothing
        except (OSError, ValueError) as error:
            log.warning("%s cannot be used, the expert cache starts empty: %s", self.path, error)
            return nothing
        count = max(0, len(words) - self._blocks)
        keys, heat = words[:count].astype(np.int32), words[count:].astype(np.uint32)
        if known != expected or len(np.unique(keys)) != len(keys) or ((keys < 0) | (keys >= self._blocks)).any():
            log.warning("%s is damaged, of another model or version: the expert cache starts empty", self.path)
            return nothing
        return Warm(keys, heat)

    def save(self, warm: Warm) -> None:
        """Put the file in the place of the old one, unless it says the same. An empty set is not worth saving."""
        keys = warm.keys[warm.keys < self._blocks]  # a cache may hold other blocks behind these
        body = keys.astype("<i4").tobytes() + warm.heat[: self._blocks].astype("<u4").tobytes()
        if body == self._saved or not len(keys):
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

    def keep(self, now: Callable[[], Warm], every_s: float = SAVE_S) -> None:
        """Save what `now` says from time to time, on a thread of its own, until `close`."""

        def saving() -> None:
            while not self._stop.wait(every_s):
                self.save(now())

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
            "version": 2,
            "fingerprint": self._fingerprint,
            "count": len(body) // 4 - self._blocks,
            "xxh64": xxhash.xxh64_hexdigest(body),
        }
