"""A replay against what it stands for: the live cache at the real model's shape, and the formula of a token's time. A
late expert changes no bit of a result. Prefetching is found to pay or not by trying."""

import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from expert_blocks import random_expert
from expert_store import LAYOUT, BlocksOnDisk, same, write_blocks
from timing import in_some_try

from kernels import build
from kernels.block import BlockLayout
from kernels.experts.host.binding import Catalog, Host
from kernels.experts.host.replay import Clock, Routing, replay
from kernels.workers.pool import Workers
from services.tools.predict import Layer
from services.tools.traces.generators import FULL, Sizes, generate

SMALL = BlockLayout(32, 16)


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(2, spin_us=0)
    yield pool
    pool.close()


def one_block_for_all(folder: Path, layers: int, experts: int) -> Catalog:
    """Every expert's bytes are the same ones: the real number of experts in a file of one page."""
    block = random_expert(SMALL, 1, (0x20, 0x60))
    path = folder / "experts.bin"
    path.write_bytes(block.block.tobytes())
    shape = (layers, experts)
    checksums = np.full(shape, xxhash.xxh64_intdigest(block.block.tobytes()), np.uint64)
    scales = (np.full(shape, one, np.float32) for one in (block.up_scale, block.down_scale))
    return Catalog(path, SMALL, np.zeros(shape, np.int64), checksums, *scales)


def live(catalog: Catalog, workers: Workers, routing: Routing, slots: int, policy: str = "shipped") -> dict[str, int]:
    """The same routing through the real cache, readers and steps."""
    host = Host(catalog, workers, slots=slots, readers=4, policy=policy, prefetch="off")
    for step, layer in enumerate(routing.layer.tolist()):
        ids = torch.from_numpy(routing.ids[routing.first[step] : routing.first[step + 1]])
        host.step(layer, ids, torch.ones(ids.shape), torch.ones(len(ids), SMALL.latent))
    host.check()
    counted = host.counters()
    host.close()
    return counted


@pytest.mark.parametrize("policy", ["shipped", "lru"])
def test_the_full_shape_reads_what_the_live_cache_reads(tmp_path: Path, workers: Workers, policy: str) -> None:
    tokens, slots = 30, int(0.24 * FULL.layers * FULL.experts)
    routing = generate("calibrated", tokens)
    counted = live(one_block_for_all(tmp_path, FULL.layers, FULL.experts), workers, routing, slots, policy)
    [counts] = replay(routing, policy, [slots])
    assert counted["hits"] + counted["misses"] == counts.decode_lookups == tokens * 880
    assert abs(counted["misses"] - counts.decode_reads) / tokens <= 0.4
    [other] = replay(routing, "quota", [slots // 2])
    assert abs(counted["misses"] - other.decode_reads) / tokens > 0.4  # the check can fail


def test_prompts_read_what_the_live_cache_reads(tmp_path: Path, workers: Workers) -> None:
    sizes = Sizes(layers=6, experts=64, top_k=6)
    routing = generate("dialogs", 60, sizes, seed=2)
    assert routing.rows_of_step.max() == 64
    counted = live(one_block_for_all(tmp_path, sizes.layers, sizes.experts), workers, routing, slots=92)
    [counts] = replay(routing, "shipped", [92])
    assert abs(counted["misses"] - counts.decode_reads - counts.sweep_reads) / 60 <= 0.4
    assert counts.sweep_reads > 100


def one_layer_steps(experts: list[list[int]]) -> Routing:
    ids = np.array(experts, np.int32)
    steps = len(ids)
    return Routing(1, 50, np.zeros(steps, np.int32), np.arange(steps + 1, dtype=np.int64), ids)


def test_the_clock_is_the_formula() -> None:
    """One step at a time on an idle disk: predict.py's layer, whatever is missing."""
    for overlapped in (True, False):
        for read_ns in (10.0, 500.0, 5000.0):
            layer = Layer(gap_ns=100, expert_ns=70, read_ns=read_ns, overlapped=overlapped, late_ns=40)
            clock = Clock(layer.gap_ns, layer.expert_ns, layer.read_ns, overlapped, late_ns=layer.late_ns)
            [counts] = replay(one_layer_steps([[0, 1, 2, 3]]), "lru", [9], clock)
            assert counts.decode_ns == layer.time_ns(4, 4)
            [counts] = replay(one_layer_steps([[0, 1, 2, 3], [2, 3, 4, 0], [4, 0, 2, 3]]), "lru", [9], clock)
            assert counts.decode_ns == layer.time_ns(4, 4) + layer.time_ns(4, 1) + layer.time_ns(4, 0)
            computing = 3 * (100 + 4 * 70)
            assert counts.decode_waited_ns == counts.decode_ns - computing


def with_guesses(right: bool) -> Routing:
    """Two layers take turns; each token names new experts. Guesses for the second layer are all right or all wrong."""
    random = np.random.default_rng(1)
    ids = np.stack([random.permutation(400)[:4] for _ in range(200)]).astype(np.int32)
    layer = np.tile(np.array([0, 1], np.int32), 100)
    guesses = np.full_like(ids, -1)
    guesses[layer == 0] = ids[layer == 1] if right else (ids[layer == 1] + 1) % 400
    return Routing(2, 400, layer, np.arange(201, dtype=np.int64), ids, (guesses,))


CLOCK = Clock(gap_ns=1000, expert_ns=100, read_ns=200, ranks=4, in_flight=2)


def test_a_right_guess_hides_reads_and_a_wrong_one_does_not() -> None:
    [off] = replay(with_guesses(True), "shipped", [300], CLOCK)
    [right] = replay(with_guesses(True), "shipped", [300], replace(CLOCK, prefetch="on"))
    [wrong] = replay(with_guesses(False), "shipped", [300], replace(CLOCK, prefetch="on"))
    assert off.prefetch_issued == 0
    assert right.prefetch_useful == right.prefetch_issued > 250
    assert right.decode_waited_ns < 0.6 * off.decode_waited_ns
    assert right.decode_reads < 0.55 * off.decode_reads
    assert wrong.prefetch_useful < 0.2 * wrong.prefetch_issued
    assert wrong.prefetch_useful + wrong.prefetch_wasted > 0.95 * wrong.prefetch_issued
    assert wrong.decode_waited_ns > 0.85 * off.decode_waited_ns


def test_on_a_busy_disk_a_wrong_guess_delays_what_is_demanded() -> None:
    """By no more than what may be on its way at once."""
    busy = replace(CLOCK, read_ns=1e6, gap_ns=1)
    [off] = replay(with_guesses(False), "shipped", [300], busy)
    [wrong] = replay(with_guesses(False), "shipped", [300], replace(busy, prefetch="on"))
    delayed_ns = wrong.decode_waited_ns - off.decode_waited_ns
    assert 0 < delayed_ns <= 100 * busy.in_flight * busy.read_ns


@dataclass(frozen=True)
class Tried:
    with_ns: int
    without_ns: int


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """trial.h alone, told how long steps waited with and without."""
    folder = tmp_path_factory.mktemp("trial")
    (folder / "trial.cpp").write_text(
        '#include "kernels/experts/host/trial.h"\n'
        'extern "C" int steps_on(int mode, long with, long without, int steps, int last) {\n'
        "  thimble::Trial trial{thimble::Prefetching(mode)};\n"
        "  int on = 0;\n"
        "  for (int i = 0; i < steps; i++) {\n"
        "    if (i >= steps - last) on += trial.on();\n"
        "    trial.step(trial.on() ? with : without);\n"
        "  }\n"
        "  return on;\n"
        "}\n"
    )
    compiler, _ = build.compiler()
    command = [compiler, "-std=c++17", "-shared", "-fPIC", f"-I{build.ROOT}"]
    subprocess.run([*command, str(folder / "trial.cpp"), "-o", str(folder / "trial.so")], check=True)
    library = ctypes.CDLL(str(folder / "trial.so"))
    library.steps_on.argtypes = (ctypes.c_int, ctypes.c_long, ctypes.c_long, ctypes.c_int, ctypes.c_int)
    return library


@pytest.mark.parametrize(("tried", "low", "high"), [(Tried(50, 100), 0.9, 1.0), (Tried(100, 50), 0.0, 0.1)])
def test_prefetching_is_kept_if_it_pays(trial: ctypes.CDLL, tried: Tried, low: float, high: float) -> None:
    steps, last = 20_000, 16_000
    assert low <= trial.steps_on(2, tried.with_ns, tried.without_ns, steps, last) / last <= high
    assert trial.steps_on(1, tried.with_ns, tried.without_ns, steps, last) == last
    assert trial.steps_on(0, tried.with_ns, tried.without_ns, steps, last) == 0


def test_where_nothing_waits_nothing_is_read_ahead(trial: ctypes.CDLL) -> None:
    assert trial.steps_on(2, 0, 0, 20_000, 16_000) < 1600


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), 2, 12, LAYOUT)


@pytest.mark.parametrize("late", [[0], [2], [4], [0, 4], [1, 2, 3]])
def test_a_late_expert_is_added_in_its_place(blocks: BlocksOnDisk, workers: Workers, late: list[int]) -> None:
    """Experts of some ranks are still on the disk when the others have long been computed. The sum is over ranks all
    the same, and a sum in the order of arrival would differ."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randperm(12, generator=generator)[:5].to(torch.int32)[None]
    x, weights = torch.randn(1, LAYOUT.latent, generator=generator), torch.tensor([[1e6, -1e6, 1.0, 3e-4, 7e5]])
    expected = blocks.expected(0, ids, weights, x)
    there = [rank for rank in range(5) if rank not in late]

    def waited_ns() -> int:
        """Less on a busy machine: what comes while a thread is not on a processor is not waited for."""
        host = Host(blocks.catalog(), workers, slots=12, readers=1, read_delay_us=20_000)
        host.step(0, ids[:, there], weights[:, there], x)
        before = host.counters()
        assert same(host.step(0, ids, weights, x), expected)
        after = host.counters()
        assert (after["hits"] - before["hits"], after["misses"] - before["misses"]) == (len(there), len(late))
        host.close()
        return after["disk_wait_ns"] - before["disk_wait_ns"]

    least_ns = 10_000_000 * len(late)
    assert in_some_try(waited_ns, lambda waited: waited > least_ns) > least_ns
    terms = [
        blocks.expected(0, ids[:, [rank]], torch.ones(1, 1), x).double() * weights[0, rank].double()
        for rank in range(5)
    ]
    arrival = torch.zeros_like(terms[0], dtype=torch.float32)
    for rank in (*there, *late):
        arrival += terms[rank].float()
    assert not same(arrival, expected), "this test could not tell"
