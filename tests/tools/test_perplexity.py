"""Perplexity: the measure against hand arithmetic, and the command on a real model."""

import csv
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.tools import figures
from services.tools import small_checkpoint as tiny_checkpoint
from services.tools.cli import main
from services.tools.perplexity import Score, measure
from services.tools.texts import Window


class Table:
    """A language model that looks up the next token's logits by the current token alone."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.seen += input_ids.tolist()
        return SimpleNamespace(logits=self.logits[input_ids])


def test_a_model_that_knows_nothing_has_the_vocabularys_perplexity() -> None:
    score = measure(Table(torch.zeros(50, 50)), [Window([1, 2, 3, 4], [False, True, True, True], 12)])
    assert score.per_token == pytest.approx(50)
    assert score.per_byte == pytest.approx(50 ** (3 / 12))
    assert (score.tokens, score.size_bytes) == (3, 12)


def test_only_the_tokens_that_count_are_summed() -> None:
    logits = torch.zeros(4, 4)
    logits[0, 1], logits[1, 2] = math.log(3), math.log(5)  # P(1|0) = 3/6, P(2|1) = 5/8, others 1/4
    model = Table(logits)
    windows = [Window([0, 1, 2, 3], [False, True, True, False], 3), Window([2, 0, 1], [True, False, True], 1)]
    score = measure(model, windows)
    assert score.nats == pytest.approx(-math.log(3 / 6 * 5 / 8 * 3 / 6))
    assert (score.tokens, score.size_bytes) == (3, 4)
    assert model.seen == [[0, 1, 2, 3], [2, 0, 1]]


def test_the_command_measures_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_checkpoint.write_unquantised(tmp_path / "c")
    text, record = tmp_path / "words.txt", tmp_path / "some-machine.csv"
    text.write_text("one and two is three " * 8)
    assert main(["perplexity", str(checkpoint), str(text), "--record", str(record), "--note", "random"]) == 0
    shown = capsys.readouterr().out
    assert "(39 tokens" in shown
    rows = list(csv.DictReader(record.read_text().splitlines()))
    assert [row["name"] for row in rows] == ["demo.ppl_byte", "demo.ppl_token"]
    assert {row["machine"] for row in rows} == {"some-machine"}
    assert rows[0]["note"] == "random; words.txt, 39 tokens"
    per_byte, per_token = (float(row["value"]) for row in rows)
    assert f"{per_token:.3f} a token" in shown
    assert 10 < per_token < 1000  # random weights over 96 words
    assert per_byte == pytest.approx(per_token ** (39 / (len(text.read_text().strip()) - 4)), rel=1e-3)


def test_a_text_with_nothing_to_score_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tiny_checkpoint.write_unquantised(tmp_path / "c")
    (tmp_path / "empty.txt").write_text("")
    assert main(["perplexity", str(checkpoint), str(tmp_path / "empty.txt")]) == 1
    assert "nothing in it can be scored" in capsys.readouterr().err


def test_rows_are_appended_under_one_heading(tmp_path: Path) -> None:
    path = tmp_path / "results" / "laptop.csv"
    figures.append(path, "decode.tok_s", 12.3456789, "tok/s", 'of "demo", warm')
    figures.append(path, "decode.tok_s", 13, "tok/s", "")
    assert path.read_text().splitlines()[0] == "date,commit,machine,name,value,unit,note"
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [row["value"] for row in rows] == ["12.3457", "13"]
    assert rows[0]["note"] == 'of "demo", warm'
    assert rows[0]["machine"] == "laptop"
    assert len(rows[0]["date"]) == 10


def test_score_arithmetic() -> None:
    score = Score(nats=6 * math.log(2), tokens=3, size_bytes=6)
    assert score.per_token == pytest.approx(4)
    assert score.per_byte == pytest.approx(2)
