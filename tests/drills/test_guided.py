"""The guided fuzzer's targets run on their seeds, and would fail on a fault; the fuzzing itself needs atheris."""

from typing import Any

import guided
import pytest

from services.api.parsers.answer import AnswerParser


def test_the_seeds_pass() -> None:
    for target in (guided.bodies, guided.output):
        run, seeds = target()
        for seed in seeds:
            run(seed)
            run(seed[: len(seed) // 2])


def test_a_fault_in_reading_bodies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(kind: Any, data: Any) -> Any:
        raise KeyError("model")

    monkeypatch.setattr("services.api.validation.validate", careless)
    run, seeds = guided.bodies()
    with pytest.raises(KeyError):
        run(seeds[0])


def test_a_parser_that_depends_on_the_pieces_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = AnswerParser.feed
    monkeypatch.setattr(AnswerParser, "feed", lambda self, text: honest(self, text[:5]))
    run, seeds = guided.output()
    with pytest.raises(AssertionError, match="in pieces of"):
        run(seeds[0])
