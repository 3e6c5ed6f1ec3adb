"""Which cells of `bench prefill` are begun when a run has a limit: what would not be done by then, which it says."""

import time
from argparse import Namespace
from types import SimpleNamespace

import pytest

from services.tools.bench_prefill import expected_s, in_time

STORE = SimpleNamespace(
    config=SimpleNamespace(experts=512, experts_per_token=22),
    blocks=[None] * 40,
    layout=SimpleNamespace(block_bytes=3_096_576),
)
ARGS = Namespace(chunk=2048, disk=7.0)


def expected(tokens: int, share: float) -> float:
    return expected_s(STORE, tokens, share, ARGS)  # type: ignore[arg-type]


def test_more_takes_longer() -> None:
    assert expected(16, 1.0) < expected(2048, 1.0) < expected(8192, 1.0)
    assert 3 < expected(32768, 1.0) / expected(8192, 1.0) < 4, "by chunks"
    assert expected(2048, 1.0) < expected(2048, 0.33) < expected(2048, 0.24)
    drive_s = 16 * 40 * 512 * 0.76 * 3_096_576 / 7e9
    assert drive_s < expected(32768, 0.24) < 3 * drive_s


def test_what_will_not_be_done_in_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    now = time.monotonic()
    assert in_time(STORE, 2048, 0.24, ARGS, float("inf"))  # type: ignore[arg-type]
    assert in_time(STORE, 2048, 0.24, ARGS, now + 60)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    assert not in_time(STORE, 32768, 0.24, ARGS, now + 60)  # type: ignore[arg-type]
    assert "32768    0.24 left out: it may take" in capsys.readouterr().out
