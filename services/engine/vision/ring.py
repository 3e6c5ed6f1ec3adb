"""Weights on their way to a card: from the file through page-locked memory to a few slots there. Owns all three.

Threads read pieces of the file ahead into buffers; a stream of its own copies each to a slot as soon as the piece that
lay there was used; the caller computes with one piece while the next is copied. With a buffer for every piece the file
is read once and all of it stays in RAM; with a few the weights take hardly any. On a processor the same path runs
without streams.

What orders what: a buffer is read into after its last copy ended (`_copied`), a slot is copied to after its last piece
was used (`_used`), and the caller's stream waits for the copy of what it is given. The caller may be at most one piece
ahead of the card, so that whoever uses the card next waits for little.
"""

import mmap
import os
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress

import torch
from torch import Tensor

from services.engine.errors import CheckpointError, MemoryPlanError
from services.engine.gpu.room import ALIGNED_BYTES
from services.engine.state import host_view
from services.engine.vision.pieces import Part, Piece, Pieces

SLOTS = 2
BUFFERS = 3  # one is read, one is full, one is copied
READERS = 4
_READ_BYTES = 8 << 20  # of one thread at a time


class Mark:
    """A place in a stream's order of work; on a processor everything before it is done already."""

    def __init__(self, cuda: bool) -> None:
        self._event = torch.cuda.Event(blocking=True) if cuda else None  # type: ignore[no-untyped-call]

    def set(self, stream: "torch.cuda.Stream | None") -> None:
        if self._event is not None:
            self._event.record(stream)

    def before(self, stream: "torch.cuda.Stream | None") -> None:
        """Nothing that `stream` gets from now on begins before it."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Ring:
    """Used by one thread, for one picture at a time. `resident`: every piece keeps its buffer."""

    def __init__(self, pieces: Pieces, slots: Tensor, *, resident: bool = False) -> None:
        """`slots` uint8 [any number, pieces.most_bytes], which others may use while no piece is being given. Raises
        MemoryPlanError if the system does not page-lock the buffers."""
        self.order, self.resident, self.slots = pieces.order, resident, slots
        cuda = slots.device.type == "cuda"
        self._device = device = slots.device
        sizes = [piece.size_bytes for piece in self.order] if resident else [pieces.most_bytes] * BUFFERS
        self._memory = _page_aligned(sum(sizes))
        self._locked = cuda
        if cuda:
            _page_lock(self._memory)
        self.buffers = list(torch.split(self._memory, sizes))
        self._held = [False] * len(self.buffers)
        self._copied = [Mark(cuda) for _ in self.buffers]
        self._arrived = [Mark(cuda) for _ in slots]
        self._used = [Mark(cuda) for _ in slots]
        self._copies = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._file = os.open(pieces.path, os.O_RDONLY)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="vision")
        self._reads: list[list[Future[None]]] = []

    @property
    def device_bytes(self) -> int:
        return self.slots.nbytes

    @property
    def host_bytes(self) -> int:
        return self._memory.nbytes

    def pieces(self) -> Generator[dict[str, Tensor], None, None]:
        """The tensors of every piece in order, in the file's types. Those of one are gone when the next is asked for.

        Raises CheckpointError if the file has become shorter.
        """
        self._reads, sent = [], 0
        slots = len(self.slots)
        stream = torch.cuda.current_stream(self._device) if self._copies else None
        if self._copies is not None and stream is not None:
            self._copies.wait_stream(stream)  # whoever used the slots before
        try:
            for number, piece in enumerate(self.order):
                self._read_ahead(number + len(self.buffers))
                ahead = min(number + slots, len(self.order))  # their slots were used
                while sent <= number or (sent < ahead and self._is_read(sent)):
                    self._send(sent)
                    sent += 1
                slot = number % slots
                self._arrived[slot].before(stream)
                if number > 1:
                    self._used[(number - 2) % slots].wait()
                memory = self.slots[slot]
                try:
                    yield {part.name: part.view(memory) for part in piece.parts}
                finally:
                    self._used[slot].set(stream)
        finally:
            for arrived in self._arrived:
                arrived.before(stream)  # of a picture that was given up, copies may be on their way
            for reads in self._reads:
                for read in reads:
                    read.cancel()
            for read in (read for reads in self._reads for read in reads if not read.cancelled()):
                read.exception()  # what was begun writes into a buffer

    def close(self) -> None:
        """Once no generator is left and the card is idle."""
        self._threads.shutdown()
        os.close(self._file)
        if self._locked:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())  # type: ignore[no-untyped-call]
            self._locked = False

    def _read_ahead(self, stop: int) -> None:
        """Have the threads read all pieces before `stop`: the copies out of their buffers were asked for."""
        for number in range(len(self._reads), min(stop, len(self.order))):
            buffer = number % len(self.buffers)
            if self._held[buffer]:
                self._reads.append([])
                continue
            reads = [
                self._threads.submit(self._read, buffer, part, done, min(_READ_BYTES, part.size_bytes - done))
                for part in self.order[number].parts
                for done in range(0, part.size_bytes, _READ_BYTES)
            ]
            self._reads.append(reads)

    def _read(self, buffer: int, part: Part, done: int, size_bytes: int) -> None:
        self._copied[buffer].wait()
        first = part.place + done
        left = host_view(self.buffers[buffer][first : first + size_bytes])
        offset = part.offset + done
        while left:
            count = os.preadv(self._file, [left], offset)
            if not count:
                raise CheckpointError(f"the vision weights end inside {part.name}: run thimble repack again")
            left, offset = left[count:], offset + count

    def _is_read(self, number: int) -> bool:
        return number < len(self._reads) and all(read.done() for read in self._reads[number])

    def _send(self, number: int) -> None:
        for read in self._reads[number]:
            read.result()
        piece: Piece = self.order[number]
        buffer, slot = number % len(self.buffers), number % len(self.slots)
        self._held[buffer] = self.resident
        self._used[slot].before(self._copies)
        with torch.cuda.stream(self._copies) if self._copies else nullcontext():
            self.slots[slot][: piece.size_bytes].copy_(self.buffers[buffer][: piece.size_bytes], non_blocking=True)
        self._copied[buffer].set(self._copies)
        self._arrived[slot].set(self._copies)


def ring_bytes(pieces: Pieces) -> int:
    """Page-locked, where nothing stays."""
    return BUFFERS * pieces.most_bytes


def _page_aligned(size_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(-1, max(size_bytes, ALIGNED_BYTES)), dtype=torch.uint8)[:size_bytes]


def _page_lock(memory: Tensor) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))  # type: ignore[no-untyped-call]
    if not status:
        return
    with suppress(RuntimeError):  # the runtime keeps a refused call's error for the next launch to report: this one
        torch.zeros(1, device="cuda")
    raise MemoryPlanError(
        f"the system refused to page-lock {memory.nbytes / 2**20:.0f} MiB for the vision weights (CUDA error "
        f"{status}): allow it (ulimit -l unlimited)"
    )
