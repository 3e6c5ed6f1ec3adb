"""States kept in RAM after the model has moved on: within a budget, the longest unused leaves first.

They are kept as payloads: one form serves for keeping, sending and restoring, and no KV page belongs to a state that
nobody is running. States of one dialog share their KV blocks: each is held once. A request pins what it still owes its
client; what is pinned stays. For that there is `transit_bytes` of room, so that snapshots reach their store even with
no budget at all; unpinned states never take more than the budget. If there is no room, a new state is not kept. Used by
the engine's thread only; the chunks themselves never change and may be read by any thread.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from services.engine.request import StateRef
from services.engine.snapshots.memory import Fresh, Memory, OwnPart, fresh
from services.engine.snapshots.payload import PayloadFormat, state_id
from services.engine.state import State, copy


@dataclass
class Stored:
    """One state's payload: chunks of its own part, and its KV blocks, which other states may hold too. `pins` counts
    the requests that still owe it to a client."""

    ref: StateRef
    chunks: OwnPart
    blocks: tuple[bytes, ...]
    pins: int = 0


@dataclass
class _Block:
    data: bytes
    states: int  # that hold it


class HotStates:
    """`used_bytes` never exceeds `budget_bytes` or, while states are pinned, `transit_bytes`, whichever is larger."""

    def __init__(
        self,
        payloads: PayloadFormat,
        arithmetic_fingerprint: str,
        budget_bytes: int,
        transit_bytes: int = 0,
        fresh: Fresh = fresh,
    ) -> None:
        """`fresh` gives memory for own parts: for a device that copies by itself, of a kind that it can."""
        self.payloads = payloads
        self.budget_bytes = budget_bytes
        self.transit_bytes = max(transit_bytes, budget_bytes)
        self.used_bytes = 0
        self._fingerprint = arithmetic_fingerprint
        self._memory = Memory(fresh)
        self._states: OrderedDict[bytes, Stored] = OrderedDict()  # by state id, the longest unused first
        self._blocks: dict[bytes, _Block] = {}

    def __len__(self) -> int:
        return len(self._states)

    def name(self, ids: Sequence[int], blocks: tuple[bytes, ...] = ()) -> StateRef:
        """The state that has consumed `ids` and has these blocks, as it is called everywhere."""
        form, name = self.payloads, state_id(self._fingerprint, ids, blocks)
        return StateRef(name, len(ids), form.own_bytes(len(ids)), blocks, form.block_bytes)

    def choose(self, offers: Iterable[StateRef], ids: Sequence[int]) -> StateRef | None:
        """The first offer that is a state of a true prefix of `ids` and either held here or for the client to send.

        A name is a hash of ids, arithmetic and blocks, so one that matches cannot be of another text or model.
        """
        for offer in offers:
            if not 0 < offer.tokens < len(ids):
                continue
            ref = self.name(ids[: offer.tokens], offer.blocks)
            if ref.state_id != offer.state_id:
                continue
            whole = ref.size_bytes == offer.size_bytes and len(offer.blocks) == self.payloads.blocks(offer.tokens)
            if ref.state_id in self._states or whole:
                return ref
        return None

    def get(self, ref: StateRef) -> Stored | None:
        """The state, now the most recently used one; None if it is not held."""
        stored = self._states.get(ref.state_id)
        if stored is not None:
            self._states.move_to_end(ref.state_id)
        return stored

    def held_blocks(self, names: Iterable[bytes]) -> dict[bytes, bytes]:
        """Those of the named blocks that are here, with their bytes."""
        return {name: self._blocks[name].data for name in names if name in self._blocks}

    def keep(self, ref: StateRef, chunks: Iterable[bytes], blocks: Mapping[bytes, bytes]) -> Stored | None:
        """Hold a payload, if it is not held yet; None if there is no room, and then `chunks` is not read. `blocks` are
        those by name that are not held already."""

        def dump(target: memoryview) -> None:
            for chunk in chunks:
                copy(target[: len(chunk)], chunk)
                target = target[len(chunk) :]

        return self.get(ref) or self._add(ref, dump, blocks.__getitem__, owed=False)

    def take(self, state: State, owed: bool) -> tuple[Stored | None, str]:
        """Hold `state` as it is now, and how that went: taken, held (already), or dropped (no room)."""
        ref = self.name(state.ids, self.payloads.name_blocks(state))
        held = self.get(ref)
        if held is not None:
            return held, "held"
        numbers = {name: number for number, name in enumerate(ref.blocks)}

        def dump_block(name: bytes) -> bytes:
            return self.payloads.dump_block(state, numbers[name])

        stored = self._add(ref, lambda target: self.payloads.dump(state, target), dump_block, owed)
        return stored, "taken" if stored else "dropped"

    def load(self, stored: Stored, state: State) -> int:
        """Put what is held into a fresh state -> how many ids it has consumed."""
        self.payloads.load(stored.chunks.data, stored.blocks, state)
        return stored.ref.tokens

    def let_go(self, stored: Stored) -> None:
        """It is of no more use; unless somebody is still owed it."""
        if not stored.pins and self._states.get(stored.ref.state_id) is stored:
            self._remove(stored)

    def trim(self) -> None:
        """Pins were taken off: back to the budget."""
        for stored in list(self._states.values()):
            if self.used_bytes <= self.budget_bytes:
                return
            if not stored.pins:
                self._remove(stored)

    def check(self) -> None:
        """Conservation: the sizes add up and fit the budget. Raises AssertionError with the numbers."""
        held = sum(len(stored.chunks.data) for stored in self._states.values())
        held += sum(len(block.data) for block in self._blocks.values())
        users = sum(len(set(stored.ref.blocks)) for stored in self._states.values())
        assert users == sum(block.states for block in self._blocks.values()), "blocks count other states than hold them"
        limit = self.transit_bytes if any(stored.pins for stored in self._states.values()) else self.budget_bytes
        assert held == self.used_bytes <= limit, (
            f"hot states hold {held} bytes, counted {self.used_bytes}, budget {limit}"
        )

    def _add(
        self, ref: StateRef, dump: Callable[[memoryview], None], block_of: Callable[[bytes], bytes], owed: bool
    ) -> Stored | None:
        if not self._make_room(ref, owed):
            return None
        own = self._memory.take(ref.size_bytes)
        dump(own.data)
        for name in set(ref.blocks):
            if name in self._blocks:
                self._blocks[name].states += 1
            else:
                self._blocks[name] = _Block(block_of(name), 1)
        blocks = tuple(self._blocks[name].data for name in ref.blocks)
        self.used_bytes += self._new_bytes(ref, 1)
        stored = self._states[ref.state_id] = Stored(ref, own, blocks)
        return stored

    def _new_bytes(self, ref: StateRef, states: int) -> int:
        """Bytes that are there for `ref` alone, if blocks that only it uses count as `states`."""
        own = sum(name not in self._blocks or self._blocks[name].states == states for name in set(ref.blocks))
        return ref.size_bytes + own * self.payloads.block_bytes

    def _remove(self, stored: Stored) -> None:
        self.used_bytes -= self._new_bytes(stored.ref, 1)
        del self._states[stored.ref.state_id]
        for name in set(stored.ref.blocks):
            self._blocks[name].states -= 1
            if not self._blocks[name].states:
                del self._blocks[name]

    def _make_room(self, ref: StateRef, owed: bool) -> bool:
        """Let go of the longest unused states until `ref` fits; False, and nothing let go, if it cannot."""
        pinned = [stored.ref for stored in self._states.values() if stored.pins]
        stays = {name for other in pinned for name in other.blocks} | set(ref.blocks)
        stays_bytes = sum(other.size_bytes for other in [*pinned, ref]) + len(stays) * self.payloads.block_bytes
        if stays_bytes > (self.transit_bytes if owed else self.budget_bytes):
            return False
        for stored in list(self._states.values()):
            if self.used_bytes + self._new_bytes(ref, 0) <= self.budget_bytes:
                break
            if not stored.pins:
                self._remove(stored)
        return True
