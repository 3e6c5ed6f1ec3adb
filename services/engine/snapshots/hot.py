"""States kept in RAM after the model has moved on: within a budget, the longest unused leaves first.

They are kept as payloads: one form serves for keeping, sending and restoring, and no KV page belongs to a state that
nobody is running. A request pins what it still owes its client; what is pinned stays, and if nothing else can leave, a
new state is not kept. So the budget holds whatever clients do. Used by the engine's thread only; the chunks themselves
never change and may be read by any thread.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.engine.request import StateRef
from services.engine.snapshots.payload import PayloadFormat, state_id
from services.engine.state import State


@dataclass
class Stored:
    """One state's payload, each chunk at most 1 MiB. `pins` counts the requests that still owe it to a client."""

    ref: StateRef
    chunks: tuple[bytes, ...]
    pins: int = 0


class HotStates:
    """`used_bytes` never exceeds `budget_bytes`."""

    def __init__(self, payloads: PayloadFormat, arithmetic_fingerprint: str, budget_bytes: int) -> None:
        self.payloads = payloads
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._fingerprint = arithmetic_fingerprint
        self._states: OrderedDict[bytes, Stored] = OrderedDict()  # by state id, the longest unused first

    def __len__(self) -> int:
        return len(self._states)

    def name(self, ids: Sequence[int]) -> StateRef:
        """The state that has consumed `ids`, as it is called everywhere."""
        return StateRef(state_id(self._fingerprint, ids), len(ids), self.payloads.size_bytes(len(ids)))

    def choose(self, offers: Iterable[StateRef], ids: Sequence[int]) -> StateRef | None:
        """The first offer that is a state of a true prefix of `ids` and either held here or for the client to send.

        A name is a hash of ids and arithmetic, so one that matches cannot be of another text or model.
        """
        for offer in offers:
            if not 0 < offer.tokens < len(ids):
                continue
            ref = self.name(ids[: offer.tokens])
            if ref.state_id == offer.state_id and (ref.state_id in self._states or ref.size_bytes == offer.size_bytes):
                return ref
        return None

    def get(self, ref: StateRef) -> Stored | None:
        """The state, now the most recently used one; None if it is not held."""
        stored = self._states.get(ref.state_id)
        if stored is not None:
            self._states.move_to_end(ref.state_id)
        return stored

    def keep(self, ref: StateRef, chunks: Iterable[bytes]) -> Stored | None:
        """Hold a payload, if it is not held yet; None if there is no room, and then `chunks` is not read."""
        stored = self.get(ref)
        if stored is None and self._make_room(ref.size_bytes):
            stored = self._states[ref.state_id] = Stored(ref, tuple(chunks))
            self.used_bytes += ref.size_bytes
        return stored

    def take(self, state: State) -> tuple[Stored | None, str]:
        """Hold `state` as it is now, and how that went: taken, held (already), or dropped (no room)."""
        ref = self.name(state.ids)
        held = self.get(ref)
        if held is not None:
            return held, "held"
        stored = self.keep(ref, self.payloads.dump(state))
        return stored, "taken" if stored else "dropped"

    def check(self) -> None:
        """Conservation: the sizes add up and fit the budget. Raises AssertionError with the numbers."""
        held = sum(len(chunk) for stored in self._states.values() for chunk in stored.chunks)
        assert held == self.used_bytes <= self.budget_bytes, (
            f"hot states hold {held} bytes, counted {self.used_bytes}, budget {self.budget_bytes}"
        )

    def _make_room(self, size_bytes: int) -> bool:
        """Let go of the longest unused states until `size_bytes` fit; False, and nothing let go, if they cannot."""
        pinned_bytes = sum(stored.ref.size_bytes for stored in self._states.values() if stored.pins)
        if pinned_bytes + size_bytes > self.budget_bytes:
            return False
        for stored in list(self._states.values()):
            if self.used_bytes + size_bytes <= self.budget_bytes:
                break
            if not stored.pins:
                del self._states[stored.ref.state_id]
                self.used_bytes -= stored.ref.size_bytes
        return True
