"""Drawings that are there to be learnt from, on the GPU, the oldest replaced by new ones as they come: what is learnt
from does not wait for what draws. Owns that memory.
"""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.tools.train_vision.batches import Batch
from services.tools.train_vision.lessons import LESSONS

_WAITING = 64  # batches


class Pool:
    """Room for each lesson by its share. `put` and `take` are of one thread."""

    def __init__(self, drawings: int, device: str) -> None:
        shares = np.array([lesson.share for lesson in LESSONS])
        self._room = np.maximum(1, (drawings * shares / shares.sum()).astype(int))
        self._base = np.concatenate(([0], np.cumsum(self._room)))
        self._drawn = np.zeros(len(LESSONS), int)
        self._device = device
        self._tensors: list[Tensor] = []
        self._random = np.random.default_rng(0)
        self.taken = 0

    @property
    def drawn(self) -> int:
        return int(self._drawn.sum())

    def put(self, batch: Batch) -> None:
        if not self._tensors:
            size = int(self._base[-1])
            self._tensors = [
                torch.zeros(size, *part.shape[1:], dtype=part.dtype, device=self._device) for part in batch.tensors()
            ]
        slots = []
        for lesson in batch.lessons.tolist():
            slots.append(self._base[lesson] + self._drawn[lesson] % self._room[lesson])
            self._drawn[lesson] += 1
        at = self._moved(np.array(slots))
        for kept, part in zip(self._tensors, batch.to(self._device).tensors(), strict=True):
            kept.index_copy_(0, at, part)

    def take(self, count: int, weights: Sequence[float]) -> Batch:
        """Any so many, of each lesson as likely as its weight says, of those with something drawn."""
        there = np.minimum(self._drawn, self._room)
        chances = np.where(there > 0, np.asarray(weights), 0.0)
        chances = chances if chances.sum() else np.where(there > 0, 1.0, 0.0)
        lessons = self._random.choice(len(LESSONS), count, p=chances / chances.sum())
        rows = self._base[lessons] + (self._random.random(count) * there[lessons]).astype(int)
        at = self._moved(rows)
        self.taken += count
        return Batch(*(kept[at] for kept in self._tensors))

    def _moved(self, rows: npt.NDArray[np.int_]) -> Tensor:
        """To the device, without waiting for what it is doing."""
        found = torch.from_numpy(rows)
        return found.pin_memory().to(self._device, non_blocking=True) if self._device.startswith("cuda") else found


class Feed:
    """Batches out of an iterable, fetched by a thread of its own."""

    def __init__(self, batches: Iterable[Batch], pin: bool) -> None:
        self._ready: queue.Queue[Batch | Exception] = queue.Queue(_WAITING)
        self._stopped, self._pin = threading.Event(), pin
        self.pinning = threading.Lock()  # held by who does not want memory to be pinned meanwhile
        # Begun here: processes that draw are not to be forked by a thread beside others.
        self._thread = threading.Thread(target=self._fetch, args=(iter(batches),), daemon=True)
        self._thread.start()

    def next(self, wait: bool) -> Batch | None:
        """None if none is there yet, unless `wait`. Raises what drawing raised."""
        try:
            found = self._ready.get(wait, 300 if wait else None)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(10)

    def _fetch(self, batches: Iterator[Batch]) -> None:
        try:
            for batch in batches:
                with self.pinning:
                    ready = Batch(*(part.pin_memory() for part in batch.tensors())) if self._pin else batch
                while not self._stopped.is_set():
                    try:
                        self._ready.put(ready, timeout=0.5)
                        break
                    except queue.Full:
                        continue
                if self._stopped.is_set():
                    return
        except Exception as error:  # raised where the batches are used
            self._ready.put(error)
