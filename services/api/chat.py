"""From a request to answers under way: template, stored states, limits, sampling, the engine's yes. Owns what a
request means for the engine; answer.py owns what follows.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from services.api.ahead import Ahead
from services.api.answer import Answer, Asked
from services.api.background import is_background
from services.api.call_grammar import answer_form, tool_choice
from services.api.choices import Choices
from services.api.client import Engine
from services.api.engines import Engines, owner_of
from services.api.errors import (
    ApiError,
    ContextTooLong,
    EngineLost,
    FormRefused,
    InvalidRequest,
    NotFound,
    PictureGone,
    QueueFull,
    Unsupported,
)
from services.api.fitting import refuse_far_too_long, refuse_too_many
from services.api.metrics import Metrics
from services.api.model_folder import DOCUMENT_SUFFIX, ModelFolder, thinks
from services.api.parsers.answer import AnswerParser, TextParser
from services.api.parsers.reasoning import CALL, CLOSE
from services.api.pictures import Picture, refuse_elsewhere, take
from services.api.sampling import Sampling
from services.api.saving import Saving
from services.api.schemas import ChatRequest
from services.api.seeing import load, see
from services.api.shown import Shown, picture_refs, require_tokens
from services.api.snapshots import Plan, Snapshots
from services.api.structured import Form
from services.api.templates import Prompt
from services.api.text import CompletionRequest
from services.api.users import Caller
from services.rpc import engine_pb2 as pb

MOST_TRIES = 3  # at an engine, if others' pictures take the place of ours there


@dataclass(frozen=True)
class _Parts:
    """What a dialog is rendered from, with a place in it for each picture."""

    messages: list[Any]
    tools: list[Any]
    options: Mapping[str, Any]
    pictures: list[Picture]


class Chats:
    """Opens answers; one for the process."""

    def __init__(
        self,
        folder: ModelFolder,
        engines: Engines,
        snapshots: Snapshots,
        saving: Saving,
        ahead: Ahead | None,
        metrics: Metrics,
        default_max_tokens: int,
        timeout_s: float,
        may_fetch: bool = False,
    ) -> None:
        self.folder = folder
        self.engines = engines
        self.snapshots = snapshots
        self.saving = saving
        self.ahead = ahead
        self.metrics = metrics
        self._default_max_tokens = default_max_tokens
        self._timeout_s = timeout_s
        self._may_fetch = may_fetch  # pictures, from the web
        self._under_way: WeakValueDictionary[str, Choices] = WeakValueDictionary()

    async def open(self, request: ChatRequest, caller: Caller, prefix: str = "chatcmpl-") -> Choices:
        """Everything up to the engine's yes. Raises ApiError for what can be known by then. `prefix` begins the id."""
        refuse_too_many(request.messages, request.tools)

        async def open_answer(choice: int) -> Answer:
            return await self._open_answer(request, caller, choice)

        return self._noted(Choices(await open_answer(0), request.n or 1, open_answer, prefix), caller)

    async def render(self, request: ChatRequest) -> tuple[Prompt, pb.InfoResponse]:
        """The dialog as the model reads it; of pictures only how many tokens they are. Raises ApiError."""
        refuse_too_many(request.messages, request.tools)
        engine, info = await self.engines.pick()
        return await self._render(engine, info, self._parts(request, info), request, count_only=True), info

    async def _render(
        self, engine: Engine, info: pb.InfoResponse, parts: "_Parts", request: ChatRequest, count_only: bool = False
    ) -> Prompt:
        prompt, run = self.folder.template.prompt, self.folder.template.turns.run
        rendered = (parts.messages, parts.tools, parts.options)
        if not parts.pictures:
            return await run(prompt, *rendered)
        if not info.vision:
            raise Unsupported(f"the model {request.model} cannot see pictures: send text only", "messages")
        require_tokens(self.folder.tokenizer.added)
        loaded = await load(parts.pictures, request.model.endswith(DOCUMENT_SUFFIX), self._may_fetch)
        bare = await run(prompt, *rendered, [Shown(b"", 0)] * len(loaded))
        await self._refuse_far_too_long(bare.text, info, "messages")
        text_tokens = len(await asyncio.to_thread(self.folder.tokenizer.encode, bare.text))
        answer_tokens = min(request.longest or self._default_max_tokens, info.context_tokens // 4)
        shown = await see(engine, loaded, text_tokens, answer_tokens, count_only, self._timeout_s)
        return await run(prompt, *rendered, shown)

    async def open_text(self, request: CompletionRequest, caller: Caller) -> Choices:
        """The same for texts: every prompt `n` times."""
        each = request.n or 1

        async def open_answer(choice: int) -> Answer:
            return await self._open_text_answer(request, request.prompts[choice // each], caller, choice)

        return self._noted(Choices(await open_answer(0), each * len(request.prompts), open_answer, "cmpl-"), caller)

    def under_way(self, name: str) -> Choices:
        """By id of the answer or of the request. Raises NotFound."""
        choices = self._under_way.get(name)
        if choices is None:
            raise NotFound(f"no answer with the id {name!r} is under way", "id")
        return choices

    def _noted(self, choices: Choices, caller: Caller) -> Choices:
        self._under_way[choices.id] = self._under_way[caller.request_id] = choices
        return choices

    async def _open_answer(self, request: ChatRequest, caller: Caller, choice: int) -> Answer:
        """On the engine that owns the dialog, or on another one if that is gone or full. If all are, the client hears
        of the full one that has room first."""
        troubles: list[ApiError] = []
        async for engine, info in self.engines.answering(_owner(request)):
            try:
                for _ in range(MOST_TRIES - 1):
                    with suppress(PictureGone):
                        return await self._answer_at(engine, info, request, caller, choice)
                return await self._answer_at(engine, info, request, caller, choice)
            except (EngineLost, QueueFull) as error:
                troubles.append(error)
        raise min(troubles, key=lambda one: (isinstance(one, EngineLost), one.retry_after_s or 0))

    async def _answer_at(
        self, engine: Engine, info: pb.InfoResponse, request: ChatRequest, caller: Caller, choice: int
    ) -> Answer:
        began = time.perf_counter()
        parts = self._parts(request, info)
        prompt = await self._render(engine, info, parts, request)
        await self._refuse_far_too_long(prompt.text, info, "messages")
        plan = await self.snapshots.plan(prompt, info)
        if self.ahead is not None:
            self.ahead.overtaken(plan.keys.values())
        background = is_background(request.messages)
        if background:  # nobody goes on from it, and no dialog shall make room for it
            plan = replace(plan, keep={}, keep_answer=False)
        self.metrics.prompt_s.observe(time.perf_counter() - began)
        top = (request.top_logprobs or 0) if request.logprobs else None
        choice_of_tools = tool_choice(request.tool_choice, request.parallel_tool_calls)
        form = answer_form(request.usable_tools, choice_of_tools, request.form, self.folder.tokenizer.added)
        start = self._start(request, caller, plan, info, choice, top, self._thinking(request, prompt, form), form)
        start.low_priority = background
        schemas = {tool.function.name: tool.function.parameters or {} for tool in request.usable_tools}
        parser = AnswerParser(prompt.starts_thinking, schemas or None, request.stops)
        progress = bool(request.stream and request.return_progress)
        asked = Asked(parts.messages, parts.tools, parts.options, plan, parser, bool(request.logprobs), began, progress)
        return await self._begin(engine, info, start, asked, form)

    async def _open_text_answer(
        self, request: CompletionRequest, prompt: str | list[int], caller: Caller, choice: int
    ) -> Answer:
        began = time.perf_counter()
        engine, info = await self.engines.pick()
        thinks(request.model, info)
        tokenizer = self.folder.tokenizer
        if isinstance(prompt, str):
            await self._refuse_far_too_long(prompt, info, "prompt")
        ids = await asyncio.to_thread(tokenizer.encode, prompt) if isinstance(prompt, str) else prompt
        if not all(tokenizer.knows(token_id) for token_id in ids):
            raise InvalidRequest("prompt has an id that is no token of this model", "prompt")
        plan = self.snapshots.unkept(ids, info)
        self.metrics.prompt_s.observe(time.perf_counter() - began)
        start = self._start(request, caller, plan, info, choice, request.logprobs, None, request.form)
        progress = bool(request.stream and request.return_progress)
        parser = TextParser(request.stops)
        asked = Asked((), (), {}, plan, parser, request.logprobs is not None, began, progress)
        return await self._begin(engine, info, start, asked, request.form)

    async def _refuse_far_too_long(self, text: str, info: pb.InfoResponse, name: str) -> None:
        await asyncio.to_thread(refuse_far_too_long, self.folder.tokenizer, text, info.context_tokens, name)

    async def _begin(
        self, engine: Engine, info: pb.InfoResponse, start: pb.Start, asked: Asked, form: Form | None
    ) -> Answer:
        generation = engine.generate(self._timeout_s)
        try:
            await generation.start(start)
        except FormRefused as error:
            assert form is not None
            raise FormRefused(f"{form.param}: {error}", form.param) from error
        except BaseException:
            generation.cancel()
            raise
        ahead = None if self.ahead is None else partial(self.ahead.begin, engine, info)
        return Answer(asked, generation, info, self.folder, self.snapshots, self.saving, ahead, self.metrics)

    def _parts(self, request: ChatRequest, info: pb.InfoResponse) -> "_Parts":
        messages, pictures = [], []
        for message in request.messages:
            found = message.for_template()
            refuse_elsewhere(found["role"], found["content"] or "")
            if found["content"]:
                found["content"], own = take(found["content"])
                pictures += own
            messages.append(found)
        tools = [tool.for_template() for tool in request.usable_tools]
        return _Parts(messages, tools, template_options(request, thinks(request.model, info)), pictures)

    def _thinking(self, request: ChatRequest, prompt: Prompt, form: Form | None) -> pb.Thinking | None:
        """What ends the thinking that the prompt begins; None without any."""
        if not prompt.starts_thinking:
            return None
        added = self.folder.tokenizer.added
        if CLOSE not in added:
            if request.thinking_budget is None and form is None:
                return None
            param = "thinking_budget" if form is None else form.param
            raise Unsupported(f"this model has no token {CLOSE}: the end of its thinking cannot be told", param)
        ends = [CLOSE, CALL] if request.usable_tools else [CLOSE]
        end_ids = [added[end].id for end in ends if end in added]
        return pb.Thinking(end_ids=end_ids, budget_tokens=request.thinking_budget)

    def _start(
        self,
        sampling: Sampling,
        caller: Caller,
        plan: Plan,
        info: pb.InfoResponse,
        choice: int,
        top_logprobs: int | None,
        thinking: pb.Thinking | None,
        form: Form | None,
    ) -> pb.Start:
        room = info.context_tokens - len(plan.ids)
        if room < 1:
            name = "messages" if isinstance(sampling, ChatRequest) else "prompt"
            raise ContextTooLong(
                f"{name}: {len(plan.ids)} tokens, but the model's context is {info.context_tokens} tokens, answer "
                "included: shorten it",
                name,
            )
        defaults = self.folder.defaults
        max_tokens = min(sampling.longest or self._default_max_tokens or room, room)
        return pb.Start(
            request_id=caller.request_id,
            ids=plan.ids,
            max_tokens=max_tokens,
            sampling=sampling.message(defaults, info.vocab_size, choice),
            stop_ids=defaults.stop_ids,
            snapshot_at=list(plan.keep),
            passing_at=list(plan.passing),
            snapshot_answer=plan.keep_answer,
            offers=plan.refs(),
            heads_only=plan.heads_only,
            snapshots_on_request=True,
            idle=False,
            min_tokens=sampling.least(max_tokens),
            logprobs=None if top_logprobs is None else pb.Logprobs(top=top_logprobs),
            thinking=thinking,
            low_priority=False,
            grammar=None if form is None else form.grammar,
            user=caller.user,
            pictures=picture_refs(plan.ids, self.folder.tokenizer.added, plan.shown),
        )


def _owner(request: ChatRequest) -> bytes:
    roles = [message.role for message in request.messages]
    first = request.messages[: roles.index("user") + 1 if "user" in roles else None]
    tools = [tool.model_dump(mode="json", exclude_none=True) for tool in request.usable_tools]
    return owner_of([message.model_dump(mode="json", exclude_none=True) for message in first], tools)


def template_options(request: ChatRequest, model_thinks: bool) -> dict[str, Any]:
    """The template's variables. What is asked for in the request's own words wins over the model id."""
    effort = request.reasoning_effort
    options: dict[str, Any] = {"enable_thinking": model_thinks if effort is None else effort != "none"}
    if effort in ("minimal", "low"):
        options["low_effort"] = True
    return options | {k: v for k, v in (request.chat_template_kwargs or {}).items() if v is not None}
