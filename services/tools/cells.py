"""The cells of a benchmark whose run may be limited: which are done, by this run or an earlier one, and which there is
time for. Owns the file that remembers them; what a cell is and how long it takes is the benchmark's.
"""

import json
import time
from pathlib import Path

from services.tools import figures

Value = str | int | float | bool


class Cells:
    """`minutes` from now; None: as long as it takes. `path`: what was done is read from there and added there, one cell
    a line; None: nothing is remembered. A cell that another commit measured is not done."""

    def __init__(self, minutes: float | None, path: Path | None) -> None:
        self.until = time.monotonic() + 60 * minutes if minutes else float("inf")
        self.path, self._commit = path, figures.commit()
        self._found: dict[str, float] = {}
        for line in path.read_text().splitlines() if path and path.exists() else []:
            key, value = json.loads(line)
            self._found[json.dumps(key)] = float(value)

    def done(self, *cell: Value) -> float | None:
        """What `finish` was given for the cell; None: it is not done."""
        return self._found.get(self._key(cell))

    def finish(self, *cell: Value, value: float = 0.0) -> None:
        self._found[self._key(cell)] = value
        if self.path:
            with self.path.open("a") as file:
                file.write(f"[{self._key(cell)}, {json.dumps(value)}]\n")

    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def fits(self, name: str, needed_s: float) -> bool:
        """Whether what takes so long will be done in time if it is begun now. Says so if not."""
        if needed_s <= self.left_s():
            return True
        print(f"{name} left out: it may take {needed_s:.0f} s, and {self.left_s():.0f} s are left", flush=True)
        return False

    def _key(self, cell: tuple[Value, ...]) -> str:
        return json.dumps([self._commit, *cell])
