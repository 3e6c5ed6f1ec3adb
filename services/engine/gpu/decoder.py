"""One step of a fixed number of rows, a token each, as one CUDA graph, with the host library's share of it.

Owns the graph, its hand-off and its buffers. Order of a token: the inputs are written, the graph is launched, this
thread serves the host's side of every MoE layer, the graph ends. A host that was late makes the GPU give up waiting;
the rest of the graph then changes nothing, and the token goes on, launched piece by piece, from where it stopped.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.decode_step import DOWN_SPLITS, ExpertStep
from kernels.experts.device.turns import TIMEOUT_NS, Route, SharedSlots, Turns
from kernels.linear.octets import to_octets
from services.engine.gpu import counts
from services.engine.gpu.counts import DeviceCounts
from services.engine.gpu.head_token import HeadToken
from services.engine.gpu.ledger import MOST_SEQUENCES, most_items
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.ranges import named
from services.engine.gpu.token import Place, Replay, Token
from services.engine.gpu.weights import DeviceWeights, HeadWeights
from services.engine.spent import Spent


@dataclass(frozen=True)
class Placement:
    """Which part of the experts the GPU takes, and how their bytes reach it; see Turns and Method in the benchmarks.

    `share`: how many a layer; None: so many that both sides finish together, found from `first_share` on.
    `guesses`: the next layer's router runs early and the host prefetches what it names, `hints` of them; see Turns.
    """

    route: Route = Route.IN_PLACE
    share: int | None = None
    first_share: float = 8.0
    waves: tuple[int, ...] = ()
    whole_groups: bool = False
    splits: int = DOWN_SPLITS
    lanes: int = 1
    apart: bool = False
    guesses: bool = False
    hints: int = 0
    timeout_ns: int = 5 * TIMEOUT_NS  # a layer of misses on a slow disk takes longer than one


@dataclass(frozen=True)
class Row:
    """The next id of one sequence, or the one behind that of the row before, whose page is reserved, and, for a
    picture's place, what stands there instead of the id's embedding: float32 [hidden]. With `draft` the id is only
    tried: what the sequence remembers is as before it."""

    state: Place
    id: int
    embedding: Tensor | None = None
    draft: bool = False


class Decoder:
    """For steps of exactly `rows` rows. Made before anything runs; after that nothing is allocated."""

    def __init__(
        self,
        weights: DeviceWeights,
        pool: DevicePool,
        slots: SharedSlots,
        rows: int,
        context_tokens: int,
        placement: Placement = Placement(),
        replay: Replay | None = None,
        head: HeadWeights | None = None,
    ) -> None:
        """`head`: of a multi-token-prediction block, whose network `weights` are."""
        assert 1 <= rows <= MOST_SEQUENCES
        config = weights.config
        self.weights, self.rows, self.layers, self.vram = weights, rows, len(weights.moe_layers), slots.vram
        top_k = config.experts_per_token
        kept = slots.vram.slots if slots.vram else 0
        items = max(most_items(rows, top_k, kept), min(rows * top_k, placement.share or 0))
        step = ExpertStep(
            slots.host.catalog.layout, items, rows, top_k, pool.conv.device, placement.splits, octets=True
        )
        guesses = rows * top_k if placement.guesses else 0
        assert replay is None or replay.ids[0].numel() == rows * top_k + guesses
        self.turns = Turns(
            slots, step, placement.waves, placement.timeout_ns, guesses, placement.apart, placement.hints
        )
        if placement.route is not Route.IN_PLACE:
            self.turns.copy_through(placement.route, placement.lanes)
        self.turns.share(placement.share, initial=placement.first_share * rows)
        self.token = (
            Token(weights, pool, step, self.turns, context_tokens, placement.whole_groups, replay)
            if head is None
            else HeadToken(head, pool, step, self.turns, context_tokens, replay)
        )
        self.late = 0  # how often a token had to go on
        self.spent = Spent()
        self._tokens = self._last_waits_ns = 0
        self._times = self.turns.times()
        turns, inputs = self.turns, self.token.inputs
        self._sizes = counts.Sizes(
            block=slots.host.catalog.layout.block_bytes,
            turn_to_gpu=turns.results.nbytes + turns.plan.nbytes,
            turn_from_gpu=turns.ids.nbytes + turns.x.nbytes,
            token_to_gpu=inputs.host_x.nbytes + inputs.host_numbers.nbytes,
            token_from_gpu=self.token.host_logits.nbytes,
        )
        self.graph: torch.cuda.CUDAGraph | None = None

    def compile(self, states: Sequence[Place]) -> None:
        """Launch every kernel once, on states that mean nothing afterwards. Nobody serves: the GPU gives up its wait.

        Several decoders may compile at once, each in a thread: most of it is the compiler outside Python's lock.
        """
        torch.cuda.set_device(self.token.x.device)
        self.token.inputs.fill(list(states))
        self.token.launch()

    def capture(self) -> None:
        """After `compile`: run once for the memory that first runs take, then capture."""
        torch.cuda.synchronize()
        self.turns.retire()
        self._finish(self.token.launch)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.token.launch()

    def run(self, rows: Sequence[Row]) -> Tensor:
        """Feed each row's id to its state, whose `ids` the caller extends -> logits after it, float32 [rows, vocab].

        A sequence's consecutive ids may be rows next to each other, in order: bits are as if fed one by one. A draft's
        id is not among its state's until it is settled (kernels/mamba/settle.py). The logits are in page-locked host
        memory and valid until the next run. Raises HandoffError; the states are then half-way between two tokens.
        """
        assert self.graph is not None
        assert len(rows) == self.rows
        assert self.token.pool.kept is not None or not any(row.draft for row in rows)
        before, begun = self.turns.times(), time.perf_counter()
        inputs = self.token.inputs
        with named("token of sequences:", self.rows):
            with named("inputs"):
                inputs.fill([row.state for row in rows], [row.draft for row in rows])
                for row, x in zip(rows, inputs.host_x, strict=True):
                    x.copy_(to_octets(self.weights.embeddings.row(row.id) if row.embedding is None else row.embedding))
            filled = time.perf_counter()
            self._finish(self.graph.replay)
        self._times = self.turns.times()
        self.spent.served(before, self._times, filled - begun, time.perf_counter() - filled)
        self._tokens += 1
        self._last_waits_ns += int(self.turns.waited)
        if self.vram is not None:
            self.vram.improve()
        return self.token.host_logits

    def counts(self) -> DeviceCounts:
        """Of the tokens that were run; those of `compile` and `capture` take part in the hand-off's."""
        return counts.decoded(self._times, self._tokens, self.late, self._last_waits_ns, self._sizes)

    def close(self) -> None:
        torch.cuda.synchronize()
        self.turns.retire()
        self.turns.close()

    def _finish(self, launch: Callable[[], None]) -> None:
        """The whole token, whatever the host's delays."""
        try:
            with named("launch"):
                launch()
            with named("serve"):
                served = self.turns.serve(self.layers)
            with named("until the end"):
                torch.cuda.synchronize()
            while int(self.turns.stopped):
                self.late += 1
                self.turns.go_on()
                self.token.launch(served - 1, posted=True)
                served += self.turns.serve(self.layers - served)
                torch.cuda.synchronize()
        finally:
            torch.cuda.synchronize()
            self.turns.retire()
