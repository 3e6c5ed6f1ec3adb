"""A token's time by parts, from handmade events: each microsecond is counted once and where it belongs."""

import pytest

from services.tools.gpu_events import Event, parse
from services.tools.token_parts import EXPERTS, MOST_REST, Parts, kernel, line, parts, sums


def events(*named: tuple[str, float]) -> list[Event]:
    """One after another, in microseconds, without gaps."""
    made, at = [], 0.0
    for name, duration in named:
        made.append(Event(name, "copy" if "Memcpy" in name else "kernel", at, duration, 7))
        at += duration
    return made


LAYER = [
    ("linear_kernel", 10.0),
    ("choose_kernel", 2.0),
    ("post_kernel", 3.0),
    ("linear_kernel", 20.0),
    ("wait_kernel", 5.0),
    ("quantise_kernel", 1.0),
    ("up_kernel", 40.0),
    ("alive_kernel", 4.0),
    ("down_kernel", 10.0),
    ("finish_kernel", 2.0),
    ("wait_kernel", 30.0),
    ("combine_kernel", 3.0),
    ("linear_kernel", 6.0),
]
IDLE = [
    (name, {"wait_kernel": 4.0, "up_kernel": 1.0, "down_kernel": 1.0}.get(name, duration)) for name, duration in LAYER
]
# two waves that come by the copy engine
COPIED = [
    *LAYER[:4],
    ("wait_kernel", 400.0),
    ("quantise_kernel", 1.0),
    ("up_kernel", 20.0),
    ("Memcpy HtoD (Pinned -> Device)", 300.0),
    ("wait_kernel", 300.0),
    ("up_kernel", 20.0),
    ("wait_kernel", 6.0),
    ("combine_kernel", 3.0),
]


def test_kernels_are_told_apart() -> None:
    found = sums(events(*LAYER))
    assert found.dense_ms == pytest.approx(0.038)
    assert found.experts_ms == pytest.approx(0.060)
    assert (found.post_ms, found.plan_ms, found.results_ms) == pytest.approx((0.003, 0.005, 0.030))
    assert {"up_kernel", "alive_kernel", "down_kernel", "finish_kernel", "combine_kernel", "quantise_kernel"} == EXPERTS


def test_tokens_are_averaged() -> None:
    one, two = sums(events(*LAYER)), sums(events(*LAYER, *LAYER), tokens=2)
    assert two.dense_ms == pytest.approx(one.dense_ms)
    assert two.waits_ms == pytest.approx(one.waits_ms)


def test_every_microsecond_once() -> None:
    total = sum(duration for _, duration in LAYER)
    found = parts(total * 1e-3 + 0.010, sums(events(*LAYER)), sums(events(*IDLE)), disk_ms=0.0)
    assert found.cpu_ms == pytest.approx(0.026), "what was waited for, less what an empty turn waits"
    assert found.handoff_ms == pytest.approx(0.003 + 5e-3 - 1e-3 + 4e-3)
    assert found.pcie_ms == pytest.approx(0.060 + 0.001)
    assert found.rest_ms == pytest.approx(0.010), "the gaps"
    assert found.rest_share == pytest.approx(10 / (total + 10))


def test_copies_are_what_is_waited_for() -> None:
    """The published method: the engine's copies run beside the kernels, only the GPU's waits are on its time."""
    total = sum(duration for name, duration in COPIED if "Memcpy" not in name)
    found = parts(total * 1e-3, sums(events(*COPIED)), sums(events(*IDLE)), disk_ms=0.0)
    assert found.pcie_ms == pytest.approx((1 + 40 + 3 + 700 - 4) * 1e-3)
    assert found.rest_ms == pytest.approx(0.0, abs=1e-9)


def test_the_disk_is_part_of_the_wait_for_the_host() -> None:
    busy, idle = sums(events(*LAYER)), sums(events(*IDLE))
    some = parts(1.0, busy, idle, disk_ms=0.006)
    assert (some.cpu_ms, some.disk_ms) == pytest.approx((0.020, 0.006))
    more = parts(1.0, busy, idle, disk_ms=5.0)
    assert (more.cpu_ms, more.disk_ms) == pytest.approx((0.0, 0.026)), "the host may wait while the GPU computes"
    assert some.rest_ms == pytest.approx(more.rest_ms)


def test_a_large_rest_is_said() -> None:
    good = Parts(20.0, 4.0, 8.0, 6.0, 0.8, 0.5)
    assert good.rest_share < MOST_REST
    assert "not accounted" not in line("ours", good)
    assert " 50.00" in line("ours", good)
    assert "100.00" in line("ours", good, rows=2)
    assert "too much is not accounted for" in line("ours", Parts(20.0, 4.0, 8.0, 6.0, 0.5, 0.0))
    assert "too much is not accounted for" in line("ours", Parts(20.0, 9.0, 8.0, 6.0, 0.5, 0.0)), "or is twice"


def test_names_as_compilers_write_them() -> None:
    assert kernel("up_kernel") == "up_kernel"
    assert kernel("wait_kernel(int*, int)") == "wait_kernel"


def test_events_of_a_trace() -> None:
    trace = {
        "traceEvents": [
            {"ph": "X", "cat": "kernel", "name": "b", "ts": 105.5, "dur": 2.0, "args": {"stream": 7}},
            {"ph": "X", "cat": "kernel", "name": "a", "ts": 100.0, "dur": 4.5, "args": {"stream": 7}},
            {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 101.0, "dur": 1.0, "args": {"stream": 9}},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": 99.0, "dur": 1.0},
            {"ph": "M", "name": "process_name"},
        ]
    }
    assert parse(trace) == [
        Event("a", "kernel", 0.0, 4.5, 7),
        Event("Memcpy HtoD", "copy", 1.0, 1.0, 9),
        Event("b", "kernel", 5.5, 2.0, 7),
    ]
    assert parse({"traceEvents": []}) == []
