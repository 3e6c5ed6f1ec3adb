"""Tokens of one sequence on the GPU with experts missing, as `thimble bench decode-disk` measures them: the ways to
compute them, and routing that is replayed instead of what random weights would route.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.replay import Routing
from kernels.experts.pause import Pause
from services.engine.experts.store import Store
from services.engine.gpu.decoder import Decoder, Placement, Row
from services.engine.gpu.memory import DeviceState
from services.engine.gpu.token import Replay
from services.engine.gpu.weights import DeviceWeights
from services.tools.bench_experts import PUBLISHED
from services.tools.synthetic_blocks import SyntheticBlocks

CONTEXT_TOKENS = 2048
HIT_EXPERTS = 3  # times a token's: of a layer, which tokens that miss nothing name
ALL = 1 << 10  # experts, more than a layer names


@dataclass(frozen=True)
class Way:
    name: str
    placement: Placement
    prefetch: str
    in_vram: bool = False  # the hottest experts are in the card's memory
    home: bool = False  # at the pace of a home PC


OURS = Way("ours", Placement(guesses=True), "on")
PLAIN = Way("ours, no prefetch", Placement(), "off")
VRAM = Way("ours, some in VRAM", Placement(guesses=True), "on", in_vram=True)
HOME = Way("ours, home pace", Placement(share=ALL, guesses=True), "on", home=True)
THEIRS = Way(
    "published",
    Placement(
        PUBLISHED[0].route, PUBLISHED[0].share, waves=PUBLISHED[0].waves, whole_groups=True, splits=PUBLISHED[0].splits,
        lanes=PUBLISHED[0].lanes, guesses=True,
    ),
    "on",
)  # fmt: skip


def few_experts(routing: Routing, tokens: int) -> Routing:
    """So many tokens of a model of that shape, all of whose layers name only HIT_EXPERTS times top_k experts: each of
    them within the first HIT_EXPERTS tokens."""
    top_k, random = routing.ids.shape[1], np.random.default_rng(1)
    orders = [np.arange(HIT_EXPERTS * top_k, dtype=np.int32).reshape(HIT_EXPERTS, top_k)]
    orders += [random.permutation(HIT_EXPERTS * top_k)[:top_k].astype(np.int32)[None] for _ in range(tokens)]
    ids = np.repeat(np.concatenate(orders)[:tokens], routing.layers, axis=0)
    steps = len(ids)
    layer = np.tile(np.arange(routing.layers, dtype=np.int32), tokens)
    return Routing(routing.layers, routing.experts, layer, np.arange(steps + 1, dtype=np.int64), ids, (ids,))


class Tokens:
    """One sequence's tokens, routed as `routing` says."""

    def __init__(
        self, store: Store, weights: DeviceWeights, state: DeviceState, slots: SharedSlots, way: Way, routing: Routing
    ) -> None:
        config, layers = store.config, routing.layers
        self.routing, self.state, self.way = routing, state, way
        guessed = way.placement.guesses
        device = state.conv.device
        shape = (layers, 2, 1, config.experts_per_token) if guessed else (layers, 1, config.experts_per_token)
        self.pause, self.slowed_ns = Pause(device) if way.home else None, 0.0
        self.replay = Replay(
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(layers, 1, config.latent_size, device=device),
            self.pause.launch if self.pause else None,
        )
        self.x = SyntheticBlocks(store.layout, 1, 1).inputs(64 * layers, seed=1).view(64, layers, 1, -1)
        self.decoder = Decoder(weights, state.pool, slots, 1, CONTEXT_TOKENS, way.placement, self.replay)
        self.decoder.compile([state])
        self.decoder.capture()

    def slow(self, layer_ns: float) -> None:
        """So much longer from now on before each layer's hand-off."""
        self.slowed_ns = max(0.0, layer_ns)
        if self.pause is not None:
            self.pause.nanoseconds.fill_(round(self.slowed_ns))

    def step(self, token: int, routing: Routing | None = None, nothing: bool = False) -> float:
        """-> milliseconds by the wall clock. `nothing`: no input is finite, so that no expert has anything to compute;
        `clear` before any other."""
        routing = routing or self.routing
        layers = routing.layers
        rows = slice(token * layers, (token + 1) * layers)
        ids = torch.from_numpy(routing.ids[rows])
        if self.replay.ids.dim() == 4:
            # What layer i posts behind its own ids is the guess that was made there at layer i + 1.
            guesses = torch.from_numpy(routing.guesses[0][rows])
            ids = torch.stack([ids, guesses], dim=1)
        self.replay.ids.copy_(ids.view(self.replay.ids.shape))
        if nothing:
            self.replay.x.fill_(torch.nan)
        else:
            self.replay.x.copy_(self.x[token % len(self.x)])
        torch.cuda.synchronize()
        begun = time.perf_counter()
        self.decoder.run([Row(self.state, 0)])
        return (time.perf_counter() - begun) * 1e3

    def clear(self) -> None:
        """What tokens that computed nothing leave is not finite."""
        self.state.conv.zero_()
        self.state.ssm.zero_()
        torch.cuda.synchronize()
