"""Clients of every manner at once: steady ones, some that hang up, read slowly, or give up waiting and ask again.

Owns what a client does and what it saw. Every answer that is whole is held against what an idle engine said.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from services.api.retries import RETRY, TIMEOUT

Manner = Literal["steady", "leaves", "slow", "retries"]
HANG_S = 120.0  # without a byte, for a client that waits in a queue of 64
TOKENS = 16  # of an answer, whatever the model would like
PROMPTS = (
    "What is 2 + 3?",
    "Tell me a story about a fox. " * 8,
    "What is the capital of France?",
    "A long list of words: " + " ".join(f"word{n}" for n in range(90)),
    "Repeat after me: yes.",
)


@dataclass(frozen=True)
class Question:
    """`seed` None: greedy."""

    prompt: str
    seed: int | None

    def body(self, user: str, stream: bool) -> dict[str, Any]:
        drawn = {"temperature": 0} if self.seed is None else {"temperature": 1.0, "top_p": 0.95, "seed": self.seed}
        messages = [{"role": "user", "content": self.prompt}]
        fixed = {"model": "demo", "max_tokens": TOKENS, "ignore_eos": True, "logprobs": True}
        return {**fixed, "messages": messages, "user": user, "stream": stream, **drawn}


QUESTIONS = tuple(Question(prompt, seed) for seed in (None, 7) for prompt in PROMPTS)


@dataclass
class Seen:
    """What one client, or all of them, got."""

    answers: int = 0
    tokens: int = 0
    wrong: int = 0
    hangs: int = 0
    refused: int = 0  # 429 with a time to wait
    failures: Counter[str] = field(default_factory=Counter)
    first_token_s: list[float] = field(default_factory=list)
    answer_s: list[float] = field(default_factory=list)

    def add(self, other: "Seen") -> None:
        for name in ("answers", "tokens", "wrong", "hangs", "refused"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures += other.failures
        self.first_token_s += other.first_token_s
        self.answer_s += other.answer_s


def manner_of(number: int, clients: int) -> Manner:
    """Of 16 and more clients every eighth each hangs up, reads slowly, or asks again."""
    others: dict[int, Manner] = {5: "leaves", 6: "slow", 7: "retries"}
    return others.get(number % 8, "steady") if clients >= 16 else "steady"


class Client:
    """Asks one thing after the other until `until` (of time.monotonic)."""

    def __init__(
        self, http: httpx.AsyncClient, number: int, manner: Manner, expected: Mapping[Question, Any], until: float
    ) -> None:
        self.seen, self.manner = Seen(), manner
        self._http, self._number, self._expected, self._until = http, number, expected, until
        self._choose = random.Random(number)

    async def run(self) -> None:
        asked = self._number
        while time.monotonic() < self._until:
            question = QUESTIONS[asked % len(QUESTIONS)]
            asked += 1
            try:
                await (self._ask_again(question) if self.manner == "retries" else self._stream(question))
            except httpx.TimeoutException:
                self.seen.hangs += 1
            except httpx.HTTPError as error:
                self.seen.failures[repr(error)[:80]] += 1

    async def _stream(self, question: Question) -> None:
        body = question.body(f"user{self._number}", stream=True)
        leave_after = self._choose.randrange(1, TOKENS) if self.manner == "leaves" else None
        began, pieces = time.monotonic(), []
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                await self._refused(reply)
                return
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event and event["error"].get("code") == "queue_full":
                    self.seen.refused += 1  # it took the engine so long to say so that the stream had begun
                    return
                if "error" in event:
                    self.seen.failures[f"in mid-stream: {event['error'].get('code')}"] += 1
                    return
                found = [entry for choice in event["choices"] for entry in said(choice)]
                if found and not pieces:
                    self.seen.first_token_s.append(time.monotonic() - began)
                pieces += found
                if time.monotonic() < self._until:
                    self.seen.tokens += len(found)
                if leave_after is not None and len(pieces) >= leave_after:
                    return
                if self.manner == "slow":
                    await asyncio.sleep(0.1)
        self._judge(question, pieces, began)

    async def _ask_again(self, question: Question) -> None:
        """As an official client whose own time limit passes: it leaves, and asks for the same once more."""
        body = question.body(f"user{self._number}", stream=False)
        began = time.monotonic()
        for attempt in range(1000):
            patience_s = 0.5 if attempt < 2 else HANG_S
            headers = {TIMEOUT: f"{patience_s:g}", RETRY: str(attempt)}
            timeout = httpx.Timeout(HANG_S, read=patience_s)
            try:
                reply = await self._http.post("/v1/chat/completions", json=body, headers=headers, timeout=timeout)
            except httpx.ReadTimeout:
                if patience_s == HANG_S:
                    raise
                continue
            if reply.status_code != 200:
                await self._refused(reply)
                return
            self._judge(question, said(reply.json()["choices"][0]), began)
            return

    def _judge(self, question: Question, pieces: Sequence[Any], began: float) -> None:
        self.seen.answers += 1
        self.seen.answer_s.append(time.monotonic() - began)
        self.seen.wrong += list(pieces) != self._expected[question]

    async def _refused(self, reply: httpx.Response) -> None:
        wait = reply.headers.get("retry-after", "")
        if reply.status_code == 429 and wait.isdecimal() and int(wait) >= 1:
            self.seen.refused += 1
            await asyncio.sleep(min(int(wait), max(0.0, self._until - time.monotonic())))
        else:
            self.seen.failures[f"{reply.status_code} {reply.text[:60]}"] += 1
            await asyncio.sleep(0.2)


def said(choice: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The tokens of a reply or a piece of it with their log probabilities, all bits of which count."""
    entries = (choice.get("logprobs") or {}).get("content") or []
    return [(entry["token"], entry["logprob"]) for entry in entries]


def expected_answers(url: str) -> dict[Question, list[tuple[str, float]]]:
    """What a service without load says."""
    answers = {}
    with httpx.Client(base_url=url, timeout=HANG_S) as http:
        for question in QUESTIONS:
            reply = http.post("/v1/chat/completions", json=question.body("reference", stream=False))
            assert reply.status_code == 200, reply.text
            answers[question] = said(reply.json()["choices"][0])
            assert len(answers[question]) == TOKENS
    return answers


def crowd(url: str, clients: int, seconds: float, expected: Mapping[Question, Any]) -> list[Client]:
    """Runs so many clients for so long; each then ends the answer it is at."""

    async def run() -> list[Client]:
        limits = httpx.Limits(max_connections=clients + 1)
        async with httpx.AsyncClient(base_url=url, timeout=HANG_S, limits=limits) as http:
            until = time.monotonic() + seconds
            members = [Client(http, n, manner_of(n, clients), expected, until) for n in range(clients)]
            await asyncio.gather(*(member.run() for member in members))
            return members

    return asyncio.run(run())
