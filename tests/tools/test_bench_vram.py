"""The arithmetic of `bench vram`: what went from a card that nobody has here, beside torch's own tensors."""

from argparse import Namespace
from pathlib import Path

import pytest
import torch

from services.engine.gpu.ledger import MIB
from services.tools import bench_vram
from services.tools.bench_vram import Bench, locked


def test_what_went_since_the_last_look_is_not_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free, reserved = iter((7000, 6500, 6900)), iter((100, 500, 100))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free) * MIB, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: next(reserved) * MIB)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    out = tmp_path / "here.csv"
    bench = Bench(Namespace(out=out), 8000 * MIB)
    assert bench.take() == 900
    assert bench.take() == 100
    bench.say("vram.kernels_mib", bench.take(), "MiB", "a step back", 16.0)
    assert 'vram.kernels_mib,0,MiB,"a step back, torch' in out.read_text()


@pytest.mark.parametrize("way", bench_vram.LOCKED[:2])
def test_all_that_was_locked_is_unlocked(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    there = set()

    class Runtime:
        def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:
            there.add(address)
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            there.remove(address)
            return 0

    monkeypatch.setattr(bench_vram, "STEP_BYTES", 1 << 16)
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with locked(way, 3):
        assert len(there) == 3
    assert not there
