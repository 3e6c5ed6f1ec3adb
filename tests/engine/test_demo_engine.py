"""The engine on the real demo model: neither cache, nor chunks, nor batch mates, nor snapshots change an answer."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from demo_engine import Demo, demo
from toy_engine import Call, soon

from services.engine.errors import CancelledError, StepError
from services.engine.experts.store import Store
from services.engine.request import Progress, Restore, Snapshot, Source, Token
from services.engine.spent import PARTS

QUESTIONS = ("What is 20 + 22?", "Tell me a short story about a fox.", "What is the capital of France?")


def tenth(store: Store) -> int:
    return sum(map(len, store.layers)) // 10


@pytest.fixture(scope="module")
def ample(demo_store: Store) -> Iterator[Demo]:
    """Every expert has a slot."""
    with demo(demo_store, prefill_chunk_tokens=16) as engine:
        yield engine


@pytest.fixture(scope="module")
def scarce(demo_store: Store) -> Iterator[Demo]:
    """A tenth of the experts have a slot; prompts are cut elsewhere."""
    with demo(demo_store, expert_slots=tenth(demo_store), prefill_chunk_tokens=7) as engine:
        yield engine


def test_it_answers_in_english(ample: Demo) -> None:
    text = ample.text(ample.answer(ample.prompt(QUESTIONS[0])))
    assert "42" in text


def test_a_tenth_of_the_cache_gives_the_same_answers(ample: Demo, scarce: Demo, demo_store: Store) -> None:
    for question in QUESTIONS:
        ids = ample.prompt(question)
        assert scarce.answer(ids) == ample.answer(ids)
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
        assert scarce.answer(ids, **sampled) == ample.answer(ids, **sampled)
    assert scarce.value("expert_cache_evictions_total") > 0
    assert scarce.value("expert_lookups_total", tier="nvme", phase="decode") > 0
    assert scarce.value("expert_slots", state="total") == tenth(demo_store)
    assert ample.value("expert_slots", state="total") == sum(map(len, demo_store.layers))


def test_three_at_once_answer_as_they_do_alone(ample: Demo) -> None:
    prompts = [ample.prompt(question) for question in QUESTIONS]
    alone = [ample.answer(ids) for ids in prompts]
    calls = [ample.ask(ids) for ids in prompts]
    for call in calls:
        call.finish()
        call.handle.cancel()
    assert [call.tokens for call in calls] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3


def test_the_second_turn_costs_only_its_tail_and_reads_the_same(ample: Demo) -> None:
    first = ample.prompt(QUESTIONS[2])
    call = ample.ask(first, snapshot_at=(len(first) - 6,), snapshot_answer=True)
    answer, end = call.finish().snapshots
    call.handle.cancel()
    assert end.state.tokens == len(first) + len(call.tokens) - 1
    second = [*first, *call.tokens, *ample.prompt("And of Spain?")[4:]]
    without = ample.ask(second)
    assert without.finish().executed_tokens == len(second)
    with_state = ample.ask(second, offers=(end.state, answer.state))
    finish = with_state.finish()
    assert (finish.cached_tokens, finish.executed_tokens) == (end.state.tokens, len(second) - end.state.tokens)
    assert with_state.tokens == without.tokens
    for asked in (without, with_state):
        asked.handle.cancel()


def sent(engine: Demo, ids: list[int], snapshot: Snapshot, chunks: Sequence[bytes]) -> Call:
    """A request that offers a state which the engine does not hold, and the payload it then asks for."""
    call = engine.ask(ids, offers=(snapshot.state,))
    restore = call.until(Restore)
    assert isinstance(restore, Restore)
    assert restore.source is Source.SEND
    for chunk in (*chunks, *(snapshot.blocks[number] for number in restore.need)):
        call.handle.restore(chunk)
    return call


def test_a_snapshot_moves_to_another_engine_and_a_damaged_one_costs_a_prefill(ample: Demo, scarce: Demo) -> None:
    ids = ample.prompt(QUESTIONS[1])
    call = ample.ask(ids, snapshot_at=(len(ids) - 3,))
    (snapshot,) = call.finish().snapshots
    damaged = bytearray(snapshot.chunks[0])
    damaged[5000] ^= 0x40  # a bit of a float of the state
    refused = sent(scarce, ids, snapshot, (bytes(damaged), *snapshot.chunks[1:]))
    assert refused.finish().executed_tokens == len(ids)
    moved = sent(scarce, ids, snapshot, snapshot.chunks)
    assert moved.finish().executed_tokens == 3
    assert moved.tokens == refused.tokens == call.tokens
    for asked in (call, refused, moved):
        asked.handle.cancel()


@pytest.mark.parametrize("kind", [Progress, Token], ids=["while the prompt is read", "while it answers"])
def test_cancel_frees_everything(scarce: Demo, kind: type) -> None:
    call = scarce.ask(scarce.prompt(QUESTIONS[1]) * 4, max_tokens=1000)
    call.until(kind)
    call.handle.cancel()
    assert isinstance(call.fail().error, CancelledError)
    assert scarce.answer(scarce.prompt(QUESTIONS[0])), "the next one is served"
    assert soon(lambda: scarce.value("kv_pages", state="used") == 0)


def test_a_disk_that_fails_costs_the_requests_it_hits_and_nothing_after(
    ample: Demo, demo_store: Store, tmp_path: Path
) -> None:
    """Every block on the disk is damaged while the engine runs, then whole again."""
    shutil.copytree(demo_store.folder, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    ids = ample.prompt(QUESTIONS[0])
    whole = store.experts_path.read_bytes()
    with demo(store, expert_slots=12) as engine:
        assert engine.answer(ids) == ample.answer(ids)
        overwrite(store.experts_path, bytes(byte ^ 1 for byte in whole))
        error = engine.ask(ample.prompt(QUESTIONS[1])).fail().error
        assert isinstance(error, StepError)
        assert "expert" in str(error)
        overwrite(store.experts_path, whole)
        assert engine.answer(ids) == ample.answer(ids)
        assert engine.value("request_failures_total", code="step_failed") == 1


def overwrite(path: Path, data: bytes) -> None:
    """In place: the engine has the file open."""
    with path.open("r+b") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def test_metrics_agree_with_what_was_done(demo_store: Store) -> None:
    with demo(demo_store, expert_slots=64, speculation="off") as engine:
        ids = engine.prompt(QUESTIONS[0])
        call = engine.ask(ids, snapshot_answer=True)
        first = call.finish()
        call.handle.cancel()
        (state,) = (snapshot.state for snapshot in first.snapshots)
        second = engine.ask([*ids, *call.tokens, 5, 6, 7], offers=(state,), max_tokens=3).finish()
    assert engine.value("prompt_tokens_total") == first.executed_tokens + second.executed_tokens
    assert engine.value("generation_tokens_total") == first.generated_tokens + second.generated_tokens
    assert engine.value("prefix_cache_hits_total") == second.cached_tokens == state.tokens
    layers, top_k = len(demo_store.config.moe_layers), demo_store.config.experts_per_token
    decode_steps = first.generated_tokens - 1 + second.generated_tokens - 1
    lookups = {
        phase: sum(engine.value("expert_lookups_total", tier=tier, phase=phase) for tier in ("ram", "nvme"))
        for phase in ("prefill", "decode")
    }
    assert lookups["decode"] == decode_steps * layers * top_k, "one sequence: each token names top_k distinct experts"
    assert layers * top_k <= lookups["prefill"] <= layers * demo_store.config.experts * 2
    reads = engine.value("nvme_read_bytes_total", kind="demand") / demo_store.layout.block_bytes
    missed = sum(engine.value("expert_lookups_total", tier="nvme", phase=phase) for phase in ("prefill", "decode"))
    assert 0 < reads <= missed, "a miss may find its block already on the way"
    issued = engine.value("prefetch_issued_total")
    assert engine.value("nvme_read_bytes_total", kind="prefetch") <= issued * demo_store.layout.block_bytes
    assert engine.value("expert_slots", state="used") <= 64


def test_the_parts_of_a_tokens_time_add_up(demo_store: Store) -> None:
    def seconds() -> dict[str, float]:
        return {part: engine.value("token_time_seconds_total", part=part) for part in PARTS}

    with demo(demo_store, expert_slots=64, speculation="off") as engine:
        rests = []
        for _ in range(8):  # other work on this machine may come between any two clocks
            before = seconds()
            call = engine.ask(engine.prompt(QUESTIONS[1]), max_tokens=48)
            call.finish()
            now = seconds()
            rests.append((now["rest"] - before["rest"]) / (sum(now.values()) - sum(before.values())))
            if rests[-1] <= 0.05:
                break
        steps = engine.value("decode_steps_total")
        between_s = engine.value("inter_token_latency_seconds_sum")
        computed = engine.value("experts_computed_total", device="cpu", phase="decode")
        lookups = [engine.value("expert_lookups_total", tier=tier, phase="decode") for tier in ("ram", "nvme")]
        used_bytes = engine.value("memory_used_bytes", kind="ram")
        assert used_bytes > engine.value("memory_planned_bytes", kind="ram", owner="experts") > 0
    assert min(rests) <= 0.05, (rests, now)
    assert steps == (len(call.tokens) - 1) * len(rests) > 10
    assert sum(now.values()) == pytest.approx(between_s, rel=0.1), "which is measured where tokens leave"
    assert min(now[part] for part in ("dense", "experts", "disk", "sampling", "scheduling", "counting")) > 0
    assert (now["handoff"], now["inputs"], now["reading"]) == (0, 0, 0)
    assert computed == sum(lookups)
