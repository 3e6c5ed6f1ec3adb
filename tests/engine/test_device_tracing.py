"""What a GPU routes becomes a trace of whole calls: steps as they end, sweeps once they have ended. And on a GPU."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from interpreted_step import IDS, Experts, Sequences, interpreted, weights
from torch import Tensor

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.experts.trace import DECODE, PREFILL, Header, Recorder, Trace, read_trace
from services.engine.gpu.tracing import Tracing
from services.engine.model import Model, Segment

HEADER = Header(
    1, "tiny", "00ff", layers=3, experts=20, top_k=4, latent=32, width=16, block_bytes=4096, dense_bytes=100
)


def kept(rows: int, guesses: bool, seed: int) -> Any:
    """A step's numbers as token.py keeps them."""
    random = torch.Generator().manual_seed(seed)
    shape = (HEADER.layers, 2 if guesses else 1, rows, HEADER.top_k)
    weights = torch.rand(2, HEADER.layers, rows, HEADER.top_k, generator=random)
    chosen = torch.randint(0, HEADER.experts, shape, generator=random, dtype=torch.int32)
    return SimpleNamespace(chosen=chosen, chosen_weights=weights[0], guessed_weights=weights[1])


def recorded(path: Path) -> tuple[Recorder, Tracing]:
    recorder = Recorder(path, HEADER, 1 << 20)
    return recorder, Tracing(recorder)


def named(trace: Trace, call: int, ahead: int = 0) -> np.ndarray:
    rows = trace.rows[(trace.rows["call"] == call) & (trace.rows["ahead"] == ahead)]
    return rows["ids"].astype(np.int32)


@pytest.mark.parametrize("guesses", [False, True])
def test_a_step_is_a_call(tmp_path: Path, guesses: bool) -> None:
    recorder, tracing = recorded(tmp_path / "trace")
    steps = [kept(2, guesses, seed=1), kept(1, guesses, seed=2)]
    tracing.step(cast(Any, steps[0]), [True, False])
    tracing.step(cast(Any, steps[1]), [False])
    recorder.close()
    trace = read_trace(tmp_path / "trace")
    for call, step in enumerate(steps):
        assert np.array_equal(named(trace, call), step.chosen[:, 0].flatten(0, 1).numpy())
        rows = trace.rows[(trace.rows["call"] == call) & (trace.rows["ahead"] == 0)]
        assert np.allclose(rows["scores"], step.chosen_weights.flatten(0, 1).numpy(), atol=1e-3)
        if guesses:  # of the last layer there is none
            assert np.array_equal(named(trace, call, ahead=1), step.chosen[:-1, 1].flatten(0, 1).numpy())
            rows = trace.rows[(trace.rows["call"] == call) & (trace.rows["ahead"] == 1)]
            assert np.allclose(rows["scores"], step.guessed_weights[:-1].flatten(0, 1).numpy(), atol=1e-3)
    assert (trace.prompt_tokens, trace.decoded_tokens) == (1, 2)
    assert len(trace.routing().guesses) == guesses


def test_a_sweep_is_a_call_though_steps_run_between_its_layers(tmp_path: Path) -> None:
    recorder, tracing = recorded(tmp_path / "trace")
    ids = torch.randint(0, HEADER.experts, (HEADER.layers, 9, HEADER.top_k), dtype=torch.int32)
    tracing.begin_sweep()
    tracing.sweep(ids[2], ids[2].float())  # is given up here
    tracing.begin_sweep()
    for layer in range(HEADER.layers):
        tracing.sweep(ids[layer], ids[layer].float())
        tracing.step(cast(Any, kept(1, True, seed=layer)), [False])
    tracing.end_sweep()
    tracing.begin_sweep()
    tracing.sweep(ids[0], ids[0].float())  # nor does this one end
    recorder.close()
    trace = read_trace(tmp_path / "trace")
    assert sorted(set(trace.rows["call"].tolist())) == [0, 1, 2, 3]
    assert np.array_equal(named(trace, 3), ids.flatten(0, 1).numpy())
    assert (trace.prompt_tokens, trace.decoded_tokens) == (9, 3)
    routing = trace.routing()
    assert routing.rows_of_step.tolist() == [1] * 9 + [9] * 3
    assert routing.layer.tolist() == [0, 1, 2] * 4


@pytest.mark.usefixtures(interpreted.__name__)
def test_what_a_step_posts_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted: list[Tensor] = []
    post = Experts.post

    def spied(self: Experts, layer: int, ids: Tensor, x: Tensor) -> None:
        posted.append(ids[0].to("cpu", copy=True))
        post(self, layer, ids, x)

    monkeypatch.setattr(Experts, "post", spied)
    sequences = Sequences(weights(), [1, 2])
    recorder = Recorder(tmp_path / "trace", replace(HEADER, layers=1, experts=5, top_k=2), 1 << 20)
    sequences.model.trace(recorder)
    sequences.read([(0, IDS[0][:3]), (1, IDS[1][:1])])
    recorder.close()
    trace = read_trace(tmp_path / "trace")
    assert trace.rows["call"].tolist() == [0, 0, 1, 1]
    assert np.array_equal(trace.rows["ids"], torch.cat(posted).numpy())
    assert (trace.prompt_tokens, trace.decoded_tokens) == (3, 1)
    assert (trace.rows["scores"] > 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu(demo_store: Store, tmp_path: Path) -> None:
    """Prompts by a sweep and by steps, an answer: all tokens of all layers, mostly as the CPU engine routes them; and
    the same bits as without a trace."""
    from test_device_model import opened  # compiles for a GPU

    random = torch.Generator().manual_seed(3)
    long, short = (torch.randint(12, 4000, (count,), generator=random).tolist() for count in (150, 7))

    def read(model: Any) -> Tensor:
        state = model.new_state(len(long) + len(short) + 2)
        *_, end = run(model, Segment(state, long, sweep=True)), run(model, Segment(state, short))
        found = torch.cat([end, run(model, Segment(state, [5])), run(model, Segment(state, [6]))])
        state.release()
        return found

    def run(model: Any, segment: Segment) -> Tensor:
        return cast(Tensor, model.forward([segment]))

    with opened(demo_store, pages=40) as device:
        plain = read(device.model)
        recorder = Recorder(tmp_path / "gpu", Header.of(demo_store, "demo"), 1 << 24)
        device.model.trace(recorder)
        assert torch.equal(read(device.model), plain)
        recorder.close()
    ours = read_trace(tmp_path / "gpu")
    recorder = Recorder(tmp_path / "cpu", Header.of(demo_store, "demo"), 1 << 24)
    experts = open_experts(demo_store, slots=sum(map(len, demo_store.blocks)), trace=recorder)
    cpu = Model(demo_store.dense(), demo_store.config, experts, recorder)
    state = cpu.new_state(512)
    for ids in (long, short, [5], [6]):
        cpu.forward([Segment(state, ids)])
    experts.close()
    theirs = read_trace(tmp_path / "cpu")
    assert ours.whole
    assert (ours.prompt_tokens, ours.decoded_tokens) == (theirs.prompt_tokens, theirs.decoded_tokens) == (157, 2)
    assert set(ours.rows["phase"]) == {PREFILL, DECODE}

    def by_layer(trace: Trace, ahead: int) -> np.ndarray:
        """[layers, rows, top_k], each row's ids in order."""
        rows = trace.rows[trace.rows["ahead"] == ahead]
        found = [np.sort(rows["ids"][rows["layer"] == layer], axis=1) for layer in range(bool(ahead), 7)]
        return np.stack(found)

    assert (by_layer(ours, 0) == by_layer(theirs, 0)).mean() > 0.9
    decoded = by_layer(ours, 1)  # a sweep guesses nothing
    assert decoded.shape[1] == len(short) + 2
    assert (decoded == by_layer(theirs, 1)[:, -len(short) - 2 :]).mean() > 0.9
    assert (by_layer(ours, 0) == np.roll(by_layer(theirs, 0), 1, axis=1)).mean() < 0.8, "another token must show"
