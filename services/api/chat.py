"""One chat answer from request to end: the path of a request through template, snapshots, engine and parsers. Owns the
order of these steps and the counts; knows nothing of HTTP or of the shape of a reply.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api.client import Engines, Generation
from services.api.errors import ApiError, ContextTooLong, EngineFailed
from services.api.metrics import Metrics
from services.api.model_folder import ModelFolder, thinks
from services.api.parsers.answer import AnswerParser, Content, Delta, Reasoning
from services.api.parsers.tool_calls import CallStart
from services.api.saving import Dialog, Saving
from services.api.schemas import ChatRequest, ToolCall
from services.api.snapshots import Plan, Snapshots
from services.api.templates import Prompt
from services.api.tokens import Detokenizer
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0  # from asking the engine to stop until its Finish
EFFORTS = {"none": False, "minimal": True, "low": True, "medium": True, "high": True}


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
class Done:
    finish_reason: str  # stop, length or tool_calls
    usage: Usage


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


class Chats:
    """Opens answers; one for the process."""

    def __init__(
        self,
        folder: ModelFolder,
        engines: Engines,
        snapshots: Snapshots,
        saving: Saving,
        metrics: Metrics,
        default_max_tokens: int,
        timeout_s: float,
    ) -> None:
        self.folder = folder
        self.engines = engines
        self.snapshots = snapshots
        self.saving = saving
        self.metrics = metrics
        self._default_max_tokens = default_max_tokens
        self._timeout_s = timeout_s

    async def open(self, request: ChatRequest, request_id: str) -> "Answer":
        """Everything up to the engine's yes. Raises ApiError for what can be known by then."""
        began = time.perf_counter()
        engine, info = await self.engines.pick()
        options = template_options(request, thinks(request.model, info.model))
        messages = [message.for_template() for message in request.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in request.usable_tools]
        prompt = await asyncio.to_thread(self.folder.template.prompt, messages, tools, options)
        plan = await self.snapshots.plan(prompt, info)
        self.metrics.prompt_s.observe(time.perf_counter() - began)
        start = self._start(request, request_id, plan, info)
        generation = engine.generate(self._timeout_s)
        try:
            await generation.start(start)
        except BaseException:
            generation.cancel()
            raise
        return Answer(self, request, _Asked(messages, tools, options, prompt, plan), generation, info, began)

    def _start(self, request: ChatRequest, request_id: str, plan: Plan, info: pb.InfoResponse) -> pb.Start:
        room = info.context_tokens - len(plan.ids)
        if room < 1:
            raise ContextTooLong(
                f"the messages are {len(plan.ids)} tokens long, but the model's context is {info.context_tokens} "
                "tokens, answer included: shorten the dialog",
                "messages",
            )
        defaults = self.folder.defaults
        wanted = request.max_completion_tokens or request.max_tokens or self._default_max_tokens or room
        return pb.Start(
            request_id=request_id,
            ids=plan.ids,
            max_tokens=min(wanted, room),
            sampling=pb.Sampling(
                temperature=defaults.temperature if request.temperature is None else request.temperature,
                top_p=defaults.top_p if request.top_p is None else request.top_p,
                seed=secrets.randbits(64) if request.seed is None else request.seed % 2**64,
            ),
            stop_ids=defaults.stop_ids,
            snapshot_at=list(plan.keep),
            snapshot_answer=plan.keep_answer,
            offers=plan.refs(),
            heads_only=plan.heads_only,
        )


@dataclass(frozen=True)
class _Asked:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any]
    options: Mapping[str, Any]
    prompt: Prompt
    plan: Plan


class Answer:
    """One answer under way. Iterate `events` once, to its end, or close it: that frees the engine's sequence."""

    def __init__(
        self,
        chats: Chats,
        request: ChatRequest,
        asked: _Asked,
        generation: Generation,
        info: pb.InfoResponse,
        began: float,
    ) -> None:
        self.message = Message()
        self.fingerprint = info.arithmetic_fingerprint[:16]
        self._chats = chats
        self._metrics = chats.metrics
        self._asked = asked
        self._generation = generation
        self._began = began
        self._last_token: float | None = None
        schemas = {tool.function.name: tool.function.parameters or {} for tool in request.usable_tools}
        self._parser = AnswerParser(asked.prompt.starts_thinking, schemas or None, request.stops)
        self._detokenizer = Detokenizer(chats.folder.tokenizer)
        self._stop_ids = frozenset(chats.folder.defaults.stop_ids)
        self._ids: list[int] = []  # sampled, without the stop id
        self._sent_whole = False
        self._restored_tokens = 0
        self._reasoning_tokens = 0

    async def events(self) -> AsyncGenerator[Delta | Done, None]:
        """Deltas, none of them empty, then Done. Raises ApiError if the engine fails on the way."""
        self._metrics.in_progress.inc()
        finish: pb.Finish | None = None
        handed_over = False  # to saving, which reads on behind Finish
        try:
            async for message in self._generation.messages():
                kind = message.WhichOneof("message")
                if kind == "restore":
                    await self._restore(message.restore)
                elif kind == "token":
                    for delta in self._token(message.token.id):
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
                handed_over = True
            yield done
        finally:
            self._metrics.in_progress.dec()
            if not handed_over:
                self._generation.cancel()

    def _token(self, token_id: int) -> list[Delta]:
        now = time.perf_counter()
        if self._last_token is None:
            self._metrics.ttft.observe(now - self._began)
        else:
            self._metrics.itl.observe(now - self._last_token)
        self._last_token = now
        if token_id in self._stop_ids:
            return []
        self._ids.append(token_id)
        self._reasoning_tokens += self._parser.thinking
        deltas = self._parser.feed(self._detokenizer.feed(token_id))
        for delta in deltas:
            self.message.add(delta)
        return deltas

    async def _restore(self, restore: pb.Restore) -> None:
        source, plan = pb.Restore.Source.Name(restore.source), self._asked.plan
        if restore.source == pb.Restore.SEND:
            sent = await self._generation.send_payload(self._chats.snapshots.payload(plan, restore.state.state_id))
            self._sent_whole = sent == restore.state.size_bytes
            if not self._sent_whole:
                await self._generation.half_close()  # it cannot be had any more: the prompt is read from its beginning
            return
        self._metrics.lookups[source.lower(),].inc()
        if restore.source == pb.Restore.REFUSED:
            log.warning("the engine refused a stored state: %s", restore.reason)
            if self._sent_whole:
                await self._chats.snapshots.refused(plan, restore.state.state_id)
        elif restore.source != pb.Restore.NONE:
            self._restored_tokens = restore.state.tokens

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
        prompt_tokens = len(self._asked.plan.ids)
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
        metrics.e2e.observe(time.perf_counter() - self._began)
        return Done(reason, usage)

    def _hand_over(self, finish: pb.Finish) -> None:
        asked = self._asked
        dialog = None
        if asked.plan.keep_answer and not self._parser.stopped:
            messages = [*asked.messages, self.message.for_template()]
            dialog = Dialog(messages, asked.tools, asked.options, tuple(self._ids))
        self._chats.saving.take(asked.plan, self._generation, dialog, finish.taken)


def template_options(request: ChatRequest, model_thinks: bool) -> dict[str, Any]:
    """The template's variables. What is asked for in the request's own words wins over the model id."""
    effort = request.reasoning_effort
    options: dict[str, Any] = {"enable_thinking": model_thinks if effort is None else EFFORTS[effort]}
    if effort in ("minimal", "low"):
        options["low_effort"] = True
    return options | {k: v for k, v in (request.chat_template_kwargs or {}).items() if v is not None}
