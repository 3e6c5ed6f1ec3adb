"""Two tokens a step on paper: what is paid once and what twice, by hand."""

from dataclasses import replace

import pytest

from services.tools import plan
from services.tools.draft_forecast import again, block_bytes, two_tokens
from services.tools.forecast import Ours, decode, hit_rate
from services.tools.hardware import CARDS, box
from services.tools.predict import SUPER, Method, Rates
from services.tools.synthetic_shapes import SUPER as MODEL
from services.tools.synthetic_shapes import dense_layout

BOX = box(CARDS["rtx5060"], 34.4, dram_gb_s=65, disk_gb_s=12)
STATE_BYTES = 173_000_000


def test_dense_weights_and_hand_off_are_paid_once_experts_by_their_union() -> None:
    one = decode(SUPER, BOX, Method.SPLIT, 1.0)
    both = two_tokens(SUPER, BOX, 1.0, 0, STATE_BYTES, repeated=0.5)
    assert both.one_ms == one.total_ms
    assert both.two_ms == pytest.approx(one.dense_ms + one.handoff_ms + (1.5 + 0.5 * both.again) * one.experts_ms)
    assert both.draft_ms == 0
    settling_ms = 2 * STATE_BYTES / BOX.vram_gb_s / 1e6
    assert both.gain(both.break_even) == pytest.approx(1)
    assert both.gain(0.9) == pytest.approx(1.9 * both.one_ms / (both.two_ms + 0.9 * settling_ms))
    strangers = two_tokens(replace(SUPER, dense_bytes=1), BOX, 1.0, 0, STATE_BYTES, repeated=0.0)
    assert strangers.two_ms == pytest.approx(one.handoff_ms + 2 * one.experts_ms), "nothing is shared"


def test_misses_are_those_of_both_tokens() -> None:
    hits = hit_rate(0.24)
    one, two = decode(SUPER, BOX, Method.SPLIT, hits), two_tokens(SUPER, BOX, hits, 0, STATE_BYTES)
    assert two.two_ms - two_tokens(SUPER, BOX, 1.0, 0, STATE_BYTES).two_ms > 1.5 * one.disk_exposed_ms


def test_a_second_token_of_an_expert_costs_bytes_where_memory_is_waited_for_and_sums_where_it_is_not() -> None:
    bytes_of = Method.SPLIT.expert_bytes
    more = bytes_of(replace(SUPER, alive=1 - (1 - SUPER.alive) ** 2)) / bytes_of(SUPER) - 1
    assert 0.05 < more < 0.1
    waited_for = Rates(400, 28, cpu_gb_s=60, dram_gb_s=50, disk_gb_s=1)
    assert again(SUPER, waited_for) == pytest.approx(more)
    plenty = Rates(400, 40, cpu_gb_s=60, dram_gb_s=1000, disk_gb_s=1, again=0.5)
    assert again(SUPER, plenty) == pytest.approx(100 / (60 / 1.5 + 40 / (1 + more)) - 1)
    assert again(SUPER, replace(plenty, pcie_gb_s=1e-9)) == pytest.approx(0.5), "the processor alone"
    own, copied = (two_tokens(SUPER, BOX, 1.0, size, STATE_BYTES) for size in (500_000_000, 0))
    assert own.right_ms > copied.right_ms, "behind a right draft the block takes two ids"


def test_the_block_is_the_published_one() -> None:
    """eh_proj, attention, shared expert and projections in BF16, and lm_head as the model has it."""
    weights = 8192 * 4096 + 2 * 4096 * 4096 + 2 * 256 * 4096 + 2 * 5376 * 4096 + 2 * 1024 * 4096 + 512 * 4096
    head = block_bytes(MODEL, dense_layout(MODEL)) - 2 * weights
    assert 131072 * 4096 * 0.5 <= head <= 131072 * 4096 * 2 + 100_000


def test_the_plan_tells_of_it() -> None:
    one = Ours(decode(SUPER, BOX, Method.SPLIT, 0.9), 0.9, 0.0)
    lines = list(plan.draft_lines(SUPER, BOX, one, block_bytes(MODEL, dense_layout(MODEL)), STATE_BYTES))
    assert lines[0].startswith("\nTwo tokens in a step, if 40 %")
    assert [line.split(":")[0].strip() for line in lines[1:5]] == [f"{n} % of drafts right" for n in (60, 75, 85, 90)]
    assert "it pays from" in lines[5]
