"""What is said with drafts is what is said without, whatever they are; and they are tried only where that pays."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from drafting_model import small_store
from prometheus_client import CollectorRegistry
from torch import Tensor
from toy_engine import Call

from services.engine.config import EngineConfig
from services.engine.drafts import Copying, Text
from services.engine.engine import Engine
from services.engine.experts.store import Store
from services.engine.load import load
from services.engine.model import Model, Segment
from services.engine.plan import GB, Machine, _drafts, make_plan
from services.engine.request import Form, Grammar, Request, Restore, Thinking
from services.engine.sequence import Sequence
from services.engine.speculation import LEAST_SAMPLES, Judgement, Speculation
from services.engine.state import State

RANDOM = random.Random(3)
PROMPTS = [tuple(RANDOM.choices(range(3, 96), k=RANDOM.randrange(1, 40))) for _ in range(12)]
SEEDED = {"temperature": 1.0, "top_p": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return small_store(tmp_path_factory.mktemp("small"))


class Running:
    def __init__(self, engine: Engine, registry: CollectorRegistry, speculation: Speculation) -> None:
        self.engine, self.registry, self.speculation = engine, registry, speculation

    def ask(self, prompt: Seq[int], max_tokens: int = 24, **more: Any) -> Call:
        return Call(self.engine, Request("r", tuple(prompt), max_tokens, **more))

    def say(self, prompt: Seq[int], max_tokens: int = 24, **more: Any) -> list[int]:
        call = self.ask(prompt, max_tokens, **more)
        call.finish()
        call.handle.cancel()
        return call.tokens

    def counted(self, name: str, **labels: str) -> float:
        found = self.registry.get_sample_value(f"thimble_{name}", {"model_name": self.engine.info.model, **labels})
        assert found is not None
        return found


@contextmanager
def engine(
    store: Store, mode: str, change: Callable[[Speculation], None] = lambda _: None, **settings: Any
) -> Iterator[Running]:
    registry = CollectorRegistry()
    given = {"hot_states_gb": 0.01, "warm_dir": "-", "device": "cpu", "kv_gb": 0.01, "readers": 2, **settings}
    parts = load(EngineConfig(store=store.folder, speculation=mode, **given), registry, say=lambda text: None)
    change(parts.scheduler.speculation)
    running = Engine(parts.info, parts.scheduler, parts.experts, parts.grammars)
    try:
        yield Running(running, registry, parts.scheduler.speculation)
    finally:
        running.close()
    assert running.ended.exception() is None
    assert parts.scheduler.pool.free == parts.scheduler.pool.total


@pytest.fixture(scope="module")
def plain(store: Store) -> Iterator[Running]:
    with engine(store, "off") as running:
        yield running


class Oracle:
    """Knows what will be said, and says so in a given share of cases."""

    costly = True

    def __init__(self, answers: dict[tuple[int, ...], list[int]], share: float, kind: str = "mtp") -> None:
        self.answers, self.share, self.random, self.kind = answers, share, random.Random(1), kind

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        return [self._one(sequence) for sequence in sequences]

    def _one(self, sequence: Sequence) -> int | None:
        answer = self.answers.get(sequence.request.ids)
        if answer is None or sequence.generated_tokens >= len(answer):
            return None
        right = answer[sequence.generated_tokens]
        return right if self.random.random() < self.share else (right + 1) % 96


def oracle(answers: dict[tuple[int, ...], list[int]], share: float, kind: str = "mtp") -> Callable[[Speculation], None]:
    """`kind`: of a source that the engine has, in whose place it is."""

    def change(speculation: Speculation) -> None:
        speculation.sources = [Oracle(answers, share, kind)]

    return change


def even_steps(speculation: Speculation) -> None:
    """Each takes as long as the others, so that which kind of drafts comes first is not this machine's business."""
    ticks = itertools.count()
    speculation._clock = lambda: float(next(ticks))


def test_words_are_the_same_with_the_block_and_with_copies(store: Store, plain: Running) -> None:
    with engine(store, "on", even_steps) as running:
        for prompt in PROMPTS:
            repeated = prompt * 3
            for how in (
                {},
                SEEDED,
                {"temperature": 0.7, "seed": 5, "presence_penalty": 0.5, "repetition_penalty": 1.2},
            ):
                assert running.say(repeated, **how) == plain.say(repeated, **how)
        assert running.counted("spec_decode_num_draft_tokens_total", kind="mtp") > 100
        assert running.counted("spec_decode_num_draft_tokens_total", kind="ngram") > 10
        drafted = [running.counted("spec_decode_num_draft_tokens_total", kind=kind) for kind in ("mtp", "ngram")]
        accepted = [running.counted("spec_decode_num_accepted_tokens_total", kind=kind) for kind in ("mtp", "ngram")]
        tokens, steps = running.counted("generation_tokens_total"), running.counted("decode_steps_total")
        assert 0 < accepted[0] < drafted[0]
        assert steps + sum(accepted) + 3 * len(PROMPTS) == tokens, "first tokens come from reading"


@pytest.mark.parametrize(("mode", "tokens"), [("on", 3), ("auto", 40)])
def test_the_gain_is_shown_once_it_is_known(store: Store, mode: str, tokens: int) -> None:
    """It takes the time of steps without drafts, too."""
    with engine(store, mode) as running:
        running.say(PROMPTS[0], tokens)
        assert running.counted("spec_decode_num_draft_tokens_total", kind="mtp") > 0
        known = running.speculation.judgements["mtp"].extra.samples > 0
        assert known == (mode == "auto")
        assert (running.counted("speculation_gain", kind="mtp") > 0) == known


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("how", [{}, SEEDED], ids=["greedy", "drawn"])
def test_words_are_the_same_for_any_share_of_right_drafts(
    store: Store, plain: Running, share: float, how: dict[str, Any]
) -> None:
    answers = {prompt: plain.say(prompt, **how) for prompt in PROMPTS}
    with engine(store, "on", oracle(answers, share)) as running:
        calls = [running.ask(prompt, **how) for prompt in PROMPTS]  # four of them at once
        for call, (prompt, answer) in zip(calls, answers.items(), strict=True):
            finish = call.finish()
            assert call.tokens == answer
            assert (finish.prompt_tokens, finish.generated_tokens) == (len(prompt), len(answer))
        drafted = running.counted("spec_decode_num_draft_tokens_total", kind="mtp")
        accepted = running.counted("spec_decode_num_accepted_tokens_total", kind="mtp")
        assert drafted > 100
        assert abs(accepted / drafted - share) < 0.2
        assert (share in (0.0, 1.0)) == (accepted in (0.0, drafted))


def test_an_engine_that_accepts_what_is_wrong_says_other_words(store: Store, plain: Running) -> None:
    """The control of all above."""

    def gullible(speculation: Speculation) -> None:
        def take(sequence: Sequence, segment: Segment, logits: Tensor, sample: Any) -> None:
            sample(sequence, logits[0])
            if segment.drafts and not sequence.over:
                speculation._settle(segment.state, 1)
                sample(sequence, logits[1])

        speculation.take = take  # type: ignore[method-assign]

    with engine(store, "on", gullible) as running:
        assert any(running.say(prompt) != plain.say(prompt) for prompt in PROMPTS)


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_no_draft_passes_the_limit(store: Store, plain: Running, most: int) -> None:
    answers = {PROMPTS[0]: plain.say(PROMPTS[0], 8)}
    with engine(store, "on", oracle(answers, 1.0)) as running:
        call = running.ask(PROMPTS[0], most)
        assert call.finish().generated_tokens == most
        assert call.tokens == answers[PROMPTS[0]][:most]
        assert running.counted("spec_decode_num_draft_tokens_total", kind="mtp") == (most - 1) // 2


def test_an_answer_ends_where_it_ends(store: Store, plain: Running) -> None:
    """A stop id as a draft, and behind one; and the state behind the answer is the same."""
    prompt = PROMPTS[1]
    whole = plain.say(prompt, 12)
    for stop in whole[1:5]:
        stops = frozenset({stop})
        expected = plain.ask(prompt, 12, stop_ids=stops, snapshot_answer=True)
        snapshot = expected.finish().snapshots[0]
        with engine(store, "on", oracle({prompt: whole}, 1.0)) as running:
            call = running.ask(prompt, 12, stop_ids=stops, snapshot_answer=True)
            finish = call.finish()
            assert call.tokens == expected.tokens
            assert finish.snapshots[0].state == snapshot.state
            assert b"".join(finish.snapshots[0].chunks) == b"".join(snapshot.chunks)
            assert finish.snapshots[0].blocks == snapshot.blocks
            call.handle.cancel()
        expected.handle.cancel()


def test_a_dialog_goes_on_from_a_snapshot_with_and_without(store: Store, plain: Running) -> None:
    prompt = PROMPTS[2] * 4
    place = len(prompt) - 5
    expected = plain.say(prompt)
    with engine(store, "on") as running:
        first = running.ask(prompt, snapshot_at=(place,))
        snapshot = first.finish().snapshots[0]
        again = running.ask(prompt, offers=(snapshot.state,))
        assert again.finish().cached_tokens == place
        assert first.tokens == again.tokens == expected
    elsewhere = plain.ask(prompt, offers=(snapshot.state,))
    elsewhere.until(Restore)
    for chunk in (*snapshot.chunks, *snapshot.blocks):
        elsewhere.handle.restore(chunk)
    assert elsewhere.finish().cached_tokens == place
    assert elsewhere.tokens == expected


def test_thinking_ends_when_its_budget_is_spent(store: Store, plain: Running) -> None:
    thinking = Thinking((95,), 5)
    with engine(store, "on") as running:
        for prompt in PROMPTS[:6]:
            answer = running.say(prompt, thinking=thinking)
            assert answer == plain.say(prompt, thinking=thinking)
            assert 95 in answer[:6]


def test_logprobs_are_those_of_the_model(store: Store, plain: Running) -> None:
    with engine(store, "on") as running:
        for prompt in PROMPTS[:4]:
            calls = [one.ask(prompt, logprobs=3, **SEEDED) for one in (running, plain)]
            for call in calls:
                call.finish()
            assert calls[0].events[-25:-1] == calls[1].events[-25:-1]


def test_some_are_cancelled_while_others_go_on(store: Store, plain: Running) -> None:
    with engine(store, "on") as running:
        calls = [running.ask(prompt, count) for prompt, count in zip(PROMPTS, (400, 60, 60, 60), strict=False)]
        calls[0].handle.cancel()
        calls[0].fail()
        calls[1].handle.stop()
        calls[1].finish()
        for call, prompt in zip(calls[2:], PROMPTS[2:4], strict=True):
            call.finish()
            assert call.tokens == plain.say(prompt, 60)
        assert plain.say(PROMPTS[1], 60)[: len(calls[1].tokens)] == calls[1].tokens


def judged(right: float, extra: float, samples: int = 100) -> Judgement:
    judgement = Judgement()
    for _ in range(samples):
        judgement.right.add(right)
        judgement.extra.add(extra)
    return judgement


def test_a_kind_is_tried_as_long_as_it_pays() -> None:
    assert all(judged(0.8, 0.5).wants() for _ in range(500))
    assert all(judged(0.1, 0.9, LEAST_SAMPLES - 1).wants() for _ in range(10))
    poor = judged(0.3, 0.5)
    wanted = [poor.wants() for _ in range(1280)]
    assert 0 < sum(wanted) < 0.05 * len(wanted)


class Timed:
    """A network whose steps take as long as a test says; of every sequence the next id is one more than the last."""

    def __init__(self, extra: float) -> None:
        self.now, self.extra, self.rows = 0.0, extra, 0

    def forward(self, segments: list[Segment], give_way: Any = None) -> Tensor:
        ids = [id_ for segment in segments for id_ in segment.all_ids]
        self.rows += len(ids)
        self.now += 1.0 + self.extra * (len(ids) - len(segments)) / len(segments)
        return torch.nn.functional.one_hot((torch.tensor(ids) + 1) % 96, 96).float()


@pytest.mark.parametrize(("share", "extra", "pays"), [(0.9, 0.5, True), (0.3, 0.5, False), (0.9, 0.95, False)])
@pytest.mark.parametrize("sequences", [1, 3])
def test_it_turns_itself_on_only_where_it_pays(share: float, extra: float, pays: bool, sequences: int) -> None:
    network = Timed(extra)
    ids = tuple(range(3))
    answers = {ids: [(3 + place) % 96 for place in range(4000)]}
    speculation = Speculation([Oracle(answers, share)], clock=lambda: network.now)
    batch = [Sequence(Request("r", ids, 4000), lambda event: None) for _ in range(sequences)]
    state = State.__new__(State)
    for sequence in batch:
        sequence.state = state
        sequence.accept(3)

    def sample(sequence: Sequence, logits: Tensor) -> None:
        sequence.accept(int(logits.argmax()))

    for _ in range(1000):
        for sequence, segment, logits in speculation.forward(network, batch, lambda: False):  # type: ignore[arg-type]
            speculation.take(sequence, segment, logits, sample)
    tokens = sum(sequence.generated_tokens for sequence in batch) / sequences
    gain = tokens / network.now
    assert gain > (1 + share) / (1 + extra) * 0.95 if pays else gain > 0.97
    assert (network.rows > 1.8 * 1000 * sequences) == pays


def test_what_came_before_is_copied() -> None:
    text = Text()
    text.extend([1, 2, 3])
    assert text.following() is None
    text.extend([9, 1, 2, 3], ahead=1)
    assert text.following() == 9
    text.extend([3, 8], ahead=1)
    assert text.following() is None
    text.extend([7, 1, 2, 3])
    assert text.following() == 7, "the last place counts, and what was ahead is gone"
    text.extend(range(100, 5000))
    text.extend([200, 201, 202])
    assert text.following() == 203
    text.extend([2**31 + 5, 1, 1, 1, 2**31 + 5, 1, 1, 1])
    assert text.following() is None, "a picture's place is never said"


def test_copies_follow_each_sequence(store: Store) -> None:
    with engine(store, "on", lambda speculation: setattr(speculation, "sources", [Copying()])) as running:
        assert running.speculation.judgements.keys() == {"ngram", "mtp"}
        running.say((5, 6, 7, 8) * 5, 30)
        assert running.counted("spec_decode_num_draft_tokens_total", kind="ngram") > 0


def test_a_grammar_is_followed_at_both_positions(demo_store: Store) -> None:
    """With the demo's words, which grammars are written in; most drafts come from the form itself."""
    grammar = Grammar(Form.REGEX, r"(one, two, three, ){6}four")
    more = {"grammar": grammar, "stop_ids": frozenset({2, 11})}
    with engine(demo_store, "off") as one, engine(demo_store, "on") as two:
        assert one.engine.info.vocab_size == two.engine.info.vocab_size
        for how in ({}, SEEDED):
            assert two.say(range(100, 140), 80, **more, **how) == one.say(range(100, 140), 80, **more, **how)
        accepted = two.counted("spec_decode_num_accepted_tokens_total", kind="ngram")
        drafted = two.counted("spec_decode_num_draft_tokens_total", kind="ngram")
        assert accepted > 10
        assert accepted > 0.5 * drafted


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_the_plan_says_what_is_tried(store: Store, mode: str) -> None:
    said: list[str] = []
    config = EngineConfig(store=store.folder, speculation=mode, device="cpu", warm_dir="-", kv_gb=0.01)
    parts = load(config, CollectorRegistry(), said.append)
    parts.experts.close()
    assert isinstance(parts.scheduler.model, Model)
    assert (parts.scheduler.model.head is None) == (mode == "off")
    assert f"speculation: {mode}" in said[0]
    assert ("multi-token-prediction block, float32" in said[0]) == (mode != "off")
    on_gpu = make_plan(config, store, Machine(10 * GB, 2), card_free_bytes=8 << 30)
    assert on_gpu.drafts == {"off": (), "auto": ("ngram", "mtp"), "on": ("ngram", "mtp")}[mode]
    assert ("MiB  multi-token-prediction block" in str(on_gpu)) == (mode != "off")
    assert ("what Mamba layers keep of drafts" in str(on_gpu)) == (mode != "off")
    full = SimpleNamespace(ledger=SimpleNamespace(wanted=SimpleNamespace(drafts=False, head_bytes=0)))
    tight = SimpleNamespace(ledger=SimpleNamespace(wanted=SimpleNamespace(drafts=True, head_bytes=0)))
    kinds, said_of_it = _drafts(config, store, cast(Any, tight))
    assert kinds == on_gpu.drafts[:1]
    assert ("no room for the model's own" in said_of_it) == (mode != "off")
    assert ("no room for steps of two tokens" in _drafts(config, store, cast(Any, full))[1]) == (mode != "off")
    traced = make_plan(dataclasses.replace(config, trace="here"), store, Machine(10 * GB, 2))
    assert ("speculation: off: a trace" in str(traced)) == (mode != "off")
    assert "24 blocks" in said[0] if mode != "off" else "16 blocks" in said[0]
