"""The slots' memory: what survives a restart, read back at low priority, and what is taken where locking is refused."""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_store import BlocksOnDisk, batch, same, write_blocks
from timing import in_some_try

from kernels.experts.device import turns
from kernels.experts.host.binding import Host
from kernels.experts.host.drives import EmulatedDrive
from kernels.workers.pool import Workers

LAYERS, EXPERTS = 2, 12
Opener = Callable[..., Host]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), LAYERS, EXPERTS)


@pytest.fixture
def opened(blocks: BlocksOnDisk) -> Iterator[Opener]:
    hosts: list[Host] = []

    def open_host(**options: object) -> Host:
        given = {"slots": 24, "readers": 2, "policy": "lru", "poison": True} | options
        hosts.append(Host(blocks.catalog(), Workers(1, spin_us=0), **given))  # type: ignore[arg-type]
        return hosts[-1]

    yield open_host
    for host in hosts:
        host.check()
        host.close()


def use(host: Host, blocks: BlocksOnDisk, layer: int, *ids: int) -> None:
    some = torch.tensor([ids], dtype=torch.int32)
    weights, x = torch.ones(some.shape), torch.ones(1, blocks.layout.latent)
    assert same(host.step(layer, some, weights, x), blocks.expected(layer, some, weights, x))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_resident_set_is_in_the_order_of_use(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=4)
    assert host.resident().tolist() == []
    for key in (3, 14, 5, 20, 3, 7):
        use(host, blocks, key // EXPERTS, key % EXPERTS)
    assert host.resident().tolist() == [5, 20, 3, 7]


def test_a_warm_start_has_hits_and_the_old_order(blocks: BlocksOnDisk, opened: Opener) -> None:
    before = opened(slots=6)
    for key in (9, 23, 2, 15, 0, 11):
        use(before, blocks, key // EXPERTS, key % EXPERTS)
    kept = before.resident()
    host = opened(slots=6)
    host.warm(kept)
    wait_until(lambda: host.counters()["slots_used"] == 6)
    wait_until(lambda: host.resident().tolist() == kept.tolist())
    use(host, blocks, 0, 9, 2, 0, 11)
    counters = host.counters()
    assert (counters["hits"], counters["misses"]) == (4, 0)
    assert (counters["prefetch_issued"], counters["prefetch_wasted"]) == (0, 0), "it is no prefetch"
    use(host, blocks, 0, 5)
    assert 23 not in host.resident(), "the longest unused leaves first, as it would have without a restart"
    assert 15 in host.resident()
    cold = opened(slots=6)
    use(cold, blocks, 0, 9, 2, 0, 11)
    assert cold.counters()["hits"] == 0, "the control: without it there are none"


def test_blocks_are_read_in_the_order_of_the_file(blocks: BlocksOnDisk, opened: Opener) -> None:
    """One reader, stopped after the first few: what is there are the lowest keys."""
    memory = np.fromfile(blocks.path, np.uint8)
    host = opened(readers=1, drives=[EmulatedDrive(memory, gb_s=1, latency_us=20_000)])
    host.warm(list(range(20, 0, -1)))
    wait_until(lambda: host.counters()["slots_used"] >= 4)
    found = sorted(host.resident().tolist())
    assert found == list(range(1, len(found) + 1))


def test_fewer_slots_keep_the_latest(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=3)
    host.warm([4, 8, 15, 16, 23])
    wait_until(lambda: host.resident().tolist() == [15, 16, 23])


def test_demand_does_not_wait_for_a_warm_start(blocks: BlocksOnDisk, opened: Opener) -> None:
    """Nothing is begun while a step waits, nothing is evicted, and what a step read is newer than all of it."""
    memory = np.fromfile(blocks.path, np.uint8)

    def begun_meanwhile() -> int:
        """Two were under way, two are asked for; on a busy machine others before the step begins and after its end."""
        host = opened(slots=20, readers=3, drives=[EmulatedDrive(memory, gb_s=1, latency_us=80_000, depth=3)])
        host.warm(list(range(20)))
        wait_until(lambda: host.counters()["slots_used"] >= 2)
        used = host.counters()["slots_used"]
        use(host, blocks, 1, 10, 11)
        begun = host.counters()["slots_used"] - used
        wait_until(lambda: host.counters()["slots_used"] == 20)
        wait_until(lambda: host.resident()[-2:].tolist() == [22, 23])
        assert host.counters()["evictions"] == 0
        use(host, blocks, 0, *range(12))
        assert host.counters()["hits"] >= 11
        return begun

    assert in_some_try(begun_meanwhile, lambda begun: begun <= 10) <= 10


def test_a_damaged_block_is_left_out_of_a_warm_start(tmp_path: Path) -> None:
    blocks = write_blocks(tmp_path, 1, 4)
    data = bytearray(blocks.path.read_bytes())
    data[blocks.offset(0, 1)] ^= 1
    blocks.path.write_bytes(data)
    host = Host(blocks.catalog(), Workers(1), slots=4, readers=2)
    host.warm([0, 1, 2, 3])
    wait_until(lambda: sorted(host.resident().tolist()) == [0, 2, 3])
    host.check()
    host.close()


def test_keys_of_another_model_are_refused(opened: Opener) -> None:
    host = opened()
    for wrong in ([24], [-1], [[1]]):
        with pytest.raises(ValueError, match="not of this model"):
            host.warm(wrong)


def test_slots_can_be_given_up(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=20)
    address, size_bytes = host.memory()
    host.shrink(5)
    assert host.memory() == (address, size_bytes // 4)
    arguments = batch(blocks, 9, 5, seed=1)
    assert same(host.step(1, *arguments), blocks.expected(1, *arguments))
    assert host.counters()["slots_total"] == 5
    for wrong in (0, 6):
        with pytest.raises(ValueError, match="slots"):
            host.shrink(wrong)


class Runtime:
    """CUDA's page-locking as far as slots see it: `allowed` bytes are, then calls are refused."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, start: int, size_bytes: int, flags: int) -> int:
        if sum(self.locked.values()) + size_bytes > self.allowed:
            return 2
        self.locked[start] = size_bytes
        return 0

    def cudaHostUnregister(self, start: int) -> int:
        return 0 if self.locked.pop(start, None) else 713


@pytest.mark.parametrize(("allowed_slots", "slots"), [(20, 20), (13, 12), (2, None)])
def test_slots_for_a_gpu_are_as_many_as_can_be_page_locked(
    blocks: BlocksOnDisk, opened: Opener, monkeypatch: pytest.MonkeyPatch, allowed_slots: int, slots: int | None
) -> None:
    block_bytes = blocks.layout.block_bytes
    runtime = Runtime(allowed_slots * block_bytes)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(turns, "LOCKED_AT_ONCE_BYTES", 3 * block_bytes + 5)
    monkeypatch.setattr(turns, "_forget_error", lambda: None)
    host = opened(slots=20)
    if slots is None:
        with pytest.raises(turns.HandoffError, match=r"refused to page-lock .* \(CUDA error 2\)"):
            turns.SharedSlots(host, least=4)
        assert host.counters()["slots_total"] == 20
    else:
        shared = turns.SharedSlots(host)
        assert host.counters()["slots_total"] == slots
        assert sum(runtime.locked.values()) == slots * block_bytes == host.memory()[1]
        assert all(size % block_bytes == 0 for size in runtime.locked.values()), "no block lies in two pieces"
        assert ("page-locked only" in shared.notice) == (slots < 20)
        shared.close()
    assert not runtime.locked


LOCKED = """
import os, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from services import garbage
with garbage.not_looked_for():
    from expert_store import *
from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers
blocks, workers = write_blocks(Path(sys.argv[2]), 1, 8), Workers(1)
wide = [np.tile(a, (1, 25)) for a in list(vars(blocks.catalog()).values())[2:6]]
args = batch(blocks, 2, 3, 1)
expected = blocks.expected(0, *args)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, int(sys.argv[3])))
os.geteuid() or os.seteuid(65534)  # the limit does not bind root
host = Host(Catalog(blocks.path, LAYOUT, *wide), workers, slots=200, readers=1, lock_memory=True)
assert same(host.step(0, *args), expected)
print(host.counters()["slots_total"], *host.notices())
print(next(line for line in open("/proc/self/status") if line.startswith("VmLck")))
"""


@pytest.mark.parametrize(
    ("share", "slots", "message"),
    [(2.0, 200, ""), (0.6, 120, "locked only 1 MB of the 3 MB"), (0.1, 200, "will not lock 3 MB")],
    ids=["all", "less than asked", "too little to be of use"],
)
def test_a_page_lock_that_is_refused_in_part(tmp_path: Path, share: float, slots: int, message: str) -> None:
    """The soft limit is a page: it is raised as far as the hard one allows. What is locked is used, and no more."""
    limit = int(share * 200 * 16384)
    if -1 < resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] < limit:
        pytest.skip("this system's hard limit is lower than what the test locks")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        command = [sys.executable, "-c", LOCKED, str(Path(__file__).parent), folder, str(limit)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    told, locked = run.stdout.split("VmLck:")
    assert message in told
    assert int(told.split()[0]) == slots
    assert int(locked.split()[0]) == (slots * 16 if share > 0.25 else 0)
