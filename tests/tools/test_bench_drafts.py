"""The benchmark of drafts with a scripted network and clock: what is fed, what is counted, what is said of it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from services.engine.gpu.token import Replay
from services.engine.model import Segment
from services.engine.state import Pending
from services.tools import bench_drafts, draft_parts
from services.tools.bench_drafts import Answers, Block, Replayed, in_turns, made_up
from services.tools.draft_parts import Named, Parts, ids_of, processor_us
from services.tools.draft_report import Measured, rows, told
from services.tools.predict import SUPER
from services.tools.replay import Trace
from services.tools.synthetic_shapes import SUPER as MODEL
from services.tools.told_drafts import DraftError

BEGIN, TOKENS, LAYERS = 100, 40, 3
ONE_S, TWO_S, SAME_S, APART_S, IDLE_S, PREPARING_S = 0.020, 0.030, 0.025, 0.034, 0.004, 5.0
ASKED_S, SETTLED_S = 0.003, 0.001


class State:
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.pending: Pending | None = None
        self.conv = self.ssm = torch.zeros(1)
        self.followed, self.can_draft = None, True

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
        known = [
            torch.equal(there.ids[:, row], self.trace.ids[state.tokens - BEGIN + row, :, 0]) for row in range(len(ids))
        ]
        assert known[0], "its own routing"
        if nothing:
            self.clock.now += IDLE_S * len(ids)
        elif all(known):
            self.clock.now += {1: ONE_S, 2: TWO_S}[len(ids)]
        else:
            self.clock.now += SAME_S if torch.equal(there.ids[:, 0], there.ids[:, 1]) else APART_S
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
            self.clock.now += SETTLED_S
            state.ids.extend(pending.ids)


class Head:
    """Whether what it names is the middle layer's, of the last ids of a sequence."""

    def __init__(self, clock: SimpleNamespace, trace: Trace) -> None:
        self.clock, self.trace, self.asked = clock, trace, 0
        self.replays = {
            rows: Replay(torch.zeros(1, rows, 1, dtype=torch.int32), torch.zeros(1, rows, 4)) for rows in (1, 2)
        }

    def logits(self, states: Any, ids: Any) -> Tensor:
        self.clock.now += ASKED_S
        self.asked += 1
        last = states[0].tokens - BEGIN
        assert torch.equal(self.replays[1].ids[0], self.trace.ids[[last], 1, 0])
        if last:
            assert torch.equal(self.replays[2].ids[0], self.trace.ids[[last - 1, last], 1, 0])
        return torch.zeros(1)


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
        head = Head(clock, trace)
        replayed = Replayed(network, replays, trace, BEGIN, Block(head, head.replays))
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
    plain, drafted, own = in_turns(answers, [0.0, 0.5, 1.0], TOKENS, rounds=2, block=True)
    assert (plain.tokens, plain.steps, plain.tried) == (2 * TOKENS, 2 * TOKENS, 0)
    assert plain.ms() == pytest.approx(1e3 * ONE_S)
    assert plain.experts == 2 * TOKENS * LAYERS
    wrong, half, right = drafted.values()
    assert [each.right / each.tried for each in (wrong, half, right)] == pytest.approx([0, 0.5, 1], abs=0.03)
    assert right.ms() == pytest.approx(1e3 * (TWO_S + SETTLED_S) / 2)
    assert right.outside_ms == pytest.approx(1e3 * SETTLED_S)
    assert own[1.0].step_ms == pytest.approx(1e3 * (TWO_S + SETTLED_S + ASKED_S))
    assert own[0.0].step_ms == pytest.approx(1e3 * (TWO_S + ASKED_S), rel=0.02), "the last has no draft"
    head = answers.network.block.head
    warming = own[0.5].tried // 2  # drafts of an answer that is not counted
    assert head.asked == sum(each.tried for each in own.values()) + warming
    assert right.experts == plain.experts
    assert wrong.steps == 2 * TOKENS
    assert wrong.experts > 1.9 * plain.experts


def test_the_parts_of_a_step(made: Any) -> None:
    answers, _ = made(False)
    parts = draft_parts.measured(answers, TOKENS - 1)
    assert parts.idle_ms == pytest.approx((1e3 * IDLE_S, 2e3 * IDLE_S))
    assert (parts.one_ms, parts.same_ms, parts.apart_ms) == pytest.approx((20, 25, 34))
    assert parts.settle_ms == pytest.approx(1e3 * SETTLED_S)
    assert parts.again == pytest.approx((25 - 8) / (20 - 4) - 1)
    assert parts.twice == pytest.approx((34 - 8) / (20 - 4) - 1)
    assert answers.network.named is Named.TRACED


def test_rows_that_name_the_same_and_no_expert_together() -> None:
    trace = made_up(MODEL, 12)
    one = ids_of(trace, [3, 4], Named.TRACED)
    assert torch.equal(one, trace.ids[[3, 4], :, 0].transpose(0, 1))
    same, apart = (ids_of(trace, [3, 4], named) for named in (Named.SAME, Named.APART))
    assert torch.equal(same[:, 0], one[:, 0])
    assert torch.equal(same[:, 1], one[:, 0])
    assert torch.equal(apart[:, 0], one[:, 0])
    for layer, (first, second) in enumerate(apart.tolist()):
        assert len({*first, *second}) == 44
        assert set(second) <= set(trace.ids[:, layer].flatten().tolist()), "in RAM"


def test_the_processor_alone_computes_one_token_and_two_of_the_same_experts() -> None:
    trace, clock = made_up(MODEL, 8), SimpleNamespace(now=0.0)

    class Host:
        def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> None:
            assert x.shape == (len(ids), MODEL.latent_size)
            assert all(torch.equal(row, ids[0]) for row in ids)
            clock.now += {1: 400e-6, 2: 600e-6}[len(ids)]

    assert processor_us(cast(Any, Host()), trace, lambda: clock.now) == pytest.approx((400, 600))


def test_another_answer_ends_the_run(made: Any) -> None:
    answers, _ = made(True)
    with pytest.raises(DraftError, match="another one"):
        in_turns(answers, [1.0], TOKENS, rounds=1)


def test_what_is_said_of_it(made: Any) -> None:
    answers, _ = made(False)
    plain, drafted, own = in_turns(answers, [0.5, 1.0], TOKENS, rounds=1, block=True)
    parts = Parts((1e3 * IDLE_S, 1e3 * IDLE_S), 20.0, 25.0, 34.0, 0.0)
    found = Measured(SUPER, 500_000_000, 170_000_000, 0.4, parts, (400.0, 600.0), 50.0, (60.0, 40.0), plain, drafted)
    assert found.tok_s(None, slow=False, own=False) == pytest.approx(50)
    assert found.gain(1.0, slow=False, own=False) == pytest.approx(2 / 1.55)
    assert found.break_even(slow=False, own=False) == pytest.approx(0.54, abs=0.02)
    dense_ms = 4 - 40 * 20e-3
    layer_ms = (20 - dense_ms) / 40
    draft_ms = 500e6 / (SUPER.dense_bytes / dense_ms) + layer_ms
    assert found.tok_s(1.0, slow=False, own=True) == pytest.approx(2e3 / (31 + draft_ms), rel=0.001)
    slow_gb_s = 0.85 * 448
    more_ms = SUPER.dense_bytes / slow_gb_s / 1e6 - dense_ms
    assert found.tok_s(None, slow=True, own=False) == pytest.approx(1e3 / (20 + more_ms))
    settling_ms = 2 * 170e6 * (1 / slow_gb_s - dense_ms * 1e6 / SUPER.dense_bytes) / 1e6
    assert found.tok_s(1.0, slow=True, own=False) == pytest.approx(2e3 / (31 + more_ms + settling_ms), rel=0.02)
    assert found.gain(1.0, slow=True, own=True) > found.gain(1.0, slow=False, own=True), "dense weights are paid once"
    plan = found.planned(slow=False, own=False)
    planned, plain_tok_s = found.predicted(1.0, slow=False, own=False)
    experts_ms = 1e3 / plain_tok_s - dense_ms - 0.8
    assert 0.07 < plan.again < 0.5, "the card's part costs its bytes, the processor's half of its time"
    two_ms = 1e3 / plain_tok_s + experts_ms * (13 + 9 * plan.again) / 22
    settling_here_ms = 2 * 170e6 / (SUPER.dense_bytes / dense_ms)
    assert planned == pytest.approx(2e3 / plain_tok_s / (two_ms + settling_here_ms), rel=1e-6)
    measured = replace(found, own=own)
    assert measured.tok_s(1.0, slow=False, own=True) == pytest.approx(2e3 / 34, rel=0.001)
    slower_ms = 500e6 * (1 / slow_gb_s / 1e6 - dense_ms / SUPER.dense_bytes)
    assert measured.tok_s(1.0, slow=True, own=True) == pytest.approx(
        2e3 / (34 + more_ms + slower_ms + settling_ms), rel=0.02
    )
    written = list(rows(measured, "note"))
    assert {name for name, *_ in written} > {"mtp.break_even", "mtp.gain", "mtp.predicted", "mtp.token_bytes"}
    added = [value for name, value, *_ in written if name == "mtp.own_draft_ms"]
    assert added == pytest.approx([1e3 * ASKED_S] * 2, rel=0.05)  # the last step has none
    gains = [value for name, value, _, note in written if name == "mtp.gain" and "as is, drafts that" in note]
    assert gains == [found.gain(share, slow=False, own=False) for share in (0.5, 1.0)]
    assert sum("computed, added to each step" in note for _, _, _, note in written) == 2 * (2 * 2 + 1)
    assert any("the block's own drafts" in note for _, _, _, note in written)
    printed = "\n".join(told(found))
    assert "50.00 tok/s without drafts" in printed
    assert "pays from" in printed
    assert "the cost of the block added (computed)" in printed


def test_routing_of_the_full_shape_repeats_as_published() -> None:
    trace = made_up(MODEL, 12)
    assert trace.repeated() == pytest.approx(0.4, abs=0.03)
    assert trace.ids.shape == (12, 40, 1, 22)
    assert trace.x.shape[1:] == (40, 1, MODEL.latent_size)
