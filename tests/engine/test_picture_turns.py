"""Pictures and prompts that are read in the same memory: neither begins before the other ends, answers go on."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from scripted_network import INFO, Bench
from torch import Tensor
from toy_engine import Call, ToyExperts

from services.engine.engine import Engine
from services.engine.grammar import Grammars
from services.engine.request import Finish, Request
from services.engine.vision.looks import Looks

BLOCKS = 5
PROMPTS = [tuple(range(1, 31)), tuple(range(5, 35)), tuple(range(2, 40))]


def crossings(in_turns: bool) -> tuple[int, int]:
    """How often a picture's block fell into a reading, and a reading began while a picture was half read."""
    bench = Bench()
    bench.scheduler.in_turns = in_turns
    log = bench.model.log
    grammars = Grammars(Path("none"), INFO.vocab_size, most_bytes=10_000, timeout_s=20.0)
    engine = Engine(INFO, bench.scheduler, ToyExperts(), grammars)

    def picture() -> Generator[None, None, Tensor]:
        log.append("picture")
        for _ in range(BLOCKS):
            yield
            log.append("block")
        log.append("seen")
        return torch.zeros(1)

    try:
        done = []
        with engine._wake:  # its thread finds them all together
            calls = [Call(engine, Request("r", (7, 7, 7), 60))]
            for prompt in PROMPTS:
                calls.append(Call(engine, Request("r", prompt, 3)))
                done += [engine._look(picture()) for _ in range(2)]
        for call in calls:
            call.until(Finish)
        assert all(len(each.result(60)) == 1 for each in done), "every picture was read"
    finally:
        engine.close()
    within = begun = 0
    reading = looking = False
    for line in log:
        within += reading and line in ("picture", "block", "seen")
        begun += looking and line.startswith("read ")
        reading = (reading or line.startswith("read ")) and line != "done"
        looking = (looking or line == "picture") and line != "seen"
    assert log.count("seen") == 2 * len(PROMPTS)
    assert log.count("done") > len(PROMPTS)
    return within, begun


def test_neither_begins_before_the_other_ends() -> None:
    assert crossings(in_turns=True) == (0, 0)
    assert sum(crossings(in_turns=False)) > 0, "with memory of their own they overlap, or this shows nothing"


def test_an_answer_goes_on_while_a_picture_is_half_read() -> None:
    bench, begun = Bench(), True
    bench.ask(7, 7, 7, max_tokens=500)
    bench.step()
    bench.scheduler.in_turns, bench.scheduler.picture_begun = True, lambda: begun
    bench.ask(*PROMPTS[0])
    bench.model.log.clear()
    assert bench.step(2) == ["token 1", "token 1"]
    begun = False
    assert bench.step(1) == ["token 1", "read 16"] or bench.model.log[-2:] == ["read 16", "layer"]
    begun = True
    bench.model.log.clear()
    assert "layer" in bench.step(2), "what was begun goes on"


@pytest.mark.parametrize("in_turns", [True, False])
def test_a_picture_does_not_wait_for_what_is_read_for_nobody(in_turns: bool) -> None:
    """Idle reading gives way at the next layer, as it does to a prompt; where each has its own memory it goes on."""
    bench = Bench()
    bench.scheduler.in_turns = in_turns
    log = bench.model.log
    grammars = Grammars(Path("none"), INFO.vocab_size, most_bytes=10_000, timeout_s=20.0)
    engine = Engine(INFO, bench.scheduler, ToyExperts(), grammars)
    seen = []

    def picture() -> Generator[None, None, Tensor]:
        log.append("picture")
        yield
        log.append("seen")
        return torch.zeros(1)

    def comes(layer: int) -> None:
        if not seen:
            seen.append(engine._look(picture()))

    bench.model.at_layer = comes
    try:
        idle = Call(engine, Request("r", PROMPTS[0], 0, idle=True))
        assert idle.finish().executed_tokens == len(PROMPTS[0])
        assert len(seen[0].result(60)) == 1
    finally:
        engine.close()
    first = log[: log.index("picture")]
    assert first == (["read 16", "layer", "closed"] if in_turns else ["read 16", "layer"])


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_picture_that_nobody_waits_for_holds_nobody_up(steps: int) -> None:
    def picture() -> Generator[None, None, Tensor]:
        for _ in range(BLOCKS):
            yield
        return torch.zeros(1)

    looks = Looks()
    done = looks.add(picture())
    for _ in range(steps):
        looks.advance()
    assert looks.begun == (steps > 0)
    done.cancel()
    looks.advance()
    assert not looks.begun
    assert not looks.pending
