"""A scheduler around the GPU's model, in Triton's interpreter: real states, pages, sweeps and steps of a tiny network,
whose experts are real ones in Python's place of the hand-off.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from interpreted_step import decoder
from prometheus_client import CollectorRegistry
from scripted_network import Asked
from test_device_head import RealExperts
from torch import Tensor
from toy_engine import INFO

from services.engine.drafts import Source
from services.engine.experts.store import Store
from services.engine.experts.streamer import HostExperts, open_experts
from services.engine.gpu.expert_sweep import ExpertSweep
from services.engine.gpu.ledger import Kv, sweep_room_bytes, sweep_scratch_bytes
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.room import Room
from services.engine.gpu.sweep import Sweep
from services.engine.gpu.weights import DeviceWeights
from services.engine.load import ONE_BY_ONE_TOKENS
from services.engine.metrics import Metrics
from services.engine.model import Segment
from services.engine.model_config import LAYER_WORDS
from services.engine.request import Request
from services.engine.scheduler import Scheduler
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import PayloadFormat
from services.engine.speculation import Speculation
from services.tools.synth import synthesise
from services.tools.synthetic_shapes import SHAPES, SMALL

CPU = torch.device("cpu")
VOCABULARY = 32
CONTEXT_TOKENS, PLACES = 128, 3


def tiny_store(folder: Path) -> Store:
    """Of one layer of each kind, and as small as the kernels take it: the interpreter is slow."""
    layers = tuple(LAYER_WORDS[word] for word in "ME*")
    heads = {"attention_heads": 2, "kv_heads": 1, "head_dim": 16}
    mamba = {"mamba_heads": 4, "mamba_head_dim": 16, "mamba_state": 16, "mamba_groups": 1}
    experts = {"experts": 8, "experts_per_token": 3, "expert_width": 32, "latent_size": 32, "shared_width": 32}
    shape = replace(SMALL, layers=layers, vocab_size=VOCABULARY, hidden_size=64, **heads, **mamba, **experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "tiny", shape)
        return synthesise(folder, "tiny")


class DeviceBench:
    """`chunk_tokens` as the GPU's model has them; 0: all is read token by token. Its schedulers' readings stop wherever
    they can, and `at_stop` is called there."""

    def __init__(self, store: Store, chunk_tokens: int, kv: Kv = "bf16") -> None:
        experts = open_experts(store, slots=8)
        assert isinstance(experts, HostExperts)
        config, self.experts, self.chunk_tokens = store.config, experts, chunk_tokens
        self.pool = DevicePool(config, CPU, places=PLACES, pages=2 * PLACES, kv=kv, drafts=True)
        weights = DeviceWeights.load(store.dense(), config, CPU)
        self.model = DeviceModel.__new__(DeviceModel)
        self.model.pool, self.model.weights, self.model.config = self.pool, weights, config
        self.model.told, self.model.sweep = str, None
        if chunk_tokens:
            room = Room(torch.full((sweep_room_bytes(config, chunk_tokens),), 0xFF, dtype=torch.uint8))
            scratch_bytes = sweep_scratch_bytes(config, chunk_tokens)
            swept = ExpertSweep(experts.host, config.experts_per_token, chunk_tokens, room, scratch_bytes)
            self.model.sweep = Sweep(weights, self.pool, swept, chunk_tokens, CONTEXT_TOKENS)
        self.model.decoders = [decoder(weights, self.pool, rows, RealExperts(rows, experts)) for rows in (1, 2, 4)]
        self.form = PayloadFormat(config, "m", "a", kv_number_bytes=self.pool.keys.element_size())
        self.at_stop: Callable[[Sequence[Segment]], None] = lambda segments: None

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        return self.model.forward(segments, give_way)

    def reading(self, segments: list[Segment]) -> Generator[float, None, Tensor]:
        running = self.model.reading(segments)
        try:
            while True:
                yield next(running)
                self.at_stop(segments)
        except StopIteration as end:
            logits: Tensor = end.value
            return logits
        finally:
            running.close()

    def scheduler(self, *sources: Source) -> Scheduler:
        hot = HotStates(self.form, "a", 1 << 24)
        metrics = Metrics(INFO, self.experts, CollectorRegistry())
        chunk_tokens = self.chunk_tokens or ONE_BY_ONE_TOKENS
        speculation = Speculation(sources, self.model.settle, metrics, always=True)
        made = Scheduler(
            self, self.pool, hot, metrics, PLACES, chunk_tokens, DeviceState, slice_s=0.0, speculation=speculation
        )
        made.others_wait = lambda: True
        return made

    def alone(self, request: Request) -> Asked:
        """With a scheduler of its own, without drafts."""
        scheduler = self.scheduler()
        asked = Asked(scheduler, request)
        self.run(scheduler)
        return asked

    def run(self, scheduler: Scheduler, between: Callable[[], None] = lambda: None) -> None:
        """Until nothing is left to do; all that was taken is given back."""
        while scheduler.runnable:
            scheduler.step()
            scheduler.check()
            between()
        assert not scheduler.sequences
        assert self.pool.free == self.pool.total
        self.experts.check()
