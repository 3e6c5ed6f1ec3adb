"""Storing what the engine sends behind an answer. Owns the background tasks, the name an answer's state gets, and that
a state is written once; whatever goes wrong here costs a later prompt some time and nothing else.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api.client import Generation
from services.api.errors import ApiError
from services.api.keys import boundary_keys
from services.api.metrics import Metrics
from services.api.model_folder import ModelFolder
from services.api.naming import Naming
from services.api.records import Head, Record, RecordMemory
from services.api.shown import named_places
from services.api.snapshots import Plan
from services.api.spilling import Spilling
from services.api.store import Store, StoreRefused
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dialog:
    """An answered request, as a later request would repeat it."""

    messages: Sequence[Mapping[str, Any]]  # with the answer
    tools: Sequence[Any]
    options: Mapping[str, Any]
    answer_ids: Sequence[int]  # sampled, without the stop id


class Saving:
    """`store` None: states are only noted, as they may stay hot in the engine."""

    def __init__(
        self,
        folder: ModelFolder,
        store: Store | None,
        memory: RecordMemory,
        metrics: Metrics,
        at_once: int,
        within_s: float,
        naming: Naming,
        spilling: Spilling | None = None,
    ) -> None:
        self._spilling = spilling
        self._naming = naming
        self._tokenizer = folder.tokenizer
        self._template = folder.template
        self._store = store
        self._memory = memory
        self._metrics = metrics
        self._within_s = within_s
        self._turns = asyncio.Semaphore(at_once)
        self._writing: set[bytes] = set()  # state ids
        self._blocks_under_way: set[bytes] = set()  # if that fails, who left one out has a state with a hole: none
        self._tasks: set[asyncio.Task[None]] = set()

    def take(
        self,
        plan: Plan,
        generation: Generation,
        dialog: Dialog | None,
        taken: Sequence[pb.StateRef],
        ahead: Callable[[], None] | None = None,
    ) -> None:
        """Own `generation` from behind its Finish on: store what it still sends, off the request's path. The states of
        `taken` are still hot, so a next request can begin with them before they are stored.

        `ahead`, called once they are known, has the end of the answer read on to where the next turn begins: that is
        stored then, and the end of the answer is not.
        """

        named = self._naming.begin(plan.keys)

        async def save() -> None:
            end = None
            try:
                if dialog is not None:
                    end = await self._template.turns.run(self._answer, plan, dialog)
            except (ApiError, OSError) as error:  # it takes too long, or no process can be begun
                log.warning("the end of an answer was not rendered: %s", error)
            except BaseException:
                generation.cancel()
                raise
            finally:
                self._note_all(plan, end, taken)
                named()
            await self._save(plan, generation, end, ahead)

        self._begin(save())

    def take_end(self, plan: Plan, generation: Generation, key: bytes, taken: Sequence[pb.StateRef]) -> None:
        """The same for a prompt that was read to its end, which `key` names."""
        self._note_all(plan, (key, plan.ids), taken)
        self._begin(self._save(plan, generation, (key, plan.ids), None))

    def _begin(self, saving: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(saving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def idle(self) -> None:
        """Until everything that is to be stored is stored."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self, within_s: float) -> None:
        """Let the storing end, then give it up."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._spilling is not None:
            await self._spilling.close(within_s)

    async def _save(
        self,
        plan: Plan,
        generation: Generation,
        answer: "_Answered | None",
        ahead: Callable[[], None] | None,
    ) -> None:
        began = time.perf_counter()
        try:
            if ahead is not None:
                ahead()
            async with asyncio.timeout(self._within_s), self._turns:
                messages = generation.messages()
                async for message in messages:
                    if message.WhichOneof("message") == "snapshot":
                        wanted = ahead is None or message.snapshot.state.tokens < len(plan.ids)
                        await self._save_one(plan, answer, message.snapshot, wanted, generation, messages)
            self._metrics.save_s.observe(time.perf_counter() - began)
        except (ApiError, TimeoutError) as error:
            self._metrics.writes["failed",].inc()
            log.warning("snapshots of an answer were not stored: %s", str(error) or "it took too long")
        finally:
            generation.cancel()

    def _note_all(self, plan: Plan, answer: "_Answered | None", taken: Iterable[pb.StateRef]) -> None:
        for ref in taken:
            self._note(plan, answer, pb.SnapshotHead(state=ref))

    def _note(self, plan: Plan, answer: "_Answered | None", head: pb.SnapshotHead) -> tuple[bytes, Record] | None:
        """Remember a state under the text it has read. None if no later request would look for it."""
        tokens = head.state.tokens
        if tokens < len(plan.ids):
            key, ids = plan.keep.get(tokens) or plan.passing.get(tokens), plan.ids[:tokens]
        else:
            key, ids = answer or (None, ())
        if key is None or not 0 < tokens <= len(ids):
            return None
        state, size_bytes = head.state, head.state.size_bytes if head.chunks else 0
        known = Head(state.state_id, len(ids), tokens, size_bytes, head.chunks, len(state.blocks), state.block_bytes)
        record = Record(known, array("I", ids), tuple(state.blocks))
        self._memory.put(key, record)
        return key, record

    async def _save_one(
        self,
        plan: Plan,
        answer: "_Answered | None",
        head: pb.SnapshotHead,
        wanted: bool,
        generation: Generation,
        messages: AsyncIterator[pb.GenerateOut],
    ) -> None:
        """Take one snapshot off the stream, as far as it is of use."""
        if not head.chunks:
            return
        noted = self._note(plan, answer, head) if wanted else None
        state_id = head.state.state_id
        if noted is None or self._store is None or state_id in self._writing:
            await generation.want(False, ())
            return
        self._writing.add(state_id)
        try:
            stored = await self._upload(self._store, *noted, generation, messages)
            if stored and head.state.tokens >= len(plan.ids):
                await self._replace(self._store, plan)
                if self._spilling is not None:
                    self._spilling.later(*noted, plan.keys.values())
        finally:
            self._writing.discard(state_id)

    async def _replace(self, store: Store, plan: Plan) -> None:
        """A newer state of this dialog is stored: the older ones go. Its blocks stay, as the newer ones have them."""
        self._metrics.replaced.inc(len(plan.older))
        for key, _ in plan.older:
            self._memory.forget(key)
        await store.forget([key for key, _ in plan.older], [state_id for _, state_id in plan.older])

    async def _upload(
        self,
        store: Store,
        key: bytes,
        record: Record,
        generation: Generation,
        messages: AsyncIterator[pb.GenerateOut],
    ) -> bool:
        """Whether the store has it now."""
        own_part, lacking = await store.lacks(record)
        blocks = [number for number in lacking if record.blocks[number] not in self._blocks_under_way]
        if not store.available:
            own_part, blocks = False, []
        under_way = {record.blocks[number] for number in blocks}
        self._blocks_under_way |= under_way
        chunks = _Chunks(own_part * record.head.chunks + len(blocks), messages)
        try:
            await generation.want(own_part, blocks)
            if own_part or blocks:
                await store.write(record, own_part, blocks, chunks)
                self._metrics.writes["stored",].inc()
                self._metrics.snapshot_bytes["stored",].inc(chunks.taken_bytes)
            else:
                self._metrics.writes["present",].inc()
            await store.write_record(key, record)
            return True
        except StoreRefused as error:
            self._metrics.writes["refused",].inc()
            log.warning("a snapshot was not stored: %s", error)
            async for _ in chunks:  # what the store did not take still has to be taken off the stream
                pass
            return False
        finally:
            self._blocks_under_way -= under_way

    def _answer(self, plan: Plan, dialog: Dialog) -> "_Answered | None":
        """Key and ids of the end of the answer, if a later request will repeat what the state has read: the template
        may drop thinking, and a stop string may have cut the text short."""
        text = self._template.answered(dialog.messages, dialog.tools, dialog.options, plan.shown)
        ids = (*plan.ids, *dialog.answer_ids)
        if text is None or self._tokenizer.canonical_ids(ids) != self._tokenizer.canonical_text(text):
            return None
        keys = boundary_keys(plan.space, text, [len(text)], named_places(text, plan.shown))
        return keys[len(text)], ids


_Answered = tuple[bytes, tuple[int, ...]]  # key and ids of the end of an answer


class _Chunks:
    """The chunk messages behind one head, in order; each can be read once."""

    def __init__(self, count: int, messages: AsyncIterator[pb.GenerateOut]) -> None:
        self.taken_bytes = 0
        self._left = count
        self._messages = messages

    def __aiter__(self) -> "_Chunks":
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        self._left -= 1
        data = (await anext(self._messages)).chunk.data
        self.taken_bytes += len(data)
        return data
