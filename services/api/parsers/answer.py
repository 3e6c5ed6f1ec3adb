"""The model's output as a client sees it: thinking, content, tool calls. Owns the order of the parsers; stop strings
are looked for in content only, so that they cannot cut thinking or an argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api.parsers.reasoning import ReasoningParser
from services.api.parsers.stops import StopStrings
from services.api.parsers.tool_calls import CallArguments, CallStart, Text, ToolCallParser


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class Content:
    text: str


Delta = Reasoning | Content | CallStart | CallArguments


class AnswerParser:
    """`tools` maps names to parameter schemas; None: calls are not looked for."""

    def __init__(
        self, starts_thinking: bool, tools: Mapping[str, Mapping[str, Any]] | None, stops: Sequence[str]
    ) -> None:
        self._reasoning = ReasoningParser(starts_thinking, calls_end_thinking=tools is not None)
        self._calls = None if tools is None else ToolCallParser(tools)
        self._stops = StopStrings(stops)

    @property
    def thinking(self) -> bool:
        return self._reasoning.thinking

    @property
    def stop_string(self) -> str | None:
        """The one that was found."""
        return self._stops.hit

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more will come out."""
        return self._stops.hit is not None

    @property
    def calls(self) -> int:
        return self._calls.calls if self._calls else 0

    def feed(self, text: str) -> list[Delta]:
        if self.stopped:
            return []
        reasoning, answer = self._reasoning.feed(text)
        return self._deltas(reasoning, self._calls.feed(answer) if self._calls else [Text(answer)])

    def finish(self, cut: bool) -> list[Delta]:
        """The output ends; `cut`: by the token limit."""
        if self.stopped:
            return []
        reasoning, answer = self._reasoning.finish()
        events = [*self._calls.feed(answer), *self._calls.finish(cut)] if self._calls else [Text(answer)]
        deltas = self._deltas(reasoning, events)
        rest = self._stops.finish()
        return [*deltas, Content(rest)] if rest else deltas

    def _deltas(self, reasoning: str, events: Sequence[Text | CallStart | CallArguments]) -> list[Delta]:
        out: list[Delta] = [Reasoning(reasoning)] if reasoning else []
        for event in events:
            if self.stopped:
                break
            if not isinstance(event, Text):
                out.append(event)
            elif text := self._stops.feed(event.text):
                out.append(Content(text))
        return out


class TextParser:
    """Output that is text and nothing else, as AnswerParser gives it: only stop strings are looked for."""

    thinking = False
    calls = 0

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = StopStrings(stops)

    @property
    def stop_string(self) -> str | None:
        """The one that was found."""
        return self._stops.hit

    @property
    def stopped(self) -> bool:
        return self._stops.hit is not None

    def feed(self, text: str) -> list[Delta]:
        ready = self._stops.feed(text)
        return [Content(ready)] if ready else []

    def finish(self, cut: bool) -> list[Delta]:
        rest = self._stops.finish()
        return [Content(rest)] if rest else []
