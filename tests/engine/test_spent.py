"""Where a token's time goes: every second is some part's, whatever the clocks of the parts say; and a GPU's counts."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from toy_engine import INFO, ToyExperts

from kernels.experts.device.times import Times
from services.engine import process
from services.engine.gpu import nvml
from services.engine.gpu.counts import DeviceCounts, Sizes, brought, decoded, swept
from services.engine.metrics import Metrics, owner
from services.engine.spent import PARTS, Spent, TokenTime

BEFORE = Times(
    turns=5, gpu_experts=40, host_experts=70, host_ns=5_000_000, plan_ns=100_000, idle_ns=9_000_000,
    waited_ns=2_000_000, share_thousandths=8000,
)  # fmt: skip


class Sum:
    def __init__(self) -> None:
        self.total = 0.0

    def inc(self, amount: float = 1) -> None:
        assert amount >= 0, "a counter only rises"
        self.total += amount


@pytest.fixture
def sums() -> dict[str, Sum]:
    return {part: Sum() for part in PARTS}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def totals(sums: dict[str, Sum]) -> dict[str, float]:
    return {part: round(one.total, 6) for part, one in sums.items() if one.total}


def test_parts_and_rest_are_the_time_between_tokens(sums: dict[str, Sum], clock: list[float]) -> None:
    tokens = TokenTime(sums)
    tokens.begin(answering=True)
    clock[0] += 10
    tokens.took("dense", 6)
    tokens.took("experts", 3)
    tokens.end()
    clock[0] += 4
    tokens.took("reading", 3.5)
    tokens.begin(answering=True)  # a step that goes on from the token before
    clock[0] += 5
    tokens.took("dense", 5)
    tokens.end()
    assert totals(sums) == {"dense": 11, "experts": 3, "reading": 3.5, "rest": 1.5}
    assert sum(totals(sums).values()) == 19


def test_time_in_which_nobody_answers_is_no_tokens(sums: dict[str, Sum], clock: list[float]) -> None:
    tokens = TokenTime(sums)
    tokens.begin(answering=True)
    clock[0] += 1
    tokens.end()
    clock[0] += 100
    tokens.begin(answering=False)
    clock[0] += 100
    tokens.begin(answering=True)
    clock[0] += 2
    tokens.end()
    assert totals(sums) == {"rest": 3}


def test_clocks_that_say_more_than_there_was_leave_no_rest(sums: dict[str, Sum], clock: list[float]) -> None:
    tokens = TokenTime(sums)
    tokens.begin(answering=True)
    clock[0] += 1
    tokens.took("dense", 1.001)
    tokens.took("experts", -1e-9)
    tokens.end()
    assert totals(sums) == {"dense": 1.001}


def test_a_graphs_token_adds_up() -> None:
    now = replace(BEFORE, host_ns=BEFORE.host_ns + 8_000_000, plan_ns=BEFORE.plan_ns + 400_000)
    spent = Spent()
    spent.served(BEFORE, now, inputs_s=0.0005, until_end_s=0.020)
    assert spent.inputs_s == 0.0005
    assert spent.handoff_s == pytest.approx(0.0004)
    assert spent.experts_s == pytest.approx(0.0076)
    assert spent.dense_s == pytest.approx(0.012)


def test_counts_of_a_gpu() -> None:
    sizes = Sizes(block=1000, turn_to_gpu=10, turn_from_gpu=7, token_to_gpu=3, token_from_gpu=2)
    counts = decoded(BEFORE, tokens=4, late=1, last_waits_ns=500_000, sizes=sizes) + swept(5000)
    counts += brought(300)  # to stay there
    assert counts == DeviceCounts(
        gpu_experts=40,
        host_experts=70,
        waited_s=0.0025,
        late=1,
        swept_bytes=5000,
        to_gpu_bytes=40_000 + 50 + 12 + 5000 + 300,
        from_gpu_bytes=35 + 8,
    )


def test_what_a_gpu_did_is_counted_by_phase() -> None:
    experts, spent, registry, counts = ToyExperts(), Spent(), CollectorRegistry(), [DeviceCounts(gpu_experts=100)]
    figures = nvml.CardFigures(61.0, 140.0, 0.75, 7 << 30, 8 << 30)
    planned = [("vram", "KV", 5), ("vram", "KV", 6), ("ram", "experts", 7)]
    metrics = Metrics(INFO, experts, registry, spent, lambda: counts[0], planned, lambda: figures)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"thimble_{name}", {"model_name": "toy", **labels})

    with metrics.forward("decode"):
        experts.now = replace(experts.now, hits=18, misses=4, disk_wait_s=0.5)
        spent.dense_s, spent.experts_s, spent.handoff_s = 1.0, 0.75, 0.125
        counts[0] = DeviceCounts(108, 14, 0.25, 2, 0, 8000, 70)
    with metrics.forward("prefill"):
        experts.now = replace(experts.now, hits=20, misses=10, sweep_blocks=8)
        spent.dense_s = 5.0
        counts[0] = DeviceCounts(108, 14, 0.25, 2, 4000, 12_000, 70)
    metrics.glance()
    assert value("experts_computed_total", device="gpu", phase="decode") == 8, (
        "those before it was made are not counted"
    )
    assert value("experts_computed_total", device="cpu", phase="decode") == 14
    assert value("experts_computed_total", device="gpu", phase="prefill") == 8
    assert value("experts_computed_total", device="cpu", phase="prefill") == 0
    assert value("pcie_bytes_total", dir="to_gpu") == 12_000
    assert value("pcie_bytes_total", dir="from_gpu") == 70
    assert value("sweep_bytes_total") == 4000
    assert value("gpu_expert_wait_seconds_total") == 0.25
    assert value("late_tokens_total") == 2
    parts = {part: value("token_time_seconds_total", part=part) for part in PARTS}
    assert (parts.pop("counting") or 0) > 0
    assert {part: seconds for part, seconds in parts.items() if seconds} == {
        "dense": 1.0,
        "experts": 0.25,
        "disk": 0.5,
        "handoff": 0.125,
    }
    assert value("decode_steps_total") == 1
    assert value("memory_planned_bytes", kind="vram", owner="KV") == 11
    assert value("memory_planned_bytes", kind="ram", owner="experts") == 7
    assert value("memory_used_bytes", kind="vram") == 7 << 30
    assert (value("memory_used_bytes", kind="ram") or 0) > 1 << 20
    assert (value("gpu_temperature_celsius"), value("gpu_power_watts"), value("gpu_busy_ratio")) == (61, 140, 0.75)


def test_figures_of_the_process_that_cannot_be_read_stay_as_they_were(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Too many files are open, say: no reason to end an engine."""
    registry = CollectorRegistry()
    metrics = Metrics(INFO, ToyExperts(), registry)
    labels = {"model_name": INFO.model}

    def glance() -> tuple[float | None, float | None]:
        metrics._glanced_at = float("-inf")
        metrics.glance()
        ram = registry.get_sample_value("thimble_memory_used_bytes", {**labels, "kind": "ram"})
        return ram, registry.get_sample_value("thimble_disk_written_bytes_total", labels)

    (tmp_path / "io").write_text("write_bytes: 5000\n")
    (tmp_path / "statm").write_text("9 7 1\n")
    monkeypatch.setattr(process, "SELF", tmp_path)
    metrics._written_seen_bytes = 2000
    ram, written = glance()
    assert ram
    assert written == 3000
    for name in ("io", "statm"):
        (tmp_path / name).rename(tmp_path / "away")
        assert glance() == (ram, written)
        (tmp_path / "away").rename(tmp_path / name)
    (tmp_path / "io").write_text("write_bytes: 5001\n")
    assert glance() == (ram, written + 1), "nothing is counted twice"


def test_an_owner_has_no_numbers() -> None:
    lines = {
        "KV, 32 pages of 64 tokens": "KV",
        "experts, 12 of 40 blocks": "experts",
        "states of 4 sequences": "states of sequences",
        "CUDA context (assumed, not computed)": "CUDA context",
        "reading 2048 tokens of prompts at once": "reading tokens of prompts at once",
    }
    assert {line: owner(line) for line in lines} == lines


class Driver:
    """NVML as a C library would answer: status 0 is good."""

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: object) -> int:
        return 0 if uuid == b"GPU-known" else 6

    def nvmlDeviceGetTemperature(self, handle: object, sensor: int, out: object) -> int:
        out._obj.value = 61  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: object, out: object) -> int:
        return 3  # not supported

    def nvmlDeviceGetUtilizationRates(self, handle: object, out: object) -> int:
        out._obj.gpu = 75  # type: ignore[attr-defined]
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: object, out: object) -> int:
        out._obj.used, out._obj.total = 5, 8  # type: ignore[attr-defined]
        return 0


def test_a_driver_is_asked_and_need_not_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", Driver)
    card = nvml.Card.open("GPU-known")
    assert card is not None
    assert card.read() == nvml.CardFigures(61.0, 0.0, 0.75, 5, 8)
    assert nvml.Card.open("GPU-other") is None
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.Card.open("GPU-known") is None
