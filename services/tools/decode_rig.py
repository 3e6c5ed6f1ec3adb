"""A real decoder with replayed routing, for measurements: slots that are full, sequences in mid-dialog, timed steps.

Owns what a measurement adds to the engine's parts; those are services/engine/gpu/. Used by one thread.
"""

import time
from collections.abc import Sequence

import torch

from kernels.experts.device.times import Times
from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.engine.gpu.decoder import Decoder, Placement, Row
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.open import AWAKE_US
from services.engine.gpu.token import Replay
from services.engine.gpu.weights import DeviceWeights
from services.tools.expert_rig import Method
from services.tools.gpu_events import Event, record
from services.tools.replay import Trace
from services.tools.token_parts import Sums, sums

READERS = 8


def filled_host(store: Store, threads: int, resident: int) -> Host:
    """A host whose slots hold the first `resident` experts of every layer. The caller closes it."""
    layers, latent = len(store.blocks), store.layout.latent
    host = Host(catalog(store), Workers(threads, AWAKE_US), slots=layers * resident, readers=READERS)
    ids = torch.arange(resident, dtype=torch.int32).view(1, -1)
    for layer in range(layers):
        host.step(layer, ids, torch.ones(ids.shape), torch.ones(1, latent))
    return host


def mid_dialog(weights: DeviceWeights, pool: DevicePool, context_tokens: int) -> DeviceState:
    """A sequence whose next token is its `context_tokens`-th. The caller releases it."""
    state = DeviceState(weights.config, pool)
    state.reserve(context_tokens)
    state.ids = [0] * (context_tokens - 1)
    return state


class DecodeRig:
    """A decoder for these states, which stay where they are in their dialogs; a trace overrides what is routed.

    A state that is there several times takes so many tokens in a step. States may be shared by several rigs: what they
    hold means nothing. `first_share` is of one sequence.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        states: Sequence[DeviceState],
        slots: SharedSlots,
        method: Method,
        first_share: float,
        trace: Trace,
    ) -> None:
        pool, device = states[0].pool, states[0].pool.conv.device
        _, layers, most_rows, top_k = trace.ids.shape
        self.rows = len(states)
        assert self.rows <= most_rows
        self.states, self.trace, self.host = states, trace, slots.host
        self.replay = Replay(
            torch.zeros(layers, self.rows, top_k, dtype=torch.int32, device=device),
            torch.zeros(layers, self.rows, trace.x.shape[-1], device=device),
        )
        placement = Placement(
            route=method.route,
            share=method.share,
            first_share=first_share,
            waves=method.waves,
            whole_groups=method.whole_groups,
            splits=method.splits,
            lanes=method.lanes,
            apart=method.apart,
            timeout_ns=method.timeout_ns,
        )
        context_tokens = max(state.tokens + sum(other is state for other in states) for state in states)
        self.decoder = Decoder(weights, pool, slots, self.rows, context_tokens, placement, self.replay)
        self.decoder.compile(states)
        self.decoder.capture()
        self.ids = [0] * self.rows
        self.clear()

    def step(self, token: int) -> float:
        """A token of every sequence -> milliseconds by the wall clock, from ids to the next ids (the likeliest)."""
        self._override(token, nothing=False)
        begun = time.perf_counter()
        self._run()
        return (time.perf_counter() - begun) * 1e3

    def events(self, first: int, tokens: int, nothing: bool = False) -> list[Event]:
        """What the GPU does in so many tokens. `nothing`: no input is finite, so no expert has anything to compute."""
        self._override(first, nothing)
        self._run()  # not recorded: the first after another kind

        def work() -> None:
            for token in range(first, first + tokens):
                self._override(token, nothing)
                self._run()

        return record(work)

    def sums(self, first: int, tokens: int, nothing: bool = False) -> tuple[Sums, float]:
        """Of one token on average: what its kernels are, and milliseconds that the host waited for its disk."""
        before = self.host.counters()["disk_wait_ns"]
        found = sums(self.events(first, tokens, nothing), tokens)
        if nothing:
            self.clear()
        return found, (self.host.counters()["disk_wait_ns"] - before) * 1e-6 / (tokens + 1)

    @property
    def late(self) -> int:
        """How many tokens had to go on after a wait that ran out."""
        return self.decoder.late

    def times(self) -> Times:
        return self.decoder.turns.times()

    def gpu_experts(self, before: Times) -> float:
        """That the GPU took of a layer since `before`, on average."""
        now = self.times()
        return (now.gpu_experts - before.gpu_experts) / max(1, now.turns - before.turns)

    def clear(self) -> None:
        """States of zeros: after experts that computed nothing they are not finite."""
        for state in self.states:
            state.conv.zero_()
            state.ssm.zero_()

    def close(self) -> None:
        self.decoder.close()

    def _run(self) -> None:
        logits = self.decoder.run([Row(state, id) for state, id in zip(self.states, self.ids, strict=True)])
        self.ids = logits.argmax(1).tolist()

    def _override(self, token: int, nothing: bool) -> None:
        self.replay.ids.copy_(self.trace.ids[token, :, : self.rows])
        if nothing:
            self.replay.x.fill_(torch.nan)
        else:
            self.replay.x.copy_(self.trace.x[token, :, : self.rows])
        torch.cuda.synchronize()
