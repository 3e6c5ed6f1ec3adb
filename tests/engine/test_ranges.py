"""Names for profilers: what a token and a sweep say while somebody profiles, in which order, and nothing otherwise."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.experts.device.ring import Group, Pass
from services.engine.gpu import ranges
from services.engine.gpu.decoder import Decoder
from services.engine.gpu.expert_sweep import ExpertSweep
from services.engine.gpu.sweep import Sweep
from services.engine.gpu.weights import AttentionWeights, MambaWeights, MoeWeights
from services.engine.model import Segment


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What NVTX was told: a line for each range, indented as it nests."""
    lines: list[str] = []
    depth = 0

    @contextmanager
    def told(name: str) -> Iterator[None]:
        nonlocal depth
        lines.append("  " * depth + name)
        depth += 1
        yield
        depth -= 1

    monkeypatch.setattr(torch.cuda.nvtx, "range", told)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield lines
    ranges.switch(False)
    assert depth == 0


class Anything:
    """Stands for buffers and hand-off: whatever is asked of it, it takes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **more: 0


def token() -> None:
    decoder = Decoder.__new__(Decoder)
    decoder.rows, decoder.layers, decoder.late = 2, 3, 0
    decoder._tokens = decoder._last_waits_ns = 0
    turns = SimpleNamespace(times=lambda: None, serve=lambda turns: turns, retire=lambda: None, stopped=0, waited=0)
    decoder.turns = turns  # type: ignore[assignment]
    decoder.spent, decoder.vram = Anything(), None  # type: ignore[assignment]
    inputs = SimpleNamespace(fill=lambda states, drafts: None, host_x=torch.zeros(2, 8))
    pool = SimpleNamespace(kept=None)
    decoder.token = SimpleNamespace(inputs=inputs, host_logits=torch.zeros(2), pool=pool)  # type: ignore[assignment]
    decoder.graph = Anything()  # type: ignore[assignment]
    decoder.run([SimpleNamespace(state=None, id=0, embedding=torch.zeros(8), draft=False)] * 2)  # type: ignore[list-item]


def test_a_token(said: list[str]) -> None:
    token()
    assert said == [], "off"
    ranges.switch(True)
    token()
    assert said == ["token of sequences: 2", "  inputs", "  launch", "  serve", "  until the end"]


def test_a_sweep_names_its_layers_and_none_spans_a_place_where_others_run(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranges.switch(True)
    kinds = (MambaWeights, MoeWeights, AttentionWeights)
    layers = [kind.__new__(kind) for kind in kinds]
    for layer in layers:
        object.__setattr__(layer, "fc2", None)
    sweep = Sweep.__new__(Sweep)
    sweep.tokens, sweep.norms = 8, [torch.zeros(1)] * 3
    sweep.weights = SimpleNamespace(layers=layers)  # type: ignore[assignment]
    for name in ("chosen", "chosen_weights", "latent", "routed", "x"):
        setattr(sweep, name, torch.zeros(8, 1))
    part = SimpleNamespace(rows=slice(0, 2))
    sweep._parts = lambda counts, states: [part]  # type: ignore[assignment, method-assign]
    for name in ("_embed", "_mamba", "_attention", "_route", "_logits"):
        setattr(sweep, name, lambda *words: None)
    monkeypatch.setattr("kernels.linear.sweep.linear", lambda *words, **more: None)

    experts = ExpertSweep.__new__(ExpertSweep)
    experts.layers, experts.top_k, experts.experts, experts.named_blocks, experts.copied_bytes = 1, 1, 2, 0, 0
    experts.layout = SimpleNamespace(block_bytes=1)  # type: ignore[assignment]
    experts.device, experts.up_scales, experts.down_scales = torch.device("cpu"), torch.zeros(1), torch.zeros(1)
    experts.counts, experts.y, experts.out = torch.zeros(2, dtype=torch.int32), torch.zeros(8, 1), torch.zeros(8, 1)
    experts.feed, experts.products = Anything(), Anything()  # type: ignore[assignment]
    groups = iter([Group(1, 1, [Pass(0, 1, 1)]), Group(1, 1, [Pass(1, 1, 1)]), None])
    experts.ring = Anything()  # type: ignore[assignment]
    experts.ring.next = lambda counts, stream: next(groups)  # type: ignore[assignment, method-assign]
    order = SimpleNamespace(starts=torch.tensor([0, 1, 2]))
    monkeypatch.setattr("kernels.experts.prefill.order", lambda ids, count: order)
    monkeypatch.setattr("kernels.experts.prefill.combine", lambda *words: None)
    sweep.experts = experts

    for _ in sweep.run([Segment(None, [1, 2])], []):  # type: ignore[arg-type]
        said.append("-")
    assert said == [
        "-",
        "sweep: Mamba layer 0",
        "-",
        "sweep: router and shared expert of layer 1",
        "sweep: a group's experts, MoE layer 0",
        "-",
        "sweep: a group's experts, MoE layer 0",
        "-",
        "sweep: attention layer 2",
    ]
