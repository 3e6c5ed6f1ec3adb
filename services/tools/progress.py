"""How far a long piece of work is: a line that rewrites itself on a terminal, a line every few seconds elsewhere."""

import sys
import time
from typing import TextIO

_EVERY_S = {True: 0.2, False: 10.0}


class Progress:
    """Counts bytes. `done_bytes` at the start are those of an earlier run and do not count for the speed."""

    def __init__(self, what: str, total_bytes: int, done_bytes: int = 0, stream: TextIO | None = None) -> None:
        self._what, self._total, self._first = what, total_bytes, done_bytes
        self._stream = stream or sys.stderr
        self._terminal = self._stream.isatty()
        self._start = self._last = time.monotonic()
        self._written = False

    def update(self, done_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last < _EVERY_S[self._terminal]:
            return
        self._last = now
        speed = (done_bytes - self._first) / (now - self._start)
        left = f"{(self._total - done_bytes) / speed:.0f} s left" if speed > 0 else "no speed yet"
        line = f"{self._what}: {done_bytes / 1e9:.2f} of {self._total / 1e9:.2f} GB, {speed / 1e6:.0f} MB/s, {left}"
        print(f"\r\033[K{line}" if self._terminal else line, end="" if self._terminal else "\n", file=self._stream)
        self._stream.flush()
        self._written = True

    def close(self) -> None:
        if self._written and self._terminal:
            print(file=self._stream)
