"""A payload that a client sends, on its way into a state: each chunk goes where it belongs as it arrives. Owns what has
arrived until it is whole; says what is wrong with it, and leaves the consequences to the scheduler.
"""

from services.engine.errors import PayloadError
from services.engine.exchange import Lent
from services.engine.request import StateRef
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import Loader
from services.engine.state import State


class Arriving:
    """`need` are the numbers of the blocks that the client has to send: the others are hot already, and are held on to
    from now on."""

    def __init__(self, ref: StateRef, state: State, hot: HotStates) -> None:
        self.ref = ref
        self.chunks: list[bytes] = []
        self.lent = False  # whether any of it lay in the client's memory: then chunks and blocks are not complete
        self.blocks = hot.held_blocks(ref.blocks)
        self.need = tuple(number for number, name in enumerate(ref.blocks) if name not in self.blocks)
        self._hot = hot
        self._state = state
        self._loader = Loader(hot.payloads, state)
        self._due = list(reversed(self.need))
        self.received_bytes = 0

    def add(self, data: bytes | Lent) -> bool:
        """One more chunk; True when all has arrived and the state is the one that was offered. Raises EngineError."""
        loader, names = self._loader, self.ref.blocks
        self.received_bytes += len(data)
        self.lent |= not isinstance(data, bytes)
        if not loader.own_part_done:
            if isinstance(data, bytes):
                self.chunks.append(data)
                loader.feed(data)
            else:
                loader.fill(len(data), data.read)
            if not loader.own_part_done:
                return False
            if loader.names != names or self._hot.name(self._state.ids).state_id != self.ref.state_id:
                raise PayloadError("snapshot: it holds another state than the one that was offered")
            for number, name in enumerate(names):
                if name in self.blocks:
                    loader.put_block(number, self.blocks[name])
        elif self._due:
            number = self._due.pop()
            if isinstance(data, bytes):
                self.blocks[names[number]] = data
                loader.put_block(number, data)
            else:
                loader.fill_block(number, len(data), data.read)
        if self._due:
            return False
        loader.finish()
        return True
