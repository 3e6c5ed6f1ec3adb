"""The decode benchmark without a GPU: what it refuses before anything is loaded, and that methods take turns."""

from pathlib import Path

import pytest
import torch

from services.engine.experts.store import Store
from services.tools import bench_decode, replay, synth
from services.tools.bench_decode import WARM, in_turns, numbers, warm
from services.tools.cli import main
from services.tools.decode_rig import filled_host


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return synth.synthesise(tmp_path_factory.mktemp("synth") / "store", "small")


class Counted:
    """Each step is as slow as its number; what was stepped is told to a common list."""

    def __init__(self, name: str, order: list[tuple[str, int]]) -> None:
        self.name, self.order = name, order

    def step(self, token: int) -> float:
        self.order.append((self.name, token))
        return float(len(self.order))


def test_methods_take_turns_token_by_token() -> None:
    order: list[tuple[str, int]] = []
    rigs = {name: Counted(name, order) for name in ("ours", "published")}
    times = in_turns(rigs, first=3, tokens=2)
    assert order == [("ours", 3), ("published", 3), ("ours", 4), ("published", 4)]
    assert times == {"ours": [1.0, 3.0], "published": [2.0, 4.0]}


def test_warming_is_not_timed() -> None:
    order: list[tuple[str, int]] = []
    warm(Counted("it", order))
    assert len(order) == WARM


def test_numbers() -> None:
    assert numbers("4,1, 2,1") == [1, 2, 4]
    for wrong in ("", "0", "1,", "two", "-1"):
        with pytest.raises(Exception, match="comma separated"):
            numbers(wrong)


def test_full_slots_hit(store: Store) -> None:
    """Every expert that a trace names is in RAM; one that it does not name is not."""
    host = filled_host(store, threads=1, resident=12)
    trace = replay.make(store.config, 4, 1, 12, seed=1)
    misses = host.counters()["misses"]
    assert misses == 3 * 12
    for token in range(4):
        for layer in range(3):
            host.step(layer, trace.ids[token, layer], torch.ones(1, 6), trace.x[token, layer])
    assert host.counters()["misses"] == misses
    host.step(0, torch.tensor([[12]], dtype=torch.int32), torch.ones(1, 1), trace.x[0, 0])
    assert host.counters()["misses"] == misses + 1
    host.close()


def test_what_does_not_fit_is_refused_before_anything_is_loaded(
    store: Store, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a ballast or a benchmark was begun")

    monkeypatch.setattr(bench_decode, "Ballast", never)
    monkeypatch.setattr(bench_decode, "Bench", never)
    assert main(["bench", "decode", str(store.folder), "--free-mib", "500"]) == 1
    assert "does not fit into 500 MiB" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "decode", str(store.folder), "--batches", "1,5"])
    assert "a step has at most 4 sequences" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(AssertionError, match="was begun"):  # the control: what fits goes on
        main(["bench", "decode", str(store.folder), "--free-mib", "2000"])


def test_a_machine_without_a_gpu(store: Store, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["bench", "decode", str(store.folder), "--out", str(tmp_path / "out.csv")]) == 2
    printed = capsys.readouterr()
    assert "8151 MiB of graphics memory:" in printed.out, "the ledger is told first"
    assert "needs a CUDA device" in printed.err
    assert not (tmp_path / "out.csv").exists()
