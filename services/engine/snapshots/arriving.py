"""A payload that a client sends, on its way into a state: each chunk goes where it belongs as it arrives. Owns what has
arrived until it is whole; says what is wrong with it, and leaves the consequences to the scheduler.
"""

import time

from services.engine.errors import PayloadError, TransferError
from services.engine.exchange import Lent
from services.engine.request import StateRef
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import Loader
from services.engine.state import State

SLICE_S = 0.02  # that others wait while a lent connection is read


class Arriving:
    """`need` are the numbers of the blocks that the client has to send: the others are hot already, and are held on to
    from now on."""

    def __init__(self, ref: StateRef, state: State, hot: HotStates) -> None:
        self.ref = ref
        self.chunks: list[bytes] = []
        self.damaged = False  # whether its bytes were looked at, and are wrong
        self.lent = False  # whether it came on a lent connection: then chunks and blocks are not there to be kept
        self.blocks = hot.held_blocks(ref.blocks)
        self.need = tuple(number for number, name in enumerate(ref.blocks) if name not in self.blocks)
        self._hot = hot
        self._state = state
        self._loader = Loader(hot.payloads, state, ref.tokens)
        self._due = list(reversed(self.need))
        self.received_bytes = 0

    def add(self, data: bytes | Lent) -> bool:
        """One more chunk, or what has come on a connection, which is closed at the end; True when all has arrived and
        the state is the one that was offered. Raises EngineError."""
        whole = False
        try:
            whole = self._read(data) if isinstance(data, Lent) else self._add_chunk(data)
            if whole:
                self._loader.finish()
        except BaseException as error:
            self.damaged = isinstance(error, PayloadError)
            whole = True
            raise
        finally:
            if whole and isinstance(data, Lent):
                data.close()
        return whole

    def _add_chunk(self, data: bytes) -> bool:
        loader = self._loader
        self.received_bytes += len(data)
        if not loader.own_part_done:
            self.chunks.append(data)
            loader.feed(data)
            if loader.own_part_done:
                self._own_part_came()
        elif self._due:
            number = self._due.pop()
            self.blocks[self.ref.blocks[number]] = data
            loader.put_block(number, data)
        return loader.own_part_done and not self._due

    def _read(self, lent: Lent) -> bool:
        """Whether all has come. If not, the connection is waited for."""
        self.lent = True
        if lent.size_bytes != self.ref.size_bytes + len(self.need) * self.ref.block_bytes:
            raise TransferError("snapshot: another number of bytes was announced than the state has")
        loader, until = self._loader, time.perf_counter() + SLICE_S
        while self._due or loader.room is not None:
            if loader.room is None:
                loader.begin_block(self._due.pop())
            assert loader.room is not None
            own_part = not loader.own_part_done
            count = lent.read(loader.room)
            if count:
                self.received_bytes += count
                loader.advance(count)
                if own_part and loader.own_part_done:
                    self._own_part_came()
            if (not count or time.perf_counter() > until) and (self._due or loader.room is not None):
                lent.wait()
                return False
        return True

    def _own_part_came(self) -> None:
        loader, names = self._loader, self.ref.blocks
        if loader.names != names or self._hot.name(self._state.ids, names).state_id != self.ref.state_id:
            raise PayloadError("snapshot: it holds another state than the one that was offered")
        for number, name in enumerate(names):
            if name in self.blocks:
                loader.put_block(number, self.blocks[name])
