"""Reading ahead: after an answer, an engine that has nothing else to do reads the history as the next request will show
it, without the thinking that the template drops and with the turn closed, so that the next turn costs only its own new
text. Owns when that is begun and given up; whether anything else is to be done, only the engine knows.
"""

import asyncio
import logging
from collections.abc import Iterable

from services.api.client import Engine, Generation
from services.api.errors import ApiError, EngineFailed, TemplateRefused
from services.api.metrics import Metrics
from services.api.model_folder import ModelFolder
from services.api.saving import Dialog, Saving
from services.api.shown import Shown, picture_refs
from services.api.snapshots import Plan, Snapshots
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)


class Ahead:
    """One for the process."""

    def __init__(
        self, folder: ModelFolder, snapshots: Snapshots, saving: Saving, metrics: Metrics, timeout_s: float
    ) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._saving = saving
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._under_way: dict[bytes, asyncio.Task[None]] = {}  # by the key of the text that is read
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, engine: Engine, info: pb.InfoResponse, dialog: Dialog, shown: tuple[Shown, ...]) -> None:
        """Read `dialog` ahead in the background, on the engine that still holds its states."""
        task = asyncio.create_task(self._read(engine, info, dialog, shown))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def overtaken(self, keys: Iterable[bytes]) -> None:
        """A request with these boundaries has come: what is being read for it, it reads itself."""
        for key in keys:
            task = self._under_way.pop(key, None)
            if task is not None:
                task.cancel()
                self._metrics.ahead["overtaken",].inc()

    async def idle(self) -> None:
        """Until nothing is read ahead any more."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.idle()

    async def _read(self, engine: Engine, info: pb.InfoResponse, dialog: Dialog, shown: tuple[Shown, ...]) -> None:
        try:
            template = self._folder.template
            prompt = await template.turns.run(template.upcoming, dialog.messages, dialog.tools, dialog.options, shown)
            if prompt is None:
                return
            plan = await self._snapshots.plan(prompt, info)
            key = plan.keys[len(prompt.text)]
            if plan.known_to_the_end(key) or len(plan.ids) >= info.context_tokens:
                return
            await self._generate(engine, plan, key)
        except TemplateRefused:
            pass  # the probe is not a message that this template takes
        except (ApiError, OSError) as error:
            self._metrics.ahead["failed",].inc()
            log.info("a history was not read ahead: %s", error)

    async def _generate(self, engine: Engine, plan: Plan, key: bytes) -> None:
        generation = engine.generate(self._timeout_s)
        task = asyncio.current_task()
        assert task is not None
        self._under_way[key] = task
        try:
            await generation.start(self._start(plan))
            finish = await self._finish(plan, generation)
        except BaseException:
            generation.cancel()
            raise
        finally:
            if self._under_way.get(key) is task:
                del self._under_way[key]
        self._metrics.ahead["done",].inc()
        self._metrics.ahead_tokens.inc(finish.executed_tokens)
        self._saving.take_end(plan, generation, key, finish.taken)

    def _start(self, plan: Plan) -> pb.Start:
        return pb.Start(
            request_id="ahead",
            ids=plan.ids,
            sampling=pb.Sampling(),
            snapshot_answer=True,
            offers=plan.refs(),
            heads_only=plan.heads_only,
            snapshots_on_request=True,
            idle=True,
            pictures=picture_refs(plan.ids, self._folder.tokenizer.added, plan.shown),
        )

    async def _finish(self, plan: Plan, generation: Generation) -> pb.Finish:
        async for message in generation.messages():
            kind = message.WhichOneof("message")
            if kind == "restore" and message.restore.source == pb.Restore.SEND:
                await self._snapshots.send(plan, message.restore, generation)
            elif kind == "restore" and message.restore.damaged:
                await self._snapshots.refused(plan, message.restore.state.state_id)
            elif kind == "finish":
                return message.finish
        raise EngineFailed("the engine ended the reading without finishing it")
