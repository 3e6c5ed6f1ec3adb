"""One GPU's hand-off with the host library: the memory both see, the launches for the graph, and `serve` for the host.

Owns the mapped memory and flags (described in ../handoff.py) and the page-locking of the host library's slots; the
expert buffers are ExpertStep's. Everything is allocated here, before a graph is captured. Order of one MoE layer:

    post -> step.launch_quantise -> launch_waves -> wait_results -> step.launch_combine
"""

import contextlib
import ctypes
from enum import IntEnum
from itertools import accumulate, pairwise

import torch
import triton

from kernels.experts import handoff
from kernels.experts.decode_step import ExpertStep
from kernels.experts.device.context import current_context
from kernels.experts.device.times import Times
from kernels.experts.device.vram_slots import VramSlots
from kernels.experts.host.binding import Host
from kernels.experts.host.replay import hinted
from kernels.workers.pool import native

Tensor = torch.Tensor

CACHE_LINE = 128  # Turns::CACHE_LINE
TIMEOUT_NS = 100_000_000  # longest wait of the GPU for the host
MESSAGE_BYTES = 512
LOCKED_AT_ONCE_BYTES = 1 << 30


class Route(IntEnum):
    """An expert's bytes are read where they lie; or `up` is copied first (the published method); or all are copied."""

    IN_PLACE = 0
    COPY_UP = 1
    COPY_BLOCK = 2


class HandoffError(RuntimeError):
    """A turn did not end as it should; the token's result is void. The message says what happened."""

    code = "handoff_failed"


class SharedSlots:
    """A host library's slots, page-locked so that the GPU can read them. `close` before the host is closed.

    `vram`: blocks that the GPU has in its own memory, too, if some are kept there; closed with these.

    Locked in steps of whole blocks, as many as the system allows. Where it refuses (WSL2: at about half of its RAM),
    the host gives the other slots up, and `notice` says so. Raises HandoffError if not even `least` slots are allowed.
    """

    def __init__(self, host: Host, least: int = 1) -> None:
        self.host = host
        self.notice = ""
        self.vram: VramSlots | None = None
        self.start, size_bytes = host.memory()
        block_bytes = host.catalog.layout.block_bytes
        step_bytes = max(1, LOCKED_AT_ONCE_BYTES // block_bytes) * block_bytes
        self.pieces: list[tuple[int, int]] = []  # address and bytes of each; no copy may cross from one to the next
        done, status = 0, 0
        while done < size_bytes and not status:
            count = min(step_bytes, size_bytes - done)
            status = int(torch.cuda.cudart().cudaHostRegister(self.start + done, count, 0))  # type: ignore[no-untyped-call]
            if not status:
                self.pieces.append((self.start + done, count))
                done += count
        if not status:
            return
        _forget_error()
        asked, got = size_bytes / 2**30, done / 2**30
        what = "allow it (ulimit -l unlimited) or make the expert cache smaller"
        if done // block_bytes < max(1, least):
            self.close()
            raise HandoffError(
                f"the system refused to page-lock {asked:.1f} GiB of expert slots (CUDA error {status}): {what}"
            )
        host.shrink(done // block_bytes)
        self.notice = (
            f"the system page-locked only {got:.1f} of {asked:.1f} GiB of expert slots (CUDA error {status}); "
            f"the cache is as large as that: {what}"
        )

    def keep_in_vram(self, slots: int, device: torch.device) -> None:
        """From now on the hottest blocks, before any turns are made."""
        self.vram = VramSlots(self.host, slots, device)

    def close(self) -> None:
        if self.vram is not None:
            self.vram.close()
            self.vram = None
        while self.pieces:
            torch.cuda.cudart().cudaHostUnregister(self.pieces.pop()[0])  # type: ignore[no-untyped-call]


class Turns:
    """For slots that the GPU can read, and the step's buffers. Used by the thread that owns both.

    `guesses`: 0, or tokens * top_k: so many ids of the next layer are posted with a layer's own, to be prefetched.
    `hints`: of each token's; 0: as many as are worth it.
    `waves`: how many items each announces; together at least the step's. One wave of all items if none are given.
    `apart`: each wave in a stream of its own.
    """

    def __init__(
        self,
        slots: SharedSlots,
        step: ExpertStep,
        waves: tuple[int, ...] = (),
        timeout_ns: int = TIMEOUT_NS,
        guesses: int = 0,
        apart: bool = False,
        hints: int = 0,
    ) -> None:
        latent, lookups = step.layout.latent, step.tokens * step.top_k

        def mapped(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, pin_memory=True)

        self.library = native()
        self.step = step
        ends = list(accumulate(waves or (step.items,)))
        if ends[-1] < step.items:
            raise ValueError(f"waves of {waves} items do not cover {step.items}")
        self.sides = [torch.cuda.Stream() for _ in ends[1:]] if apart else []  # type: ignore[no-untyped-call]
        self.wave_starts = [0, *(min(end, step.items) for end in ends)]
        self.timeout_ns, self.guesses = timeout_ns, guesses
        flag_words = CACHE_LINE // 4
        lines = torch.split(mapped(flag_words * (3 + len(ends)), torch.int32), flag_words)
        self.posted, self.finished, self.stopped, *self.planned = (line[:1] for line in lines)
        self.ids = mapped(lookups + guesses + 1, torch.int32)
        self.x = mapped(step.tokens * latent, torch.float32)
        self.plan = mapped(step.plan_words.total, torch.int64)
        self.results = mapped((lookups + 1) * latent, torch.float32)
        self.waited = mapped(1, torch.int64)
        self.turn = torch.zeros(1, dtype=torch.int32, device=step.device)
        self.stop = torch.zeros(1, dtype=torch.int32, device=step.device)
        step.host_y = self.results.view(lookups + 1, latent)
        flags = (self.posted, self.planned[0], self.finished)
        places = (*flags, self.ids, self.x, self.plan, self.results, self.waited, self.stopped)
        words = step.plan_words
        parts = (words.count, words.table, words.scale_2, words.source)
        shape = (step.tokens, step.top_k, step.items, guesses, hints or hinted(step.top_k), *parts)
        sizes = (*shape, len(ends), *self.wave_starts[1:])
        self.library.thimble_turns_open.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(
            self.library.thimble_turns_open(
                ctypes.c_void_p(slots.host.address),
                (ctypes.c_uint64 * len(places))(*(place.data_ptr() for place in places)),
                (ctypes.c_int32 * len(sizes))(*sizes),
            )
        )
        if slots.vram is not None:
            self.library.thimble_turns_use(self.handle, slots.vram.handle)
        self.staging: Tensor | None = None

    def copy_through(self, route: Route, lanes: int = 2) -> None:
        """Bring bytes by the copy engine instead of reading them in place. Before any graph is captured."""
        self.staging = torch.zeros(
            self.step.items * self.step.layout.block_bytes, dtype=torch.uint8, device=self.step.device
        )
        self._call(
            "thimble_turns_copy_through",
            ctypes.c_void_p(current_context()),
            ctypes.c_int(route),
            ctypes.c_uint64(self.staging.data_ptr()),
            ctypes.c_int(lanes),
        )

    def share(self, fixed: int | None = None, initial: float = 0.0) -> None:
        """How many of the hits the GPU takes: always `fixed`, or as many as makes both sides finish together."""
        self.library.thimble_turns_share(
            self.handle, ctypes.c_int(-1 if fixed is None else fixed), ctypes.c_double(initial)
        )

    def post(self, layer: int, ids: Tensor, x: Tensor) -> None:
        """ids int32 [tokens, top_k] (and the guesses behind them) and x float32 [tokens, latent] go to the host; a turn
        begins."""
        handoff.post_kernel[(1,)](
            self.turn,
            self.stop,
            self.posted,
            layer,
            ids,
            x,
            self.ids,
            self.x,
            IDS=ids.numel(),
            IDS_PADDED=triton.next_power_of_2(ids.numel() + 1),
            VALUES=x.numel(),
            VALUES_PADDED=triton.next_power_of_2(x.numel()),
            num_warps=4,
        )

    def wait_plan(self, wave: int = 0) -> None:
        """Until the host has said what the GPU computes; with the first wave comes the plan itself."""
        self._wait(self.planned[wave], self.step.plan_words.total if wave == 0 else 0)

    def launch_waves(self, whole_groups: bool = False) -> None:
        """Each wave's experts, as soon as its bytes are announced; with `apart` not after the wave before it."""
        main = torch.cuda.current_stream()
        self.wait_plan(0)
        planned = main.record_event() if self.sides else None
        for wave, (first, end) in enumerate(pairwise(self.wave_starts)):
            if planned is None or wave == 0:
                if wave:
                    self.wait_plan(wave)
                self.step.launch_items(first, end - first, whole_groups)
                continue
            side = self.sides[wave - 1]
            with torch.cuda.stream(side):
                side.wait_event(planned)
                self.wait_plan(wave)
                self.step.launch_items(first, end - first, whole_groups)
            main.wait_event(side.record_event())

    def wait_results(self) -> None:
        self._wait(self.finished, 0)

    def _wait(self, flag: Tensor, words: int) -> None:
        handoff.wait_kernel[(1,)](
            self.turn,
            flag,
            self.stop,
            self.stopped,
            self.timeout_ns,
            self.waited,
            self.plan,
            self.step.plan,
            PLAN=words,
            PLAN_PADDED=triton.next_power_of_2(max(1, words)),
            num_warps=1,
        )

    def serve(self, turns: int, timeout_us: int = 1_000_000) -> int:
        """The host's part of `turns` turns of launches that are queued -> how many were served.

        Fewer, if the GPU gave up waiting in the last of them: see `go_on`. Raises HandoffError.
        """
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        served = self.library.thimble_turns_serve(
            self.handle, ctypes.c_int(turns), ctypes.c_int64(timeout_us), message, ctypes.c_int64(MESSAGE_BYTES)
        )
        if served < 0:
            raise HandoffError(message.value.decode(errors="replace"))
        return int(served)

    def go_on(self) -> None:
        """The GPU gave up in a turn that is served by now, and what was launched has ended.

        Launch that turn again from `launch_quantise` on, without `post`, and all that follows it.
        """
        self.stop.zero_()
        self.stopped.zero_()

    def retire(self) -> None:
        """The graph has ended: the GPU holds no block. After a failure this also makes the next graph possible."""
        self._call("thimble_turns_retire")
        if int(self.stopped):
            self.go_on()

    def times(self) -> Times:
        self.library.thimble_turns_time_names.restype = ctypes.c_char_p
        names = self.library.thimble_turns_time_names().decode().split()
        values = (ctypes.c_int64 * len(names))()
        self.library.thimble_turns_times(self.handle, values)
        return Times(**dict(zip(names, values, strict=True)))

    def close(self) -> None:
        """Before the host is closed; no graph may be running."""
        self.library.thimble_turns_close(self.handle)

    def _call(self, name: str, *arguments: object) -> None:
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        if getattr(self.library, name)(self.handle, *arguments, message, ctypes.c_int64(MESSAGE_BYTES)):
            raise HandoffError(message.value.decode(errors="replace"))


def _forget_error() -> None:
    """The runtime keeps a refused call's error for the next launch to report; here is that launch."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")
