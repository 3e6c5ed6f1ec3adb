"""Whole steps through the C++ host: the definition's bits whatever the cache, threads, instruction set and batch."""

import hashlib
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from expert_blocks import constant_expert, random_expert
from expert_store import BlocksOnDisk, batch, same, write_blocks
from timing import in_some_try

from kernels.block import BlockLayout
from kernels.experts.host.binding import Catalog, Host, xxh64
from kernels.workers.pool import Workers, available_isas

LAYERS, EXPERTS, TOP_K = 2, 12, 5
HINT_WAITS_S = 0.1  # for the step that it is a hint for; as in host/cache.cpp
Opener = Callable[..., Host]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), LAYERS, EXPERTS)


@pytest.fixture
def opened(blocks: BlocksOnDisk) -> Iterator[Opener]:
    """Opens hosts with evicted blocks poisoned, checks their bookkeeping at the end and closes them."""
    hosts: list[Host] = []

    def open_host(threads: int = 2, catalog: Catalog | None = None, **options: object) -> Host:
        given = {"slots": 100, "readers": 2, "poison": True} | options
        hosts.append(Host(catalog or blocks.catalog(), Workers(threads, spin_us=0), **given))  # type: ignore[arg-type]
        return hosts[-1]

    yield open_host
    for host in hosts:
        host.check()
        host.close()
        host.workers.close()


def run_some_steps(host: Host, blocks: BlocksOnDisk, rows: tuple[int, ...] = (1, 2, 3, 4, 9)) -> None:
    for seed, count in enumerate(rows):
        layer, arguments = seed % LAYERS, batch(blocks, count, TOP_K, seed)
        assert same(host.step(layer, *arguments), blocks.expected(layer, *arguments)), (seed, count)
        host.check()


@pytest.mark.parametrize("isa", available_isas())
def test_every_instruction_set(blocks: BlocksOnDisk, opened: Opener, isa: str) -> None:
    run_some_steps(opened(isa=isa), blocks)


@pytest.mark.parametrize("threads", [1, 2, 7, 16])
def test_any_number_of_threads(blocks: BlocksOnDisk, opened: Opener, threads: int) -> None:
    run_some_steps(opened(threads), blocks)


@pytest.mark.parametrize("slots", [1, 2, 5, 23, 24])
@pytest.mark.parametrize("readers", [1, 4])
def test_any_size_of_cache(blocks: BlocksOnDisk, opened: Opener, slots: int, readers: int) -> None:
    run_some_steps(opened(slots=slots, readers=readers), blocks)


def test_wide_experts_are_split_into_parts(tmp_path: Path, opened: Opener) -> None:
    """As many alive rows as the real model's and more: `down` of up to four tokens is cut into parts that are added."""
    blocks = write_blocks(tmp_path, 1, 4, BlockLayout(96, 1008))
    for threads in (1, 5):
        host = opened(threads, blocks.catalog())
        for rows in (1, 2, 3, 4, 5, 9):
            arguments = batch(blocks, rows, 2, seed=rows)
            assert same(host.step(0, *arguments), blocks.expected(0, *arguments)), rows


def test_a_wide_batch_moves_each_expert_once(blocks: BlocksOnDisk, opened: Opener) -> None:
    """More experts than slots: some wait for others to leave, none is read twice."""
    arguments = batch(blocks, 40, TOP_K, seed=1)
    distinct = len(set(arguments[0].flatten().tolist()))
    assert distinct == EXPERTS
    for slots in (1, 3, 11):
        host = opened(slots=slots)
        assert same(host.step(1, *arguments), blocks.expected(1, *arguments))
        counters = host.counters()
        assert (counters["hits"], counters["misses"]) == (0, distinct)
        assert counters["demand_read_bytes"] == distinct * blocks.layout.block_bytes
        assert counters["evictions"] == distinct - slots


def test_hits_are_computed_before_misses_evict_them(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=TOP_K)
    weights, x = torch.rand(1, TOP_K), torch.randn(1, blocks.layout.latent)
    host.step(0, torch.tensor([[0, 1, 2, 3, 4]], dtype=torch.int32), weights, x)
    ids = torch.tensor([[8, 4, 7, 3, 2]], dtype=torch.int32)
    assert same(host.step(0, ids, weights, x), blocks.expected(0, ids, weights, x))
    assert (host.counters()["hits"], host.counters()["misses"]) == (3, 7)


def test_the_result_of_one_token_does_not_depend_on_its_companions(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=4)
    ids, weights, x = batch(blocks, 21, TOP_K, seed=3)
    together = host.step(0, ids, weights, x)
    for row in (0, 7, 20):
        assert same(host.step(0, ids[row : row + 1], weights[row : row + 1], x[row : row + 1])[0], together[row])
    order = torch.randperm(21, generator=torch.Generator().manual_seed(4))
    assert same(host.step(0, ids[order], weights[order], x[order]), together[order])


def test_odd_batches(blocks: BlocksOnDisk, opened: Opener) -> None:
    """All tokens on one expert, an expert twice for one token, equal weights, zeros of either sign, nobody at all."""
    host = opened(slots=3)
    x = torch.randn(6, blocks.layout.latent, generator=torch.Generator().manual_seed(5))
    x[2] = 0.0
    x[3] = -0.0
    x[4, ::2] = -0.0
    for ids in ([[7]] * 6, [[3, 3, 3]] * 6, [[0, 1], [1, 0], [0, 0], [1, 1], [2, 3], [3, 2]]):
        some = torch.tensor(ids, dtype=torch.int32)
        for weights in (torch.full(some.shape, 0.25), torch.zeros(some.shape), -torch.rand(some.shape)):
            assert same(host.step(0, some, weights, x), blocks.expected(0, some, weights, x))
    none = host.step(0, torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2), torch.zeros(0, blocks.layout.latent))
    assert none.shape == (0, blocks.layout.latent)


def test_nan_inf_and_overflow(blocks: BlocksOnDisk, opened: Opener) -> None:
    ids, weights, x = batch(blocks, 7, TOP_K, seed=6)
    x[0, 1], x[1, 2], x[2, 3], x[3] = math.nan, math.inf, -math.inf, x[3] * 1e20
    x[4] *= 1e-38
    weights[5, 2] = math.inf
    host = opened(slots=4)
    out = host.step(0, ids, weights, x)
    assert same(out, blocks.expected(0, ids, weights, x))
    assert out[:4].isnan().all()
    assert out[6].isfinite().all()
    only_bad = host.step(0, ids[:3], weights[:3], x[:3])
    assert only_bad.isnan().all()


def test_no_neuron_alive_and_all_alive(tmp_path: Path, opened: Opener) -> None:
    layout = BlockLayout(64, 32)
    packed = tuple(constant_expert(layout, up, 2, 0x40) for up in (2, 10))  # +1 and -1 everywhere
    path = tmp_path / "experts.bin"
    path.write_bytes(b"".join(one.block.tobytes() for one in packed))
    blocks = BlocksOnDisk(path, 1, 2, packed)
    host = opened(catalog=blocks.catalog())
    x = torch.rand(1, 64) + 0.5
    for id, alive in ((0, True), (1, False)):
        ids, weights = torch.tensor([[id]], dtype=torch.int32), torch.ones(1, 1)
        out = host.step(0, ids, weights, x)
        assert same(out, blocks.expected(0, ids, weights, x))
        assert bool((out != 0).all()) == alive


@pytest.mark.parametrize("change", ["swapped experts", "shifted scale", "one bit"])
def test_the_comparison_can_fail(blocks: BlocksOnDisk, opened: Opener, tmp_path: Path, change: str) -> None:
    catalog = blocks.catalog()
    arguments = batch(blocks, 2, EXPERTS, seed=7)
    if change == "swapped experts":
        for array in (catalog.offsets, catalog.checksums):
            array[0, [3, 4]] = array[0, [4, 3]]
    elif change == "shifted scale":
        catalog.down_scales[0, 3] *= 2
    else:
        data = bytearray(blocks.path.read_bytes())
        at = blocks.offset(0, 3)
        data[at] ^= 1
        catalog.checksums[0, 3] = xxhash.xxh64_intdigest(data[at : at + blocks.layout.block_bytes])
        (tmp_path / "changed.bin").write_bytes(data)
        catalog = Catalog(tmp_path / "changed.bin", *list(vars(catalog).values())[1:])
    host = opened(catalog=catalog)
    assert not same(host.step(0, *arguments), blocks.expected(0, *arguments))
    assert same(host.step(1, *arguments), blocks.expected(1, *arguments))


def test_late_blocks_change_nothing(blocks: BlocksOnDisk, opened: Opener) -> None:
    """Hits are computed while misses load; what comes late is added in its place."""
    ids, weights, x = batch(blocks, 1, TOP_K, seed=8)

    def waited_ns() -> int:
        """Less on a busy machine: what comes while a thread is not on a processor is not waited for."""
        host = opened(slots=8, readers=1, read_delay_us=5000)
        host.step(0, ids[:, :2].contiguous(), weights[:, :2].contiguous(), x)
        before = host.counters()["disk_wait_ns"]
        assert same(host.step(0, ids, weights, x), blocks.expected(0, ids, weights, x))
        assert host.counters()["hits"] == 2
        return host.counters()["disk_wait_ns"] - before

    assert in_some_try(waited_ns, lambda waited: waited > 3 * 4_000_000) > 3 * 4_000_000


def test_repeated_runs_and_other_processes_agree(blocks: BlocksOnDisk, opened: Opener) -> None:
    """Three processes, with their own threads, slots and instruction sets."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from expert_store import *\n"
        "from kernels.experts.host.binding import Host; from kernels.workers.pool import Workers; import hashlib\n"
        f"blocks = write_blocks(Path(sys.argv[2]), {LAYERS}, {EXPERTS})\n"
        "host = Host(blocks.catalog(), Workers(int(sys.argv[3])), slots=4, readers=2, isa=sys.argv[4])\n"
        f"print(hashlib.sha256(host.step(0, *batch(blocks, 6, {TOP_K}, 9)).numpy().tobytes()).hexdigest())\n"
    )
    here, folders = str(Path(__file__).parent), [blocks.path.parent / name for name in "ab"]
    started = []
    for folder, threads, isa in zip(folders, ("1", "3"), (available_isas()[0], available_isas()[-1]), strict=True):
        folder.mkdir()
        command = [sys.executable, "-c", code, here, str(folder), threads, isa]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    found = {process.communicate()[0].strip() for process in started}
    host = opened(slots=5)
    for _ in range(3):
        out = host.step(0, *batch(blocks, 6, TOP_K, 9))
        found.add(hashlib.sha256(out.numpy().tobytes()).hexdigest())
    assert len(found) == 1


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_prefetch(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=6, readers=3)
    host.prefetch(0, [3, 4, 5, 99, -1])
    host.prefetch(77, [0])
    wait_until(lambda: host.counters()["slots_used"] == 3)
    weights, x = torch.rand(1, 2), torch.randn(1, blocks.layout.latent)
    ids = torch.tensor([[4, 8]], dtype=torch.int32)
    assert same(host.step(0, ids, weights, x), blocks.expected(0, ids, weights, x))
    counters = host.counters()
    assert (counters["hits"], counters["misses"]) == (1, 1)
    assert (counters["prefetch_issued"], counters["prefetch_useful"], counters["prefetch_wasted"]) == (3, 1, 0)
    assert counters["prefetch_read_bytes"] == 3 * blocks.layout.block_bytes
    ids = torch.arange(6, 12, dtype=torch.int32)[None]
    host.step(0, ids, torch.rand(1, 6), x)
    assert host.counters()["prefetch_wasted"] == 2
    host.check()


def test_a_hint_waits_for_the_step_that_follows_it(blocks: BlocksOnDisk, opened: Opener) -> None:
    """The model hints at the next layer just before this layer's step. What the step needs is read first, and what it
    has in RAM is not evicted for a guess."""
    weights, x = torch.rand(1, 3), torch.randn(1, blocks.layout.latent)
    ids = torch.tensor([[0, 1, 2]], dtype=torch.int32)

    def missed_and_issued() -> tuple[int, int] | None:
        """None if this machine was so busy that a step came when its hint waited no longer."""
        host = opened(slots=3, readers=1, read_delay_us=3000)
        took_s = []

        def hinted_and_stepped(layer: int, *hinted: int) -> None:
            begun = time.monotonic()
            host.prefetch(1, hinted)
            host.step(layer, ids, weights, x)
            took_s.append(time.monotonic() - begun)

        host.step(0, ids, weights, x)
        hinted_and_stepped(0, 5)
        missed = host.counters()["misses"]
        wait_until(lambda: host.counters()["prefetch_issued"] == 1)
        hinted_and_stepped(1, 6, 7)  # this is layer 1: what was guessed of it is stale now
        time.sleep(0.15)
        return (missed, host.counters()["prefetch_issued"]) if max(took_s) < HINT_WAITS_S else None

    # A guess evicts nothing that the step needs, and one that came too late is not read.
    assert in_some_try(missed_and_issued, lambda found: found is not None) == (3, 1)


def test_a_hint_waits_for_a_slot(blocks: BlocksOnDisk, opened: Opener) -> None:
    """A guess that comes while a step leases every slot is not lost. (It was.)"""
    host = opened(slots=2, readers=2, read_delay_us=20_000)
    ids, x = torch.tensor([[0, 1]], dtype=torch.int32), torch.randn(1, blocks.layout.latent)
    step = threading.Thread(target=host.step, args=(0, ids, torch.ones(1, 2), x))
    step.start()
    wait_until(lambda: host.counters()["misses"] == 2)  # both slots are leased and loading
    host.prefetch(1, [7])
    wait_until(lambda: host.counters()["prefetch_issued"] == 1)
    step.join()


def test_an_idle_host_uses_no_processor(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(threads=8)
    host.step(0, *batch(blocks, 1, TOP_K, seed=10))

    def used_s() -> float:
        """Others' threads are in it, and on a busy machine some that have not yet fallen asleep."""
        begin = time.process_time()
        time.sleep(0.5)
        return time.process_time() - begin

    time.sleep(0.05)
    assert in_some_try(used_s, lambda used: used < 0.005) < 0.005


def test_ids_outside_the_model_are_refused(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened()
    ids, weights, x = batch(blocks, 2, TOP_K, seed=11)
    for layer, wrong in ((0, -1), (0, EXPERTS), (LAYERS, 0), (-1, 0)):
        bad = ids.clone()
        bad[1, 2] = wrong
        with pytest.raises(ValueError, match="not of this model"):
            host.step(layer, bad, weights, x)
    with pytest.raises(ValueError, match="weights"):
        host.step(0, ids, weights[:1], x)
    with pytest.raises(ValueError, match="int64"):
        host.step(0, ids.long(), weights, x)
    assert same(host.step(0, ids, weights, x), blocks.expected(0, ids, weights, x))


def test_checksum_is_xxh64() -> None:
    data = np.frombuffer(np.random.default_rng(1).bytes(5000), np.uint8)
    for size in [*range(70), 100, 127, 4096, 4999]:
        part = np.ascontiguousarray(data[7 : 7 + size])
        assert xxh64(part) == xxhash.xxh64_intdigest(part.tobytes())


def test_the_random_blocks_are_what_they_should_be() -> None:
    """The tests above mean something only if neurons die and live, and outputs are finite."""
    expert = random_expert(BlockLayout(160, 80), 1, (0x20, 0x60)).unpacked
    xq = torch.randint(-32767, 32768, (50, 160), generator=torch.Generator().manual_seed(1)).double()
    alive = (xq @ expert.up.T > 0).double().mean()
    assert 0.3 < alive < 0.7
