"""The network on one GPU, as the scheduler asks for it: services/engine/model.py's `forward` through captured graphs.

Owns a decoder for every number of rows that a step can have, and the sweep that reads prompts. A segment that says so
is swept, any other takes the decode path, as many ids of all segments in a step as there are rows; on either a token's
bits depend neither on how its segment was cut nor on what else was in the call. A draft is one more row of its segment,
at most one. One thread's.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property

import torch
import triton
from torch import Tensor

import kernels.attention.gpu as attention
import kernels.experts.decode_step as experts
import kernels.linear.gpu as linear
import kernels.mamba.gpu as mamba
import kernels.norm.gpu as norm
import kernels.router.gpu as router
from kernels.experts.device.turns import HandoffError, SharedSlots
from kernels.experts.host.binding import BlockError
from kernels.mamba.settle import settle
from services.engine.errors import DeviceError, StepError
from services.engine.experts.trace import Recorder
from services.engine.gpu import counts, sweep
from services.engine.gpu.counts import DeviceCounts
from services.engine.gpu.decoder import Decoder, Placement, Row
from services.engine.gpu.expert_sweep import ExpertSweep
from services.engine.gpu.head import DeviceHead
from services.engine.gpu.ledger import MOST_SEQUENCES, sweep_room_bytes, sweep_scratch_bytes
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.room import Room
from services.engine.gpu.sweep import Sweep
from services.engine.gpu.token import Replay
from services.engine.gpu.tracing import Tracing
from services.engine.gpu.weights import DeviceWeights, HeadWeights, MambaWeights
from services.engine.model import GaveWay, Segment
from services.engine.spent import Spent
from services.engine.state import Pending, State
from services.engine.vision.ids import FIRST

FIRST_SWEEP_TOKENS = 9


class DeviceModel:
    """Captures its graphs at construction, which takes as long as compiling the kernels does."""

    tracing: Tracing | None = None
    head: DeviceHead | None = None

    def __init__(
        self,
        weights: DeviceWeights,
        pool: DevicePool,
        slots: SharedSlots,
        *,
        rows: Sequence[int],
        context_tokens: int,
        chunk_tokens: int,
        shared_bytes: int = 0,
        placement: Placement | None = None,
        told: Callable[[str], str] = str,
        replays: Mapping[int, Replay] | None = None,
        head: HeadWeights | None = None,
    ) -> None:
        """`rows`: numbers of rows that steps can have, ascending from 1. `chunk_tokens` are read at once; 0: all
        segments take the decode path. `shared_bytes`: of `memory`, at least, which others may use while no sweep is
        under way. `told`: makes what a failed read says fit for clients. `replays`: by rows, for benchmarks.
        `head`: the multi-token-prediction block's weights; its experts are the host's last layer."""
        self.pool, self.config, self.told, self.weights = pool, weights.config, told, weights
        self.spent = Spent()
        self.decoders: list[Decoder] = []
        self.sweep: Sweep | None = None
        scratch = self.new_state(rows[-1])
        try:
            size_bytes = max(shared_bytes, sweep_room_bytes(self.config, chunk_tokens))
            self.memory = torch.zeros(size_bytes, dtype=torch.uint8, device=pool.conv.device)
            if chunk_tokens:
                room = Room(self.memory)
                scratch_bytes = sweep_scratch_bytes(self.config, chunk_tokens)
                experts = ExpertSweep(slots.host, self.config.experts_per_token, chunk_tokens, room, scratch_bytes)
                experts.layers = len(self.config.moe_layers)  # behind them there may be the block's
                self.sweep = Sweep(weights, pool, experts, chunk_tokens, context_tokens)
            for count in rows:
                replay = (replays or {}).get(count)
                self.decoders.append(
                    Decoder(weights, pool, slots, count, context_tokens, placement or Placement(), replay)
                )
            if head is not None:
                self.head = DeviceHead(head, pool, slots, context_tokens, placement or Placement(), told)
            with ThreadPoolExecutor(len(self._all_decoders)) as threads:
                list(threads.map(lambda decoder: decoder.compile([scratch] * decoder.rows), self._all_decoders))
            for decoder in self._all_decoders:
                decoder.capture()
                decoder.spent = self.spent
            self._settle(scratch)  # compiled and loaded before anybody waits
            self._first_sweep(scratch)
        except BaseException:
            self.close()
            raise
        finally:
            scratch.release()

    @cached_property
    def _steps(self) -> tuple[Tensor, Tensor]:
        """Of all Mamba layers, a and dt_bias: float32 [layers, heads]."""
        layers = [layer for layer in self.weights.layers if isinstance(layer, MambaWeights)]
        return torch.stack([layer.a for layer in layers]), torch.stack([layer.dt_bias for layer in layers])

    def trace(self, recorder: Recorder) -> None:
        """From now on it is recorded what is routed."""
        self.tracing = Tracing(recorder)
        if self.sweep:
            self.sweep.tracing = self.tracing

    def new_state(self, tokens: int) -> DeviceState:
        """A fresh state with room for so many tokens. Raises OutOfPagesError."""
        state = DeviceState(self.config, self.pool)
        try:
            state.reserve(tokens)
        except BaseException:
            state.release()
            raise
        return state

    def forward(self, segments: Sequence[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        """As Model.forward; gives way between two steps. Raises OutOfPagesError before anything has changed, StepError
        when states are spoiled."""
        running = self.reading(segments)
        while True:
            try:
                next(running)
            except StopIteration as end:
                logits: Tensor = end.value
                return logits
            if give_way is not None and give_way():
                running.close()
                raise GaveWay

    def reading(self, segments: Sequence[Segment]) -> Generator[float, None, Tensor]:
        """As Model.reading; it can stop between two layers or groups of experts, or between two steps."""
        self._reserve(segments)
        logits: list[list[Tensor]] = [[] for _ in segments]
        left = total = sum(len(segment.all_ids) for segment in segments)
        try:
            for chunk in chunks(segments, self.sweep.tokens) if self.sweep else []:
                states = [self._state(segment) for _, segment in chunk]
                assert self.sweep
                running = self.sweep.run([segment for _, segment in chunk], states)
                tokens = sum(len(segment.ids) for _, segment in chunk)
                for (number, _), row in zip(chunk, (yield from self._swept(running, left, tokens, total)), strict=True):
                    logits[number] = [row]
                for (_, segment), state in zip(chunk, states, strict=True):
                    state.ids.extend(segment.ids)
                left -= tokens
            decoded = [number for number, segment in enumerate(segments) if not (self.sweep and segment.sweep)]
            for fed in self._tokens([segments[number] for number in decoded]):
                for index, place, row in fed:
                    number = decoded[index]
                    if place >= len(segments[number].ids) - 1:
                        logits[number].append(row.clone())
                left -= len(fed)
                if left:
                    yield 1 - left / total
        except BaseException:
            for segment in segments:
                segment.state.spoiled = True
            raise
        return torch.stack([row for rows in logits for row in rows])

    def settle(self, state: State, accepted: int) -> None:
        """As Model.settle. Queued behind the step that tried the draft, and ahead of all that reads the state."""
        pending, state.pending = state.pending, None
        if pending is None or not accepted:
            return
        assert isinstance(state, DeviceState)
        self._settle(state)
        state.ids.extend(pending.ids)

    def _settle(self, state: DeviceState) -> None:
        kept, mamba_layers = self.pool.kept, len(self.config.mamba_layers)
        if kept is not None and mamba_layers:
            sizes = self.decoders[0].token.sizes
            settle(kept[state.place], sizes, *self._steps, state.conv, state.ssm)

    def _swept(
        self, running: Generator[float, None, Tensor], left: int, tokens: int, total: int
    ) -> Generator[float, None, Tensor]:
        """A chunk's logits. Closed early, it has let go of the experts' slots."""
        with closing(running):
            try:
                while True:
                    share = next(running)
                    yield 1 - (left - share * tokens) / total
            except StopIteration as end:
                logits: Tensor = end.value
                return logits
            except torch.AcceleratorError as error:
                raise DeviceError(f"the GPU has failed: {error}") from error
            except BlockError as error:
                raise StepError(self.told(str(error))) from error

    def forward_all(self, segments: Sequence[Segment]) -> Tensor:
        """As Model.forward_all: logits after every id, in the order of the segments."""
        self._reserve(segments)
        fed = (row for some in self._tokens(segments) for row in some)
        rows = sorted(((number, place), row.clone()) for number, place, row in fed)
        return torch.stack([row for _, row in rows])

    def _reserve(self, segments: Sequence[Segment]) -> None:
        """Raises OutOfPagesError before anything has changed."""
        states = [self._state(segment) for segment in segments]
        assert len(set(map(id, states))) == len(states), "a sequence is in a call once"
        assert not any(state.spoiled for state in states), "a spoiled or released state cannot go on"
        assert not any(state.pending for state in states), "drafts are settled before the next call"
        for segment in segments:
            can_draft = self.pool.kept is not None and not segment.sweep
            assert len(segment.drafts) <= int(can_draft), "a step has room for one draft of a sequence"
        self.pool.require(sum(state.pages_missing(len(s.all_ids)) for state, s in zip(states, segments, strict=True)))
        for state, segment in zip(states, segments, strict=True):
            state.reserve(len(segment.all_ids))

    def _first_sweep(self, state: DeviceState) -> None:
        """So that its kernels are compiled and loaded before anybody waits. The state means nothing afterwards."""
        if self.sweep is None:
            return
        self.sweep.experts.reserve()
        count = min(FIRST_SWEEP_TOKENS, self.sweep.tokens)
        state.reserve(count)
        for _ in self.sweep.run([Segment(state, [0] * count)], [state]):
            pass

    @property
    def _all_decoders(self) -> list[Decoder]:
        return self.decoders + (self.head.decoders if self.head else [])

    @property
    def late(self) -> int:
        """How often a token had to go on after the host was late."""
        return sum(decoder.late for decoder in self._all_decoders)

    def counts(self) -> DeviceCounts:
        """What the card did since the start."""
        vram = self.decoders[0].vram
        copied = counts.swept(self.sweep.experts.copied_bytes if self.sweep else 0)
        copied += counts.brought(vram.copied_bytes if vram else 0)
        return sum((decoder.counts() for decoder in self._all_decoders), copied)

    def close(self) -> None:
        for decoder in self._all_decoders:
            decoder.close()

    def _tokens(self, segments: Sequence[Segment]) -> Generator[list[tuple[int, int, Tensor]], None, None]:
        """Feeds all ids -> what was fed at once: (segment, place in it, logits until the next step of anything).

        Those with drafts come first, so that a step of an even number of rows has both of each.
        """
        pictures = [iter([row for some in segment.rows for row in some]) for segment in segments]
        order = sorted(range(len(segments)), key=lambda number: not segments[number].drafts)
        left = [(number, place) for number in order for place in range(len(segments[number].all_ids))]
        while left:
            decoder = [each for each in self.decoders if each.rows <= len(left)][-1]
            fed, left = left[: decoder.rows], left[decoder.rows :]
            rows = []
            for number, place in fed:
                segment, id_ = segments[number], segments[number].all_ids[place]
                shown = next(pictures[number]) if id_ >= FIRST else None
                rows.append(Row(self._state(segment), id_, shown, draft=place >= len(segment.ids)))
            logits = self._run(decoder, rows, [self._state(segments[number]) for number, _ in fed])
            if self.tracing:
                self.tracing.step(decoder.token, [len(segments[number].ids) > 1 for number, _ in fed])
            yield [(number, place, values) for (number, place), values in zip(fed, logits, strict=True)]

    def _run(self, decoder: Decoder, rows: list[Row], states: list[DeviceState]) -> Tensor:
        try:
            logits = decoder.run(rows)
        except torch.AcceleratorError as error:  # nothing works there any more
            raise DeviceError(f"the GPU has failed: {error}") from error
        except HandoffError as error:
            raise StepError(self.told(str(error))) from error
        for number, (row, state) in enumerate(zip(rows, states, strict=True)):
            if self.head is not None:
                self.head.see(state, decoder.token.x[number])
            if row.draft:
                state.pending = Pending([row.id])
            else:
                state.ids.append(row.id)
        return logits

    def _state(self, segment: Segment) -> DeviceState:
        assert isinstance(segment.state, DeviceState)
        return segment.state


def chunks(segments: Sequence[Segment], most_tokens: int) -> list[list[tuple[int, Segment]]]:
    """The segments that are to be swept, by their numbers, cut and put together: chunks of at most MOST_SEQUENCES
    pieces and `most_tokens` ids, in which a segment is once."""
    made: list[list[tuple[int, Segment]]] = []
    room = 0
    for number, segment in enumerate(segments):
        begin, rows = 0, [row for some in segment.rows for row in some]
        while segment.sweep and begin < len(segment.ids):
            if not room or len(made[-1]) == MOST_SEQUENCES or made[-1][-1][0] == number:
                made.append([])
                room = most_tokens
            ids = segment.ids[begin : begin + room]
            pictured = sum(id_ >= FIRST for id_ in ids)
            own = [torch.stack(rows[:pictured])] if pictured else []
            made[-1].append((number, Segment(segment.state, ids, own, sweep=True)))
            rows, begin, room = rows[pictured:], begin + len(ids), room - len(ids)
    return made


def arithmetic_path(kv_format: str, swept: bool) -> str:
    """What decides bits here: the kernels' fixed configurations, their compiler, the kind of card, the form of KV, and
    whether prompts are swept."""
    parts = [
        sweep.FINGERPRINT if swept else "no sweep",
        linear.FINGERPRINT,
        mamba.FINGERPRINT,
        norm.FINGERPRINT,
        router.FINGERPRINT,
        attention.FINGERPRINT,
    ]
    major, minor = torch.cuda.get_device_capability()
    made_with = f"triton {triton.__version__}, sm_{major}{minor}, KV {kv_format}"
    return "; ".join(["cuda", *parts, experts.FINGERPRINT, made_with])
