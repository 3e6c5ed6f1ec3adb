"""Stop strings: finds the one that is complete first, across any cut of the text, and lets none of it out."""

from collections.abc import Sequence

from services.api.parsers.holding import held_length


class StopStrings:
    """`hit` is the stop string that was found; from then on all text is dropped."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._buffer = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that can no longer become part of a stop string."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return text
        self._buffer += text
        found = [(self._buffer.find(stop), stop) for stop in self._stops if stop in self._buffer]
        if found:
            # The first to be complete, so that the cut of the text cannot matter; of several, the longest.
            at, self.hit = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))
            out, self._buffer = self._buffer[:at], ""
            return out
        ready = len(self._buffer) - held_length(self._buffer, self._stops)
        out, self._buffer = self._buffer[:ready], self._buffer[ready:]
        return out

    def finish(self) -> str:
        """What was held back when the text ends without a stop string."""
        out, self._buffer = self._buffer, ""
        return out
