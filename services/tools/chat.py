"""`thimble chat`: a conversation in the terminal with any OpenAI-compatible server, first of all our api.

Owns the terminal and one conversation. Uses nothing but the standard library, so that it starts at once.
"""

import argparse
import contextlib
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from services.tools.amounts import count, nothing_or_more, whole
from services.tools.completions import Server, ServerError

STOPPED = "you"  # as the reason why an answer ended
INTERRUPTED = 130
DIM, PLAIN = "\033[2m", "\033[0m"
HELP = "/new starts over, /think switches thinking on and off, /quit (or Ctrl-D) ends; Ctrl-C stops an answer"


@dataclass
class Answer:
    """What streamed in. Tokens are the server's counts, 0 where it sent none; times are seconds on our clock."""

    content: str = ""
    thinking: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def summary(self) -> str:
        decode_s = self.total_s - self.first_token_s
        speed = (
            f"{(self.completion_tokens - 1) / decode_s:.1f} tok/s, " if self.completion_tokens > 1 and decode_s else ""
        )
        cached = f"{self.cached_tokens} of {self.prompt_tokens} prompt tokens from a snapshot"
        ending = "" if self.finish_reason in ("stop", "") else f", ended by {self.finish_reason}"
        return f"{speed}{self.completion_tokens} tokens, first after {self.first_token_s:.2f} s, {cached}{ending}"


@dataclass
class Conversation:
    server: Server
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, text: str, show: "Screen") -> Answer:
        """Send one user turn, show the answer as it comes and keep both. Interrupted, it keeps what has come."""
        answer = Answer()
        turn = [*self.messages, {"role": "user", "content": text}]
        started = time.monotonic()
        try:
            for chunk in self.server.stream({"model": self.model, "messages": turn} | self.options):
                self._take(chunk, answer, show, started)
        except KeyboardInterrupt:
            answer.finish_reason = STOPPED
        finally:
            show.end()
        answer.total_s = time.monotonic() - started
        self.messages = [*turn, {"role": "assistant", "content": answer.content}]
        return answer

    def _take(self, chunk: dict[str, Any], answer: Answer, show: "Screen", started: float) -> None:
        for choice in chunk.get("choices", []):
            delta = choice.get("delta", {})
            thought, said = delta.get("reasoning_content") or "", delta.get("content") or ""
            if (thought or said) and not answer.first_token_s:
                answer.first_token_s = time.monotonic() - started
            show.thinking(thought)
            show.saying(said)
            answer.thinking += thought
            answer.content += said
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        if usage := chunk.get("usage"):
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.completion_tokens = usage["completion_tokens"]
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Screen:
    """Writes as it comes; thinking is dimmed on a terminal and put in brackets elsewhere."""

    def __init__(self, colour: bool) -> None:
        self._before, self._after = (DIM, PLAIN) if colour else ("[", "]")
        self._thinking = False
        self._written = False

    def thinking(self, text: str) -> None:
        if text and not self._thinking:
            text, self._thinking = self._before + text, True
        self._write(text)

    def saying(self, text: str) -> None:
        if text:
            self._stop_thinking()
        self._write(text)

    def end(self) -> None:
        self._stop_thinking()
        if self._written:
            self._write("\n")
        self._written = False

    def note(self, text: str) -> None:
        print(f"{self._before}{text}{self._after}", flush=True)

    def _stop_thinking(self) -> None:
        if self._thinking:
            self._write(self._after + "\n")
        self._thinking = False

    def _write(self, text: str) -> None:
        if text:
            self._written = True
            print(text, end="", flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", help="ask this, print the answer and end")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="model id (default: the server's first)")
    parser.add_argument("--think", action="store_true", help="use the model's -think id: it reasons first")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--temperature", type=nothing_or_more, help="0 is greedy (default: the model's own)")
    parser.add_argument("--max-tokens", type=whole, help="longest answer")
    parser.add_argument("--seed", type=count, help="same seed, same answer")


def run(args: argparse.Namespace) -> int:
    server = Server(args.url)
    model = _model(args.model or server.models()[0], args.think)
    wanted = {"temperature": args.temperature, "max_tokens": args.max_tokens, "seed": args.seed}
    options = {name: value for name, value in wanted.items() if value is not None}
    opening = [{"role": "system", "content": args.system}] if args.system else []
    talk = Conversation(server, model, options, list(opening))
    screen = Screen(colour=sys.stdout.isatty())
    if args.message is not None:
        answer = talk.ask(args.message, screen)
        screen.note(answer.summary())
        return INTERRUPTED if answer.finish_reason == STOPPED else 0
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives `input` line editing and a history
    screen.note(f"{model} at {args.url}. {HELP}")
    while (text := _line()) is not None:
        if text == "/new":
            talk.messages = list(opening)
        elif text == "/think":
            talk.model = _model(talk.model.removesuffix("-think"), not talk.model.endswith("-think"))
            screen.note(f"now {talk.model}")
        elif text.startswith("/"):
            screen.note(HELP)
        elif text:
            try:
                screen.note(talk.ask(text, screen).summary())
            except ServerError as error:
                screen.note(str(error))
    return 0


def _model(name: str, think: bool) -> str:
    return name if not think or name.endswith("-think") else f"{name}-think"


def _line() -> str | None:
    """The next line typed, without spaces around it; None at the end of the conversation."""
    try:
        text = input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text == "/quit" else text
