"""From a chat request to an answer under way: template, stored states, limits, sampling, the engine's yes. Owns what a
request means for the engine; answer.py owns what follows.
"""

import asyncio
import secrets
import time
from typing import Any

from services.api.answer import Answer, Asked
from services.api.client import Engines
from services.api.errors import ContextTooLong
from services.api.metrics import Metrics
from services.api.model_folder import ModelFolder, thinks
from services.api.saving import Saving
from services.api.schemas import ChatRequest
from services.api.snapshots import Plan, Snapshots
from services.rpc import engine_pb2 as pb

EFFORTS = {"none": False, "minimal": True, "low": True, "medium": True, "high": True}


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
        asked = Asked(messages, tools, options, prompt, plan, request, began)
        return Answer(asked, generation, info, self.folder, self.snapshots, self.saving, self.metrics)

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


def template_options(request: ChatRequest, model_thinks: bool) -> dict[str, Any]:
    """The template's variables. What is asked for in the request's own words wins over the model id."""
    effort = request.reasoning_effort
    options: dict[str, Any] = {"enable_thinking": model_thinks if effort is None else EFFORTS[effort]}
    if effort in ("minimal", "low"):
        options["low_effort"] = True
    return options | {k: v for k, v in (request.chat_template_kwargs or {}).items() if v is not None}
