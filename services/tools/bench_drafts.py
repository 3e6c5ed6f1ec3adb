"""`thimble bench drafts STORE`: answers on the GPU with and without drafts, the words the same, and the plan beside it.

For a synthetic store of the full shape (`thimble synth`): routing is replayed from traces/generators.py, which names
40 % of a layer's experts again for the next token, all of it in RAM. What is measured is the engine's own path: its
speculation, its steps of one and of two rows, its settling. An answer is said first without drafts; then again by one
who knows it and is right in a given share of cases. It must be the same, or the run stops. A wrong draft's experts are
those that the right one would have named.

Where the store has a multi-token-prediction block (`thimble synth --block`), every answer is said again by one who asks
it for each draft, with routing of its own, and does not listen: what its drafts cost. Without one that is computed.

What is made of the times, and the plan beside them, is draft_report.py's; the parts of a step are draft_parts.py's.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
import triton
from torch import Tensor

from kernels.experts.device.rates import ReadRates
from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.binding import Host
from kernels.experts.host.drives import EmulatedDrive
from kernels.workers.pool import Workers, default_threads
from services.engine.experts.store import DRAFT, Store
from services.engine.experts.streamer import catalog
from services.engine.gpu.decoder import Placement
from services.engine.gpu.head import DeviceHead
from services.engine.gpu.ledger import (
    CONTEXT_BYTES,
    Wanted,
    dense_bytes,
    head_weight_bytes,
    read_layout,
    require,
    stored_layout,
)
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.open import AWAKE_US
from services.engine.gpu.token import Replay
from services.engine.gpu.usable import usable_device
from services.engine.gpu.weights import DeviceWeights, HeadWeights
from services.engine.model import Segment
from services.engine.model_config import ModelConfig
from services.engine.pages import pages_for
from services.engine.request import Request
from services.engine.sequence import Sequence as Answering
from services.engine.speculation import Speculation
from services.engine.state import State, state_bytes
from services.tools import draft_parts, figures
from services.tools.amounts import count, nothing_or_more, whole
from services.tools.ballast import Ballast
from services.tools.decode_report import token_bytes
from services.tools.decode_rig import READERS, mid_dialog
from services.tools.draft_forecast import ACCEPTED, block_bytes
from services.tools.draft_parts import Named, ids_of, processor_us
from services.tools.draft_report import Measured, Sums, rows, told
from services.tools.plan import shape_of
from services.tools.replay import Trace
from services.tools.synthetic_blocks import SyntheticBlocks
from services.tools.told_drafts import DraftError, Told
from services.tools.traces.generators import generate

ROWS = (1, 2)
FILLED_GB_S = 1000.0  # of the drive while slots are filled: as fast as it goes
INPUTS = 64  # tokens whose experts' inputs are different
GB = 1e9


class Network(Protocol):
    """What is measured: DeviceModel, or what stands for it in tests."""

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor: ...


class Asked(Protocol):
    """What is asked for drafts: DeviceHead, or what stands for it in tests."""

    def logits(self, states: Seq[State], ids: Seq[int]) -> Tensor: ...


@dataclass(frozen=True)
class Block:
    """The multi-token-prediction block, and what its one layer names, by rows."""

    head: Asked
    replays: Mapping[int, Replay]


class Replayed:
    """A network whose routing is a trace's: each row's by its place behind `begin`. `network_s` is the network's own
    time, `preparing_s` is nobody's."""

    def __init__(
        self, model: Network, replays: Mapping[int, Replay], trace: Trace, begin: int, block: Block | None = None
    ) -> None:
        self.model, self.replays, self.trace, self.begin, self.block = model, replays, trace, begin, block
        self.preparing_s = self.network_s = 0.0
        self.named = Named.TRACED

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        (segment,) = segments
        rows = len(segment.all_ids)
        with self._preparing():
            there, places = self.replays[rows], self._places(segment.state.tokens, rows)
            there.ids.copy_(ids_of(self.trace, places, self.named))
            if self.named is Named.NOTHING:
                there.x.fill_(torch.nan)  # no expert has anything to compute
            else:
                there.x.copy_(self._x(places))
        begun = time.perf_counter()
        logits = self.model.forward(segments, give_way)
        self.network_s += time.perf_counter() - begun
        return logits

    def ask(self, state: State, id_: int) -> None:
        """The block for a draft, where it knows of the token before. It names what a layer in the middle does."""
        if self.block is None or not state.can_draft:
            return
        with self._preparing():
            for rows, there in self.block.replays.items():
                places, layer = self._places(state.tokens + 1 - rows, rows), self.trace.ids.shape[1] // 2
                there.ids.copy_(ids_of(self.trace, places, Named.TRACED)[layer : layer + 1])
                there.x.copy_(self._x(places)[layer : layer + 1])
        self.block.head.logits([state], [id_])

    def _places(self, tokens: int, rows: int) -> list[int]:
        first = tokens - self.begin
        return [place % self.trace.tokens for place in range(first, first + rows)]

    def _x(self, places: list[int]) -> Tensor:
        return self.trace.x[[place % len(self.trace.x) for place in places], :, 0].transpose(0, 1)

    @contextmanager
    def _preparing(self) -> Iterator[None]:
        synchronise()  # what is still queued is the network's
        begun = time.perf_counter()
        yield
        synchronise()
        self.preparing_s += time.perf_counter() - begun


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Answers:
    """One sequence's answer, from the same state each time."""

    def __init__(
        self, network: Replayed, state: DeviceState, settle: Callable[..., None], computed: Callable[[], int]
    ) -> None:
        """`computed`: experts since the start."""
        self.network, self.state, self.settle, self.computed = network, state, settle, computed

    def say(
        self, tokens: int, sums: Sums, answer: Seq[int] = (), share: float | None = None, own: bool = False
    ) -> list[int]:
        """Its ids; with `share` drafts of `answer` are tried; `own`: and the block is asked for each."""
        self.clear()
        sources = [] if share is None else [Told(answer, share, self.network.ask if own else None)]
        speculation = Speculation(sources, self.settle, always=True)
        sequence = Answering(Request("bench", (0,), tokens + 1), lambda event: None)
        sequence.state = self.state
        network, said = cast(Any, self.network), [0]  # nobody reads a prompt
        sequence.accept(0)

        def sample(sequence: Answering, logits: Tensor) -> None:
            said.append(int(logits.argmax()))
            sequence.accept(said[-1])

        computed, prepared, inside = self.computed(), self.network.preparing_s, self.network.network_s
        begun = time.perf_counter()
        while len(said) <= tokens:
            for one, segment, logits in speculation.forward(network, [sequence], lambda: False):
                speculation.take(one, segment, logits, sample)
            sums.steps += 1
        synchronise()
        sums.seconds += time.perf_counter() - begun - (self.network.preparing_s - prepared)
        sums.network_s += self.network.network_s - inside
        sums.tokens += tokens
        sums.experts += self.computed() - computed
        for judged in speculation.judgements.values():
            sums.tried += judged.tried
            sums.right += judged.accepted
        return said

    def step_ms(self, rows: int, named: Named, place: int) -> float:
        self.clear()
        self.state.ids += [0] * place
        self.network.named, inside = named, self.network.network_s
        self.network.forward([Segment(self.state, [0], drafts=(1,) * (rows - 1))])
        self.settle(self.state, 0)
        self.network.named = Named.TRACED
        found = (self.network.network_s - inside) * 1e3
        self.clear()
        return found

    def settle_ms(self) -> float:
        self.clear()
        self.network.forward([Segment(self.state, [0], drafts=(1,))])
        synchronise()
        begun = time.perf_counter()
        self.settle(self.state, 1)
        synchronise()
        return (time.perf_counter() - begun) * 1e3

    def clear(self) -> None:
        self.state.ids = [0] * self.network.begin
        self.state.followed = None
        self.state.conv.zero_()
        self.state.ssm.zero_()
        synchronise()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="of the full shape, that `thimble synth` wrote")
    parser.add_argument("--tokens", type=whole, default=96, help="of an answer (default 96)")
    parser.add_argument("--rounds", type=whole, default=3, help="of all answers, in turns (default 3)")
    parser.add_argument("--right", type=nothing_or_more, nargs="*", default=list(ACCEPTED), metavar="SHARE")
    parser.add_argument("--context", type=whole, default=2048, help="tokens before the answer (default 2048)")
    parser.add_argument("--free-mib", type=count, default=8151, help="of the card, by ballast (default 8151; 0: all)")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("bench drafts needs a CUDA device; bench speculation measures the processor alone", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if args.free_mib:
            stack.enter_context(Ballast(args.free_mib))
        usable_device()
        if args.free_mib:
            head_bytes = head_weight_bytes(store.config, read_layout(args.store / DRAFT)) if store.draft_file else 0
            wanted = Wanted(1, args.context + args.tokens + 2, joined=True, drafts=True, head_bytes=head_bytes)
            budget_bytes = torch.cuda.mem_get_info()[0] + CONTEXT_BYTES
            print(require(store.config, stored_layout(args.store), wanted, budget_bytes), flush=True)
        found = measured(store, made_up(store.config, args.tokens + 2), args, stack)
    note = (
        f"synthetic, calibrated routing ({100 * found.repeated:.1f} % of a layer's experts again), all hits, "
        f"{f'ballast to {args.free_mib} MiB' if args.free_mib else 'no ballast'}, context {args.context}, "
        f"{args.rounds} answers of {args.tokens} tokens, the same words; torch {torch.__version__}, triton "
        f"{triton.__version__}"
    )
    print(f"\n{note}")
    for line in told(found):
        print(line)
    if args.out:
        for row in rows(found, note):
            figures.append(args.out, *row)
    return 0


def made_up(config: ModelConfig, tokens: int) -> Trace:
    """An answer's routing, and inputs that leave as many neurons alive as published."""
    routing = generate("calibrated", tokens)
    ids = torch.from_numpy(routing.ids).view(tokens, routing.layers, 1, -1)
    inputs = SyntheticBlocks(config.block, 1, 1).inputs(INPUTS * routing.layers, seed=1)
    return Trace(ids, inputs.view(INPUTS, routing.layers, 1, -1), config.experts)


def measured(store: Store, trace: Trace, args: argparse.Namespace, stack: ExitStack) -> Measured:
    config, device = store.config, torch.device("cuda")
    slots = filled(store, trace, stack)
    processor = processor_us(slots.host, trace)
    reading = ReadRates(slots)
    link_gb_s, together_gb_s = reading.copy(), reading.together()
    del reading
    torch.cuda.empty_cache()
    weights = DeviceWeights.load(store.dense(), config, device)
    weights.embeddings.read_through()
    context = args.context + args.tokens + 2
    pool = DevicePool(
        config, device, places=1, pages=pages_for(context), drafts=True, head=store.draft_file is not None
    )
    layers, top_k = len(config.moe_layers), config.experts_per_token

    def replays(layers: int) -> dict[int, Replay]:
        return {
            rows: Replay(
                torch.zeros(layers, rows, top_k, dtype=torch.int32, device=device),
                torch.zeros(layers, rows, config.latent_size, device=device),
            )
            for rows in ROWS
        }

    placement = Placement(first_share=top_k * together_gb_s[1] / sum(together_gb_s))
    model = DeviceModel(
        weights, pool, slots, rows=ROWS, context_tokens=context, chunk_tokens=0,
        placement=placement, replays=(of_model := replays(layers)),
    )  # fmt: skip
    stack.callback(model.close)
    block = None
    if (draft := store.draft()) is not None:
        of_block = replays(1)
        head = HeadWeights.load(draft, weights, device)
        model.head = DeviceHead(head, pool, slots, context, placement, replays=of_block)
        scratch = model.new_state(ROWS[-1])
        for decoder in model.head.decoders:
            decoder.compile([scratch] * decoder.rows)
            decoder.capture()
        scratch.release()
        block = Block(model.head, of_block)
    state = mid_dialog(weights, pool, context)
    network = Replayed(model, of_model, trace, args.context - 1, block)
    answers = Answers(network, state, model.settle, lambda: experts_computed(model))
    print("ready", flush=True)
    dense = stored_layout(args.store)
    shape = replace(
        shape_of(config, dense_bytes(config, dense)), dense_bytes=token_bytes(config, dense, context, "bf16")
    )
    plain, drafted, own = in_turns(answers, args.right, args.tokens, args.rounds, block is not None)
    parts = draft_parts.measured(answers, args.tokens)
    found = Measured(
        shape, block_bytes(config, dense), state_bytes(config), trace.repeated(), parts, processor, link_gb_s,
        together_gb_s, plain, drafted, own,
    )  # fmt: skip
    state.release()
    return found


def experts_computed(model: DeviceModel) -> int:
    counted = model.counts()
    return counted.gpu_experts + counted.host_experts


def filled(store: Store, trace: Trace, stack: ExitStack) -> SharedSlots:
    """Slots for the experts that the trace names, all there."""
    named = [torch.unique(trace.ids[:, layer]).int().view(1, -1) for layer in range(trace.ids.shape[1])]
    if store.draft_file is not None:
        named.append(named[len(named) // 2])  # as Replayed.ask has it
    drive = EmulatedDrive(np.fromfile(store.experts_path, np.uint8), gb_s=FILLED_GB_S)
    count = sum(ids.numel() for ids in named)
    workers = Workers(default_threads(), AWAKE_US)
    host = Host(
        catalog(store, drafts=store.draft_file is not None), workers, slots=count, readers=READERS, drives=[drive]
    )
    stack.callback(host.close)
    shared = SharedSlots(host)
    stack.callback(shared.close)
    for layer, ids in enumerate(named):
        host.step(layer, ids, torch.ones(ids.shape), torch.ones(1, store.layout.latent))
    print(f"{count} experts in RAM, {count * store.layout.block_bytes / GB:.1f} GB", flush=True)
    return shared


def in_turns(
    answers: Answers, shares: Seq[float], tokens: int, rounds: int, block: bool = False
) -> tuple[Sums, dict[float, Sums], dict[float, Sums]]:
    """Without drafts and with each share, again and again; with `block` also with its own drafts' cost. What comes
    first warms up, and is not counted. Raises DraftError."""
    expected = answers.say(tokens, Sums())
    answers.say(tokens, Sums(), expected, 0.5, block)
    plain, drafted, own = Sums(), {share: Sums() for share in shares}, {share: Sums() for share in shares if block}
    for _ in range(rounds):
        for share in (None, *shares):
            for asked in (False, True) if block and share is not None else (False,):
                sums = plain if share is None else own[share] if asked else drafted[share]
                if answers.say(tokens, sums, expected, share, asked) != expected:
                    raise DraftError(f"the answer is another one with {share or 0:.0%} of drafts right")
    return plain, drafted, own
