"""An engine whose states have the real model's shape and whose network computes nothing: for measuring snapshots on
any machine. Server, scheduler, payloads and hot states are the real ones. `python -m services.tools.snapshot_engine GB
FOLDER DEVICE` with so much RAM for hot states, an exchange folder, and states in RAM (cpu) or in a card's memory
(cuda); prints its port; ends when its standard input does.
"""

import asyncio
import dataclasses
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

from services.engine.engine import Engine
from services.engine.exchange import mark
from services.engine.experts.streamer import Counters
from services.engine.gpu.memory import DevicePool, DeviceState, page_locked
from services.engine.grammar import Grammars
from services.engine.metrics import Metrics
from services.engine.model import Segment
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool, pages_for
from services.engine.request import Info
from services.engine.scheduler import Scheduler
from services.engine.server import Server
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.memory import Fresh, fresh
from services.engine.snapshots.payload import PayloadFormat
from services.engine.state import State
from services.tools.synthetic_shapes import SUPER

CONTEXT_TOKENS = 32_768
STOP_ID = 11  # of the demo's tokenizer, which the api needs
ANSWER = (1000, 1001, 1002, 1003)  # then STOP_ID
SHAPE = dataclasses.replace(SUPER, vocab_size=4096)


class NoExperts:
    """No expert is ever asked for."""

    @property
    def prefetching(self) -> bool:
        return False

    def counters(self) -> Counters:
        return Counters(0, 0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0, 0)

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        raise NotImplementedError

    def prefetch(self, layer: int, ids: Tensor) -> None:
        raise NotImplementedError


class NoNetwork:
    """Fills a fresh state with noise, writes a trace of each id, and answers ANSWER."""

    def __init__(self, config: ModelConfig, device: str) -> None:
        self._noise = torch.rand(1 << 20, generator=torch.Generator().manual_seed(1)).to(device)
        self._config = config

    def forward(self, segments: Sequence[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        logits = torch.zeros(len(segments), self._config.vocab_size)
        for row, segment in zip(logits, segments, strict=True):
            row[self._feed(segment)] = 1.0
        return logits

    def reading(self, segments: Sequence[Segment]) -> Generator[float, None, Tensor]:
        yield 0.0
        return self.forward(segments)

    def _feed(self, segment: Segment) -> int:
        state, config = segment.state, self._config
        if not state.tokens:
            flat = state.ssm.view(-1)
            for start in range(0, len(flat), len(self._noise)):
                flat[start : start + len(self._noise)] = self._noise[: len(flat) - start]
        count = len(segment.ids)
        state.ssm.view(-1)[: len(segment.ids)] += torch.tensor(
            segment.ids, dtype=torch.float32, device=state.ssm.device
        )
        size = count * config.kv_heads * config.head_dim
        keys = self._noise[segment.ids[0] : segment.ids[0] + size].view(count, config.kv_heads, config.head_dim)
        for layer in range(len(config.attention_layers)):
            state.write_kv(layer, keys, keys)
        state.ids.extend(segment.ids)
        said = ANSWER.index(segment.ids[-1]) + 1 if segment.ids[-1] in ANSWER else 0
        return (*ANSWER, STOP_ID)[said]


def states(device: str, sequences: int) -> tuple[PagePool, Callable[[ModelConfig, Any], State], Fresh]:
    """Where states are, how one is made, and memory for what is kept of them."""
    if device == "cpu":
        pool = PagePool(SHAPE, pages_for(CONTEXT_TOKENS))
        pool.most_spares = sequences
        return pool, State, fresh
    places = sequences + 1  # one that is still being given back
    return (
        DevicePool(SHAPE, torch.device(device), places=places, pages=pages_for(CONTEXT_TOKENS)),
        DeviceState,
        page_locked,
    )


async def serve(hot_gb: float, exchange_dir: Path, device: str) -> None:
    info = Info(
        model="synthetic",
        model_fingerprint="00",
        arithmetic_fingerprint="00",
        vocab_size=SHAPE.vocab_size,
        context_tokens=CONTEXT_TOKENS,
        max_sequences=2,
        queue_limit=16,
        vision=False,
        device=device,
        version="0",
        exchange=mark(exchange_dir),
    )
    experts = NoExperts()
    pool, new_state, memory = states(device, info.max_sequences)
    form = PayloadFormat(SHAPE, info.model_fingerprint, info.arithmetic_fingerprint, pool.keys.element_size())
    transit_bytes = 3 * form.size_bytes(CONTEXT_TOKENS)
    hot = HotStates(form, info.arithmetic_fingerprint, int(hot_gb * 1e9), transit_bytes, memory)
    metrics = Metrics(info, experts, CollectorRegistry())
    network = NoNetwork(SHAPE, device)
    scheduler = Scheduler(network, pool, hot, metrics, info.max_sequences, 1024, new_state)
    grammars = Grammars(Path("none"), info.vocab_size, 1, 1.0)
    server = Server("127.0.0.1", 0, 60.0)
    await server.start()
    await server.serve(Engine(info, scheduler, experts, grammars, exchange_dir=exchange_dir))
    print(server.port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
