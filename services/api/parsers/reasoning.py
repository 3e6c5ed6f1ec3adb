"""Splits thinking from the answer. Owns `<think>` and `</think>` in the model's output and the white space around them.

A prompt that ends inside the think block makes the output begin there. A `<tool_call>` ends thinking too: the model
sometimes forgets `</think>` before it, and the call would be lost.
"""

import enum

from services.api.parsers.holding import held_length, trailing_space

OPEN = "<think>"
CLOSE = "</think>"
CALL = "<tool_call>"


class _Place(enum.Enum):
    BEFORE = enum.auto()  # nothing but white space so far, outside the think block
    THINKING = enum.auto()
    AFTER = enum.auto()  # just behind `</think>`: white space is dropped
    ANSWER = enum.auto()


class ReasoningParser:
    """`feed` and `finish` return (reasoning, answer): the text of each kind that is certain now."""

    def __init__(self, starts_thinking: bool, calls_end_thinking: bool) -> None:
        self._place = _Place.THINKING if starts_thinking else _Place.BEFORE
        self._enders = (CLOSE, CALL) if calls_end_thinking else (CLOSE,)
        self._buffer = ""
        self._thought = False  # some reasoning is out: white space at its beginning is dropped

    @property
    def thinking(self) -> bool:
        return self._place is _Place.THINKING

    def feed(self, text: str) -> tuple[str, str]:
        self._buffer += text
        reasoning = ""
        if self._place is _Place.BEFORE:
            self._leave_before()
        if self._place is _Place.THINKING:
            reasoning = self._think()
        if self._place is _Place.AFTER:
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._place = _Place.ANSWER
        return reasoning, self._take() if self._place is _Place.ANSWER else ""

    def finish(self) -> tuple[str, str]:
        """The text ends: what was held back. A think block that was never closed is all reasoning."""
        if self._place is _Place.THINKING:
            out = self._take().rstrip()
            return (out if self._thought else out.lstrip()), ""
        return "", self._take() if self._place in (_Place.BEFORE, _Place.ANSWER) else ""

    def _leave_before(self) -> None:
        begun = self._buffer.lstrip()
        if begun.startswith(OPEN):
            self._buffer = begun[len(OPEN) :]
            self._place = _Place.THINKING
        elif not OPEN.startswith(begun):
            self._place = _Place.ANSWER

    def _think(self) -> str:
        if not self._thought:
            self._buffer = self._buffer.lstrip()
        found = [(self._buffer.find(ender), ender) for ender in self._enders if ender in self._buffer]
        if found:
            at, ender = min(found)
            out = self._buffer[:at].rstrip()
            self._buffer = self._buffer[at + (len(ender) if ender == CLOSE else 0) :]
            self._place = _Place.AFTER
        else:
            ready = len(self._buffer) - held_length(self._buffer, self._enders)
            ready -= trailing_space(self._buffer[:ready])
            out, self._buffer = self._buffer[:ready], self._buffer[ready:]
        self._thought = self._thought or bool(out)
        return out

    def _take(self) -> str:
        out, self._buffer = self._buffer, ""
        return out
