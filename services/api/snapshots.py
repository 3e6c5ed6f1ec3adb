"""Which stored states a prompt can begin with, and which new ones are worth keeping. Owns the choice of boundaries and
the check of what is found; store.py owns Redis, saving.py the way there, the engine what is in a payload.

A state is found by the *text* it has read, at boundaries that the next request will share: the end of the first turn
(system prompt and tools), the end of the history before the newest answer, and the end of an answer as the template
will render it later; and, for a prompt that is given up or changed, at places inside a long text. The *ids* that were
really fed come from the record: text that is tokenised again may give others, and a recurrent state fits no others. So
a prompt is the record's ids and the tokenised rest of its text.

Nothing is believed: a record counts only if its ids spell the text of the prompt up to the boundary.
"""

import asyncio
import logging
import time
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Counter

from services.api.client import Generation
from services.api.exchange import Exchange, LendingError
from services.api.keys import boundary_keys, space_of
from services.api.metrics import Metrics
from services.api.model_folder import ModelFolder
from services.api.naming import Naming
from services.api.places import places
from services.api.records import Head, Record, RecordMemory
from services.api.shown import Shown, named_places
from services.api.spilling import Spilling
from services.api.store import Store
from services.api.templates import Prompt
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)

MOST_CANDIDATES = 128  # boundaries looked up, the newest; older ones of a long dialog would save too little
MOST_OFFERS = 3
NEWEST_KEPT = 2  # stored states of a dialog beside that of its first turn, when a newer one is stored


@dataclass(frozen=True)
class Offer:
    key: bytes
    record: Record
    sendable: bool  # else of use only while the engine still holds it

    @property
    def head(self) -> Head:
        return self.record.head


@dataclass(frozen=True)
class Plan:
    """A prompt's ids, what it may begin with, and what should be kept of it."""

    ids: tuple[int, ...]
    offers: tuple[Offer, ...]  # longest first
    keep: Mapping[int, bytes]  # prompt position -> key of the text before it
    passing: Mapping[int, bytes]  # the same, of those that are of use until a later one is reached
    keep_answer: bool
    heads_only: bool
    space: bytes
    keys: Mapping[int, bytes]  # of all boundaries of the text
    older: tuple[tuple[bytes, bytes], ...] = ()  # key and id of stored states that a newer one replaces
    lends: bool = False  # payloads to the engine, instead of sending them over gRPC
    shown: tuple[Shown, ...] = ()  # its pictures, in order

    def known_to_the_end(self, key: bytes) -> bool:
        """Whether the state of the whole text, which has this key, is where it should be."""
        whole = next((offer for offer in self.offers if offer.key == key), None)
        return whole is not None and (whole.sendable or self.heads_only)

    def refs(self) -> list[pb.StateRef]:
        return [
            pb.StateRef(
                state_id=o.head.state_id,
                tokens=o.head.tokens,
                size_bytes=o.head.size_bytes if o.sendable else 0,
                blocks=o.record.blocks,  # the name is of them too
            )
            for o in self.offers
        ]


class Snapshots:
    """`store` None: only the engine's hot states are used."""

    def __init__(
        self,
        folder: ModelFolder,
        store: Store | None,
        memory: RecordMemory,
        metrics: Metrics,
        min_tokens: int,
        every_tokens: int,
        exchange: Exchange,
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
        self._min_tokens = min_tokens
        self._every_tokens = every_tokens
        self._exchange = exchange
        metrics.store_available.set_function(lambda: float(self.store_available))

    @property
    def store_available(self) -> bool:
        return self._store is not None and self._store.available

    async def plan(self, prompt: Prompt, info: pb.InfoResponse) -> Plan:
        """Never fails for the store's troubles: then the prompt is read from its first token."""
        began = time.perf_counter()
        space = space_of(info.model_fingerprint, info.arithmetic_fingerprint)
        inside = places(prompt.text, self._every_tokens, prompt.history_end or len(prompt.text))
        boundaries = [*prompt.boundaries, *inside]
        keys = boundary_keys(space, prompt.text, boundaries, named_places(prompt.text, prompt.shown))
        await self._naming.ended(keys.values())
        found, older, stored = await self._find(prompt, keys)
        reach = max((offset for offset, one in found.items() if one.sendable), default=0)
        if self._spilling is not None and await self._spilling.bring_back(keys, reach):
            found, older, stored = await self._find(prompt, keys)
        ids, offers, positions, wrong = await asyncio.to_thread(self._compose, prompt, found, inside)
        keep = self._choose(prompt, ids, keys, stored - {offset for offset in found if offset not in offers})
        self._metrics.lookup_s.observe(time.perf_counter() - began)
        await self._forget(wrong)
        return Plan(
            ids=tuple(ids),
            offers=tuple(Offer(keys[offset], offer.record, offer.sendable) for offset, offer in offers.items()),
            keep=keep,
            passing={at: keys[offset] for at, offset in positions.items() if at not in keep and 0 < at < len(ids)},
            keep_answer=prompt.history_end is not None,
            heads_only=not self.store_available,
            space=space,
            keys=keys,
            older=older,
            lends=self._exchange.shared_with(info),
            shown=prompt.shown,
        )

    def unkept(self, ids: Sequence[int], info: pb.InfoResponse) -> Plan:
        """For a prompt that is no dialog: read from its first token, and not kept."""
        space = space_of(info.model_fingerprint, info.arithmetic_fingerprint)
        return Plan(tuple(ids), (), {}, {}, False, True, space, {})

    def passed(self, plan: Plan, state: pb.StateRef) -> None:
        """The engine holds this state while it reads on, in the place of the one before."""
        for at, key in plan.passing.items():
            if at < state.tokens:
                self._memory.forget_hot(key)
            elif at == state.tokens:
                head = Head(state.state_id, at, at, 0, 0, len(state.blocks), state.block_bytes)
                self._memory.put(key, Record(head, array("I", plan.ids[:at]), tuple(state.blocks)))

    def not_held(self, plan: Plan, tokens: int) -> None:
        """The engine began with a state of so many tokens: longer ones that only it could have, it has not."""
        for offer in plan.offers:
            if not offer.sendable and offer.head.tokens > tokens:
                self._memory.forget_hot(offer.key)

    async def send(self, plan: Plan, restore: pb.Restore, generation: Generation) -> bool:
        """Give the engine the payload it asks for; False, and the engine knows, if it cannot be had now."""
        state_id = restore.state.state_id
        offer = next((offer for offer in plan.offers if offer.head.state_id == state_id and offer.sendable), None)
        if offer is None or self._store is None:
            await generation.say_unavailable()
            return False
        began = time.perf_counter()
        whole = await self._transfer(self._store, offer.record, restore.need, generation, plan.lends)
        if whole is not None:
            if whole:
                self._metrics.send_s.observe(time.perf_counter() - began)
            return whole
        await generation.say_unavailable()
        if self._store.available:
            await self.refused(plan, state_id)  # nor could it be sent another time
        return False

    async def _transfer(
        self, store: Store, record: Record, need: Sequence[int], generation: Generation, lends: bool
    ) -> bool | None:
        """Whether the engine got all of it; None: it waits for the rest, which cannot be had."""
        counter = self._metrics.snapshot_bytes["sent",]
        payload = store.bulk(record, need) if lends else None
        if payload is not None:
            try:
                restore = await self._exchange.lend(generation, payload)
            except LendingError as error:
                log.warning("a snapshot could not be lent, it goes over gRPC: %s", error)
            else:
                if restore.source != pb.Restore.SEND:
                    taken = restore.source == pb.Restore.SENT
                    counter.inc(sum(payload.sizes) * taken)
                    return taken
                log.warning("the engine did not take what was lent, it goes over gRPC: %s", restore.reason)
        chunks = await generation.send_payload(_counted(store.read(record, need), counter))
        return True if chunks == record.head.chunks + len(need) else None

    async def refused(self, plan: Plan, state_id: bytes) -> None:
        """The engine does not accept this payload: nobody shall be offered it again."""
        for offer in plan.offers:
            if offer.head.state_id == state_id:
                self._memory.forget(offer.key)
                if self._spilling is not None:
                    self._spilling.forget([offer.key])
                if self._store:
                    await self._store.forget([offer.key], [state_id], offer.record.blocks)

    async def _find(
        self, prompt: Prompt, keys: Mapping[int, bytes]
    ) -> tuple[dict[int, "_Found"], tuple[tuple[bytes, bytes], ...], set[int]]:
        """Offset -> what is known there, longest first: up to the first that can be sent. Then key and state of those
        stored that are of no more use once a longer one is stored: all but the newest, from which an edited last
        message or another answer begins, and the first turn, which other dialogs share. And of the places that would
        be kept those that are stored."""
        newest = sorted(keys, reverse=True)[:MOST_CANDIDATES]
        ends = [offset for offset in (prompt.history_end, prompt.first_turn_end) if offset is not None]
        candidates = {offset: keys[offset] for offset in [*newest, *ends]}
        known = self._memory.find(candidates)
        heads = {offset: record.head for offset, record in known.items()}
        if self._store is not None:
            # One noted as hot alone may be stored by now, by another api.
            unsure = {o: key for o, key in candidates.items() if o not in known or not known[o].head.chunks}
            stored_heads = await self._store.find(unsure)
            heads |= stored_heads
            known = {offset: record for offset, record in known.items() if offset not in stored_heads}
        longest = sorted(heads, reverse=True)
        chosen = longest[:MOST_OFFERS]
        if self._store is None:
            return {offset: _Found(keys[offset], known[offset], False) for offset in chosen}, (), set()
        in_store = [offset for offset in longest if heads[offset].chunks and offset != prompt.first_turn_end]
        older = tuple((keys[offset], heads[offset].state_id) for offset in in_store[NEWEST_KEPT:])
        found: dict[int, _Found] = {}
        for offset in chosen:
            # One after the other: looking at a payload counts as using it, and the next ones are not going to be used.
            (stored,) = await self._store.fetch([(keys[offset], heads[offset], known.get(offset))])
            if stored is not None:
                found[offset] = _Found(keys[offset], stored.record, stored.sendable)
                if stored.sendable:
                    break
        there = await self._store.there([heads[offset] for offset in ends if offset in heads])
        return found, older, {offset for offset in ends if offset in heads and heads[offset].state_id in there}

    def _compose(
        self, prompt: Prompt, found: Mapping[int, "_Found"], inside: Sequence[int]
    ) -> tuple[list[int], dict[int, "_Found"], dict[int, int], list["_Found"]]:
        """The prompt's ids, what is found true, longest first, position -> offset of those places `inside` that are to
        be read, and what is found wrong. A record may be neither: the same text by other ids than a longer one's, as
        when an answer was given twice. It stays for whoever finds no longer one. Runs in a thread: long prompts take a
        while."""
        ids: list[int] | None = None
        positions: dict[int, int] = {}
        true: dict[int, _Found] = {}
        wrong: list[_Found] = []
        for offset, one in found.items():
            record = one.record
            if self._tokenizer.canonical_ids(record.ids) != self._tokenizer.canonical_text(prompt.text[:offset]):
                wrong.append(one)
                continue
            if ids is None:
                ids = self._encode(list(record.ids), prompt.text, offset, inside, positions)
            if array("I", ids[: record.head.tokens]) == record.ids[: record.head.tokens]:
                true[offset] = one
        if ids is None:
            ids = self._encode([], prompt.text, 0, inside, positions)
        return ids, true, positions, wrong

    def _encode(
        self, ids: list[int], text: str, start: int, inside: Sequence[int], positions: dict[int, int]
    ) -> list[int]:
        """`ids` and those of the text from `start` on; notes where the places are."""
        for end in [offset for offset in inside if offset > start]:
            ids += self._tokenizer.encode(text[start:end])
            positions[len(ids)] = start = end
        return ids + self._tokenizer.encode(text[start:])

    def _choose(
        self, prompt: Prompt, ids: Sequence[int], keys: Mapping[int, bytes], stored: set[int]
    ) -> dict[int, bytes]:
        """Positions whose states are worth keeping and not stored yet."""
        if prompt.first_turn_end is None or prompt.history_end is None:
            return {}
        turn_start = self._tokenizer.added[self._template.turn_tokens[0]].id
        starts = [position for position, token_id in enumerate(ids) if token_id == turn_start]
        wanted = {prompt.first_turn_end: starts[1], prompt.history_end: starts[-1]}
        keep: dict[int, bytes] = {}
        before = 0
        for offset, position in sorted(wanted.items()):
            if position - before >= self._min_tokens:
                if offset not in stored:
                    keep[position] = keys[offset]
                before = position
        return keep

    async def _forget(self, wrong: Sequence["_Found"]) -> None:
        for one in wrong:
            self._metrics.mismatches.inc()
            self._memory.forget(one.key)
        if self._spilling is not None:
            self._spilling.forget(one.key for one in wrong)
        if self._store and wrong:
            log.warning("%d stored records do not fit their text; removed", len(wrong))
            await self._store.forget([one.key for one in wrong])


async def _counted(chunks: AsyncIterator[bytes], counter: Counter) -> AsyncIterator[bytes]:
    async for chunk in chunks:
        yield chunk
        counter.inc(len(chunk))


@dataclass(frozen=True)
class _Found:
    key: bytes
    record: Record
    sendable: bool

    @property
    def head(self) -> Head:
        return self.record.head
