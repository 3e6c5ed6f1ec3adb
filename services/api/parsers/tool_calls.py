"""Tool calls in the model's XML form to OpenAI's, as they are written:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Owns the recognition of calls and the text around them; values.py turns a parameter's text into JSON. A string argument
is passed on while it is being written, any other when it is complete. An end tag counts only where the next tag
follows, so that an argument may quote the format itself. A call that breaks off with the token limit stays incomplete
JSON, so that no client runs half of it; one that the model ends itself is closed.
"""

import enum
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.api.parsers.holding import held_length, trailing_space
from services.api.parsers.values import dump, is_plain_string, resolved, to_json

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_AFTER_VALUE = (PARAMETER, END_FUNCTION, END_CALL)
_VALUE_END = re.compile(
    rf"\n?{END_PARAMETER}\s*(?={PARAMETER}|{END_FUNCTION}|{END_CALL})|\n?(?={END_FUNCTION}\s*{END_CALL})"
)
_LAST_VALUE_END = re.compile(rf"\n?(?:{END_PARAMETER}|{END_FUNCTION})\s*\Z")


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of call `index`'s arguments."""

    index: int
    json: str


Event = Text | CallStart | CallArguments


class _Place(enum.Enum):
    TEXT = enum.auto()
    OPENED = enum.auto()  # behind <tool_call>
    PARAMETERS = enum.auto()  # inside <function=...>, between parameters
    VALUE = enum.auto()
    CLOSING = enum.auto()  # behind </function>
    UNKNOWN = enum.auto()  # a block of another form: decided at its end


class ToolCallParser:
    """`parameters` maps a tool's name to the JSON schema of its parameters."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = parameters
        self._place = _Place.TEXT
        self._buffer = ""
        self._out: list[Event] = []
        self._calls = 0
        self._name = ""
        self._key = ""
        self._keys = 0  # of the call under way
        self._value: list[str] = []

    @property
    def calls(self) -> int:
        return self._calls

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        steps = {
            _Place.TEXT: self._text,
            _Place.OPENED: self._opened,
            _Place.PARAMETERS: self._parameters,
            _Place.VALUE: self._inside_value,
            _Place.CLOSING: self._closing,
            _Place.UNKNOWN: self._unknown,
        }
        while self._buffer and steps[self._place]():
            pass
        return self._drain()

    def finish(self, cut: bool) -> list[Event]:
        """The text ends; `cut`: by the token limit, not by the model."""
        rest, self._buffer = self._buffer, ""
        if self._place is _Place.TEXT:
            if not self._calls or rest.strip():
                self._say(rest)
        elif self._place in (_Place.OPENED, _Place.UNKNOWN):
            if not (cut and _begins_function(rest.lstrip())):
                self._whole_block(rest, "")
        elif not cut and self._place is _Place.VALUE:
            self._grow_value(_LAST_VALUE_END.sub("", rest))
            self._end_value()
            self._argue("}")
        elif not cut and self._place is _Place.PARAMETERS:
            self._argue("}" if self._keys else "{}")
        return self._drain()

    # Each step looks at the buffer's beginning and returns whether it used some of it; if not, more text is needed.

    def _text(self) -> bool:
        before, found, after = self._buffer.partition(CALL)
        if found:
            self._say(before.rstrip())
            self._buffer, self._place = after, _Place.OPENED
            return True
        ready = len(before) - held_length(before, (CALL,))
        ready -= trailing_space(before[:ready])
        self._say(before[:ready])
        self._buffer = before[ready:]
        return False

    def _opened(self) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith(FUNCTION):
            name, found, after = begun[len(FUNCTION) :].partition(">")
            if not found:
                return False
            self._start_call(name.strip())
            self._buffer, self._place = after, _Place.PARAMETERS
            return True
        if FUNCTION.startswith(begun):
            return False
        self._place = _Place.UNKNOWN
        return True

    def _parameters(self) -> bool:
        begun = self._buffer = self._buffer.lstrip()
        if begun.startswith(PARAMETER):
            key, found, after = begun[len(PARAMETER) :].partition(">")
            if not found:
                return False
            # The newline behind the tag belongs to the form, not to the value; it may not have come yet.
            if not after:
                return False
            self._buffer, self._place = after.removeprefix("\n"), _Place.VALUE
            self._begin_value(key.strip())
            return True
        for tag, place in ((END_FUNCTION, _Place.CLOSING), (END_CALL, _Place.TEXT)):
            if begun.startswith(tag):
                self._argue("}" if self._keys else "{}")
                self._buffer, self._place = begun[len(tag) :], place
                return True
        if any(tag.startswith(begun) for tag in _AFTER_VALUE):
            return False
        self._buffer = begun[1:] if begun[:1] == "<" else begun[begun.find("<") :] if "<" in begun else ""
        return bool(self._buffer)

    def _inside_value(self) -> bool:
        end = _VALUE_END.search(self._buffer)
        if end:
            self._grow_value(self._buffer[: end.start()])
            self._end_value()
            self._buffer, self._place = self._buffer[end.end() :], _Place.PARAMETERS
            return True
        ready = next((at for at in _places(self._buffer, "<") if _may_end_value(self._buffer[at:])), len(self._buffer))
        ready -= self._buffer[:ready].endswith("\n")
        self._grow_value(self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _closing(self) -> bool:
        begun = self._buffer.lstrip()
        if begun.startswith(END_CALL):
            self._buffer, self._place = begun[len(END_CALL) :], _Place.TEXT
            return True
        if begun.startswith(FUNCTION):
            self._place = _Place.OPENED
            return True
        if END_CALL.startswith(begun) or FUNCTION.startswith(begun):
            return False
        self._place = _Place.TEXT
        return True

    def _unknown(self) -> bool:
        block, found, after = self._buffer.partition(END_CALL)
        if not found:
            return False
        self._buffer, self._place = after, _Place.TEXT
        self._whole_block(block, END_CALL)
        return True

    def _whole_block(self, block: str, end: str) -> None:
        """A block without <function=...>: a call as JSON, which some models write, or just text."""
        try:
            call = json.loads(block)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            self._say(CALL + block + end)
            return
        self._start_call(str(name))
        self._argue(arguments if isinstance(arguments, str) else dump(arguments))

    def _start_call(self, name: str) -> None:
        self._name, self._keys = name, 0
        self._out.append(CallStart(self._calls, f"call_{secrets.token_hex(12)}", name))
        self._calls += 1

    def _schema(self) -> Any:
        parameters = self._schemas.get(self._name, {})
        properties = parameters.get("properties")
        return resolved(properties.get(self._key), parameters) if isinstance(properties, Mapping) else None

    def _begin_value(self, key: str) -> None:
        self._key, self._value = key, []
        self._argue(("," if self._keys else "{") + dump(key) + ":")
        self._keys += 1
        if is_plain_string(self._schema()):
            self._argue('"')

    def _grow_value(self, text: str) -> None:
        if is_plain_string(self._schema()):
            self._argue(dump(text)[1:-1])
        else:
            self._value.append(text)

    def _end_value(self) -> None:
        self._argue('"' if is_plain_string(self._schema()) else to_json("".join(self._value), self._schema()))

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Text(text))

    def _argue(self, piece: str) -> None:
        if piece:
            self._out.append(CallArguments(self._calls - 1, piece))

    def _drain(self) -> list[Event]:
        out, self._out = self._out, []
        return out


def _places(text: str, letter: str) -> list[int]:
    return [at for at, one in enumerate(text) if one == letter]


def _begins_function(rest: str) -> bool:
    return FUNCTION.startswith(rest) or rest.startswith(FUNCTION)


def _may_end_value(rest: str) -> bool:
    """Whether more text could make `rest` the end of a value."""
    if END_PARAMETER.startswith(rest) or END_FUNCTION.startswith(rest):
        return True
    if rest.startswith(END_PARAMETER):
        tail = rest[len(END_PARAMETER) :].lstrip()
        return any(tag.startswith(tail) for tag in _AFTER_VALUE)
    if rest.startswith(END_FUNCTION):
        return END_CALL.startswith(rest[len(END_FUNCTION) :].lstrip())
    return False
