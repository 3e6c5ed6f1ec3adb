"""One answer under way: from the engine's messages to what a client sees, and the counts. Owns the stream of events,
the engine's sequence until it is handed on, and stop strings' end; knows nothing of HTTP or of the shape of a reply.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.api.client import Generation
from services.api.errors import ApiError, EngineFailed
from services.api.logprobs import entry
from services.api.messages import ToolCall
from services.api.metrics import Metrics
from services.api.model_folder import ModelFolder
from services.api.parsers.answer import AnswerParser, Content, Delta, Reasoning, TextParser
from services.api.parsers.tool_calls import CallStart
from services.api.saving import Dialog, Saving
from services.api.shown import Shown
from services.api.snapshots import Plan, Snapshots
from services.api.tokens import Detokenizer
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0  # from asking the engine to stop until its Finish


@dataclass(frozen=True)
class Usage:
    """Tokens as OpenAI counts them, and the engine's times; None where an answer was stopped before it told."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    executed_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None


@dataclass(frozen=True)
class PromptProgress:
    """How far the prompt is read. `done_tokens` include the restored ones; `left_ms` 0: unknown yet, or it is read."""

    total_tokens: int
    cached_tokens: int
    done_tokens: int
    seconds: float
    left_ms: int


@dataclass(frozen=True)
class Done:
    finish_reason: str  # stop, length, tool_calls, or cancelled
    usage: Usage
    stop_string: str | None = None  # that ended it


@dataclass
class Message:
    """The answer so far, as a client that repeats it will send it."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] | None = None

    def add(self, delta: Delta) -> None:
        if isinstance(delta, Content):
            self.content += delta.text
        elif isinstance(delta, Reasoning):
            self.reasoning += delta.text
        elif isinstance(delta, CallStart):
            self.calls = self.calls or []
            function = {"name": delta.name, "arguments": ""}
            self.calls.append({"id": delta.id, "type": "function", "function": function})
        elif self.calls:
            self.calls[delta.index]["function"]["arguments"] += delta.json

    def for_template(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [ToolCall.model_validate(call).for_template() for call in self.calls]
        return message


@dataclass(frozen=True)
class Asked:
    """A request, rendered and planned. The first three are what its dialog was rendered from."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any]
    options: Mapping[str, Any]
    plan: Plan
    parser: AnswerParser | TextParser
    logprobs: bool
    began: float  # time.perf_counter() when it came
    progress: bool = False  # is told while the prompt is read


class Answer:
    """One answer under way. Iterate `events` once, to its end, or close it: that frees the engine's sequence."""

    def __init__(
        self,
        asked: Asked,
        generation: Generation,
        info: pb.InfoResponse,
        folder: ModelFolder,
        snapshots: Snapshots,
        saving: Saving,
        ahead: Callable[[Dialog, tuple[Shown, ...]], None] | None,
        metrics: Metrics,
    ) -> None:
        self.message = Message()
        self.logprobs: list[dict[str, Any]] = []  # of the content's tokens so far, if they were asked for
        self.fingerprint = info.arithmetic_fingerprint[:16]
        self._snapshots = snapshots
        self._saving = saving
        self._ahead = ahead
        self._metrics = metrics
        self._asked = asked
        self._generation = generation
        self._last_token: float | None = None
        self._parser = asked.parser
        self._tokenizer = folder.tokenizer
        self._detokenizer = Detokenizer(folder.tokenizer)
        self._stop_ids = frozenset(folder.defaults.stop_ids)
        self._ids: list[int] = []  # sampled, without the stop id
        self._handed_over = False  # to saving, which reads on behind Finish
        self._restored_tokens = 0
        self._reasoning_tokens = 0

    @property
    def prompt_tokens(self) -> int:
        return len(self._asked.plan.ids)

    async def events(self) -> AsyncGenerator[PromptProgress | Delta | Done, None]:
        """Progress if it was asked for, deltas, none of them empty, then Done. Raises ApiError if the engine fails."""
        self._metrics.in_progress.inc()
        finish: pb.Finish | None = None
        reading_from = self._asked.began
        try:
            async for message in self._generation.messages():
                kind = message.WhichOneof("message")
                if kind == "restore":
                    await self._restore(message.restore)
                    if self._asked.progress and message.restore.source != pb.Restore.SEND:
                        reading_from = time.perf_counter()
                        yield self._progress(pb.Progress(done_tokens=self._restored_tokens), 0.0)
                elif kind == "progress":
                    if message.progress.HasField("passing"):
                        self._snapshots.passed(self._asked.plan, message.progress.passing)
                    if self._asked.progress:
                        yield self._progress(message.progress, time.perf_counter() - reading_from)
                elif kind == "token":
                    for delta in self._token(message.token):
                        yield delta
                    if self._parser.stopped:
                        finish = await self._stop()
                        break
                elif kind == "finish":
                    finish = message.finish
                    break
            else:
                raise EngineFailed("the engine ended the answer without finishing it")
            cut = finish is not None and finish.reason == pb.Finish.LENGTH and not self._parser.stopped
            for delta in self._parser.finish(cut):
                self.message.add(delta)
                yield delta
            done = self._done(finish, cut)
            if finish is not None:
                self._hand_over(finish)
                self._handed_over = True
            yield done
        finally:
            self._metrics.in_progress.dec()
            self.close()

    def close(self) -> None:
        """Give the answer up, if it is not complete; also if its events were never begun."""
        if not self._handed_over:
            self._generation.cancel()

    def cancelled(self) -> Done:
        """The end of an answer that was given up on request."""
        counts = Usage(self.prompt_tokens, len(self._ids), self._restored_tokens, self._reasoning_tokens)
        return Done("cancelled", counts)

    async def stop_thinking(self) -> bool:
        """False if it is too late."""
        return not self._handed_over and await self._generation.stop_thinking()

    def _progress(self, told: pb.Progress, seconds: float) -> PromptProgress:
        return PromptProgress(self.prompt_tokens, self._restored_tokens, told.done_tokens, seconds, told.left_ms)

    def _token(self, token: pb.Token) -> list[Delta]:
        now = time.perf_counter()
        if self._last_token is None:
            self._metrics.ttft.observe(now - self._asked.began)
        else:
            self._metrics.itl.observe(now - self._last_token)
        self._last_token = now
        if token.id in self._stop_ids:
            return []
        self._ids.append(token.id)
        self._reasoning_tokens += self._parser.thinking
        if self._asked.logprobs and not self._parser.thinking:
            self.logprobs.append(entry(self._tokenizer, token))
        deltas = self._parser.feed(self._detokenizer.feed(token.id))
        for delta in deltas:
            self.message.add(delta)
        return deltas

    async def _restore(self, restore: pb.Restore) -> None:
        source, plan = pb.Restore.Source.Name(restore.source), self._asked.plan
        if restore.source == pb.Restore.SEND:
            await self._snapshots.send(plan, restore, self._generation)
            return
        self._metrics.lookups[source.lower(),].inc()
        if restore.source == pb.Restore.REFUSED:
            log.warning("the engine refused a stored state: %s", restore.reason)
            if restore.damaged:
                await self._snapshots.refused(plan, restore.state.state_id)
        elif restore.source != pb.Restore.NONE:
            self._restored_tokens = restore.state.tokens
        self._snapshots.not_held(plan, self._restored_tokens)

    async def _stop(self) -> pb.Finish | None:
        """A stop string was found: let the engine end the answer, so that the prompt's snapshots are not lost."""
        try:
            async with asyncio.timeout(STOP_GRACE_S):
                if not await self._generation.stop():
                    return None
                async for message in self._generation.messages():
                    if message.WhichOneof("message") == "finish":
                        return message.finish
        except (ApiError, TimeoutError):
            pass  # the client has its answer
        return None

    def _done(self, finish: pb.Finish | None, cut: bool) -> Done:
        reason = "length" if cut else "tool_calls" if self._parser.calls else "stop"
        prompt_tokens = self.prompt_tokens
        if finish is None or self._parser.stopped:
            usage = Usage(prompt_tokens, len(self._ids), self._restored_tokens, self._reasoning_tokens)
        else:
            usage = Usage(
                prompt_tokens,
                finish.generated_tokens,
                finish.cached_tokens,
                self._reasoning_tokens,
                finish.executed_tokens,
                finish.queue_s,
                finish.prefill_s,
                finish.decode_s,
            )
        metrics = self._metrics
        metrics.answers[reason,].inc()
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_tokens)
        metrics.completion_tokens.inc(usage.completion_tokens)
        metrics.reasoning_tokens.inc(usage.reasoning_tokens)
        metrics.tool_calls.inc(self._parser.calls)
        metrics.e2e.observe(time.perf_counter() - self._asked.began)
        return Done(reason, usage, self._parser.stop_string)

    def _hand_over(self, finish: pb.Finish) -> None:
        asked = self._asked
        dialog = then = None
        if asked.plan.keep_answer:
            messages = [*asked.messages, self.message.for_template()]
            dialog = Dialog(messages, asked.tools, asked.options, tuple(self._ids))
            if self._ahead is not None:
                then = partial(self._ahead, dialog, asked.plan.shown)
            if self._parser.stopped:  # the state has read more than the client has seen
                dialog = None
        self._saving.take(asked.plan, self._generation, dialog, finish.taken, then)
