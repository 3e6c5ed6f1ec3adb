"""The attention case of the sweep benchmark finds a wrong kernel. On the CPU, in the interpreter, a short prompt."""

import pytest
import torch

from services.tools import sweep_attention
from services.tools.dense_cases import Dense
from services.tools.sweep_attention import HEAD_DIM, HEADS, AttentionCase
from services.tools.sweep_cases import sweep_cases


@pytest.mark.parametrize("fp8", [False, True])
def test_attention_is_right_and_a_wrong_one_is_found(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = AttentionCase(Dense(torch.device("cpu")), "some attention", 70, fp8)
    case.prepare(9)
    assert case.error() < case.bound
    assert case.same_when_cut()
    assert case.flop() == 4 * HEADS * HEAD_DIM * sum(range(62, 71))
    right = sweep_attention.attend

    def by_number_of_segments(query, pages, tables, segments, out):  # type: ignore[no-untyped-def]
        right(query, pages, tables, segments, out)
        out *= 1.01 if len(segments.each) == 1 else 1.0

    monkeypatch.setattr(sweep_attention, "attend", by_number_of_segments)
    assert case.error() > case.bound
    assert not case.same_when_cut()


def test_both_kinds_of_pages_are_measured() -> None:
    assert {"attend BF16 32768", "attend FP8 32768"} <= set(sweep_cases(None))  # type: ignore[arg-type]
