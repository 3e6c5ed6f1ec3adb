"""The benchmark of drafts with a scripted network and clock: what is fed, what is counted, what is said of it."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from services.engine.gpu.token import Replay
from services.engine.model import Segment
from services.engine.state import Pending
from services.tools import bench_drafts
from services.tools.bench_drafts import Answers, DraftError, Replayed, in_turns, made_up
from services.tools.draft_report import Measured, rows, told
from services.tools.predict import SUPER
from services.tools.replay import Trace
from services.tools.synthetic_shapes import SUPER as MODEL

BEGIN, TOKENS, LAYERS = 100, 40, 3
ONE_S, TWO_S, IDLE_S, PREPARING_S = 0.020, 0.030, 0.004, 5.0


class State:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.pending: Pending | None = None
        self.conv = self.ssm = torch.zeros(1)

    @property
    def tokens(self) -> int:
        return len(self.ids)


class Network:
    """What is said depends on what was said before; `odd`: it notices drafts."""

    def __init__(self, clock: SimpleNamespace, trace: Trace, replays: dict[int, Replay], odd: bool) -> None:
        self.clock, self.trace, self.replays, self.odd, self.experts = clock, trace, replays, odd, 0

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        (segment,) = segments
        ids, state = segment.all_ids, segment.state
        there = self.replays[len(ids)]
        nothing = bool(there.x.isnan().all())
        self.clock.now += IDLE_S if nothing else {1: ONE_S, 2: TWO_S}[len(ids)]
        for row in range(len(ids)):
            assert torch.equal(there.ids[:, row], self.trace.ids[state.tokens - BEGIN + row, :, 0]), "its own routing"
        self.experts += int(torch.unique(there.ids).numel())
        last = [*state.ids, *ids][BEGIN:]
        said = [
            (7 * sum(last[: len(last) - len(ids) + row + 1]) + len(last) - len(ids) + row) % 50
            for row in range(len(ids))
        ]
        if self.odd and segment.drafts:
            said = [49, 49]
        state.ids.extend(segment.ids)
        state.pending = Pending(list(segment.drafts)) if segment.drafts else None
        return torch.nn.functional.one_hot(torch.tensor(said), 50).float()

    def settle(self, state: Any, accepted: int) -> None:
        pending, state.pending = state.pending, None
        if pending and accepted:
            state.ids.extend(pending.ids)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], tuple[Answers, Network]]:
    """On a machine whose clock runs while a replay is prepared, too."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(bench_drafts, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(bench_drafts, "synchronise", lambda: None)

    def make(odd: bool) -> tuple[Answers, Network]:
        ids = torch.arange(LAYERS * (TOKENS + 2), dtype=torch.int32).view(TOKENS + 2, LAYERS, 1, 1)
        trace = Trace(ids, torch.ones(5, LAYERS, 1, 4), 0)
        replays = {
            rows: Replay(torch.zeros(LAYERS, rows, 1, dtype=torch.int32), torch.zeros(LAYERS, rows, 4))
            for rows in (1, 2)
        }
        network = Network(clock, trace, replays, odd)
        replayed = Replayed(network, replays, trace, BEGIN)
        forward = replayed.forward

        def slow(segments: list[Segment], give_way: Any = None) -> Tensor:
            replayed.preparing_s += PREPARING_S
            clock.now += PREPARING_S
            return forward(segments, give_way)

        monkeypatch.setattr(replayed, "forward", slow)
        return Answers(replayed, cast(Any, State()), network.settle, lambda: network.experts), network

    return make


def test_steps_are_timed_alone_and_drafts_are_right_as_often_as_said(made: Any) -> None:
    answers, _ = made(False)
    plain, drafted = in_turns(answers, [0.0, 0.5, 1.0], TOKENS, rounds=2)
    assert (plain.tokens, plain.steps, plain.tried) == (2 * TOKENS, 2 * TOKENS, 0)
    assert plain.ms() == pytest.approx(1e3 * ONE_S)
    assert plain.experts == 2 * TOKENS * LAYERS
    wrong, half, right = drafted.values()
    assert [each.right / each.tried for each in (wrong, half, right)] == pytest.approx([0, 0.5, 1], abs=0.03)
    assert right.ms() == pytest.approx(1e3 * TWO_S / 2)
    assert right.experts == plain.experts
    assert wrong.steps == 2 * TOKENS
    assert wrong.experts > 1.9 * plain.experts
    assert answers.idle_ms() == pytest.approx(1e3 * IDLE_S)


def test_another_answer_ends_the_run(made: Any) -> None:
    answers, _ = made(True)
    with pytest.raises(DraftError, match="another one"):
        in_turns(answers, [1.0], TOKENS, rounds=1)


def test_what_is_said_of_it(made: Any) -> None:
    answers, _ = made(False)
    plain, drafted = in_turns(answers, [0.5, 1.0], TOKENS, rounds=1)
    found = Measured(SUPER, 500_000_000, 170_000_000, 0.4, 1e3 * IDLE_S, 50.0, (60.0, 40.0), plain, drafted)
    assert found.tok_s(None, slow=False, own=False) == pytest.approx(50)
    assert found.gain(1.0, slow=False, own=False) == pytest.approx(2 / 1.5)
    assert found.break_even(slow=False, own=False) == pytest.approx(0.5, abs=0.02)
    dense_ms = 4 - 40 * 20e-3
    layer_ms = (20 - dense_ms) / 40
    draft_ms = 500e6 / (SUPER.dense_bytes / dense_ms) + layer_ms
    assert found.tok_s(1.0, slow=False, own=True) == pytest.approx(2e3 / (30 + draft_ms), rel=0.001)
    slow_gb_s = 0.85 * 448
    more_ms = SUPER.dense_bytes / slow_gb_s / 1e6 - dense_ms
    assert found.tok_s(None, slow=True, own=False) == pytest.approx(1e3 / (20 + more_ms))
    settling_ms = 2 * 170e6 * (1 / slow_gb_s - dense_ms * 1e6 / SUPER.dense_bytes) / 1e6
    assert found.tok_s(1.0, slow=True, own=False) == pytest.approx(2e3 / (30 + more_ms + settling_ms), rel=0.02)
    assert found.gain(1.0, slow=True, own=True) > found.gain(1.0, slow=False, own=True), "dense weights are paid once"
    planned, plain_tok_s = found.predicted(1.0, slow=False, own=False)
    experts_ms = 1e3 / plain_tok_s - dense_ms - 0.8
    assert planned == pytest.approx(2 / (1 + 0.6 * experts_ms * plain_tok_s / 1e3), rel=0.01)
    written = list(rows(found, "note"))
    assert sorted({name for name, *_ in written}) == ["mtp.break_even", "mtp.gain", "mtp.predicted", "mtp.token_bytes"]
    gains = [value for name, value, _, note in written if name == "mtp.gain" and "as is, drafts that" in note]
    assert gains == [found.gain(share, slow=False, own=False) for share in (0.5, 1.0)]
    assert sum("computed, added to each step" in note for _, _, _, note in written) == 2 * (2 * 2 + 1)
    printed = "\n".join(told(found))
    assert "50.00 tok/s without drafts" in printed
    assert "pays from" in printed


def test_routing_of_the_full_shape_repeats_as_published() -> None:
    trace = made_up(MODEL, 12)
    assert trace.repeated() == pytest.approx(0.4, abs=0.03)
    assert trace.ids.shape == (12, 40, 1, 22)
    assert trace.x.shape[1:] == (40, 1, MODEL.latent_size)
