"""How long a cell of `bench prefill` is assumed to take, of which the cells go by that a limited run leaves out."""

from argparse import Namespace
from types import SimpleNamespace

import pytest

from services.engine.errors import MemoryPlanError
from services.engine.gpu.ledger import CARD_MIB, MIB, Wanted
from services.tools import bench_prefill
from services.tools.bench_prefill import in_time, least_s, room_for
from services.tools.cells import Cells
from services.tools.synthetic_shapes import SUPER, dense_layout

STORE = SimpleNamespace(
    config=SimpleNamespace(experts=512, experts_per_token=22),
    blocks=[None] * 40,
    layout=SimpleNamespace(block_bytes=3_096_576),
)
ARGS = Namespace(chunk=2048, disk=7.0)


def least(tokens: int, share: float) -> float:
    return least_s(STORE, tokens, share, ARGS)  # type: ignore[arg-type]


def test_more_takes_longer() -> None:
    assert least(16, 1.0) < least(2048, 1.0) < least(8192, 1.0)
    assert 3 < least(32768, 1.0) / least(8192, 1.0) < 4, "by chunks"
    assert least(2048, 1.0) < least(2048, 0.33) < least(2048, 0.24)
    drive_s = 16 * 40 * 512 * 0.76 * 3_096_576 / 7e9
    assert drive_s < least(32768, 0.24) < 1.1 * drive_s


def test_what_will_not_be_done_in_time_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert in_time(Cells(1.0, None), 2048, 0.24, 2 * least(2048, 0.24))
    assert capsys.readouterr().out == ""
    assert not in_time(Cells(1.0, None), 32768, 0.24, 2 * least(32768, 0.24))
    assert "  32768    0.24 left out: it may take" in capsys.readouterr().out


def test_as_much_is_read_at_once_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32,768 tokens with all experts in RAM, whose page tables and a large card's context are there already."""
    monkeypatch.setattr(bench_prefill, "stored_layout", lambda _: dense_layout(SUPER))
    store = SimpleNamespace(config=SUPER, folder=None)
    free_mib = CARD_MIB - 523
    asked = Wanted(1, 32_768 + 13, "fp8")
    found = [room_for(store, asked, (free_mib - tables) * MIB) for tables in (118, 180, 250, 290)]  # type: ignore[arg-type]
    assert found == [2048, 1024, 512, 512]
    with pytest.raises(MemoryPlanError):
        room_for(store, asked, (free_mib - 500) * MIB)  # type: ignore[arg-type]
