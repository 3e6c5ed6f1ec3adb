"""The worker pool, seen through the operations that use it: any number of threads, several callers, and sleep."""

import threading
import time

import pytest
import torch
from timing import in_some_try

from kernels.linear import cpu, reference
from kernels.workers import pool
from kernels.workers.pool import Workers, default_threads, default_workers, isa_number, use_threads


@pytest.mark.parametrize("threads", [1, 2, 3, 16, 40])
def test_more_threads_than_cores_and_more_than_tiles(threads: int) -> None:
    workers = Workers(threads, spin_us=0)
    generator = torch.Generator().manual_seed(threads)
    for outputs in (1, 13, 500):
        x, weight = torch.randn(2, 33, generator=generator), torch.randn(outputs, 33, generator=generator)
        assert torch.equal(cpu.linear(x, weight, workers), reference.linear(x, weight))
    workers.close()


def test_callers_take_turns() -> None:
    """Several threads with one pool: each gets its own result, whole."""
    workers = Workers(3)
    wrong: list[int] = []

    def call(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(3, 64, generator=generator), torch.randn(200, 64, generator=generator)
        expected = reference.linear(x, weight)
        wrong.extend(seed for _ in range(40) if not torch.equal(cpu.linear(x, weight, workers), expected))

    callers = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []
    workers.close()


def test_a_sleeping_pool_wakes_and_an_idle_one_sleeps() -> None:
    workers = Workers(4, spin_us=100)
    x, weight = torch.ones(1, 64), torch.ones(2000, 64)
    for _ in range(5):
        assert (cpu.linear(x, weight, workers) == 64).all()
        time.sleep(0.02)  # all are asleep by now

    def used_s() -> float:
        """Others' threads are in it, and on a busy machine some that have not yet fallen asleep."""
        begin = time.process_time()
        time.sleep(0.3)
        return time.process_time() - begin

    assert in_some_try(used_s, lambda used: used < 0.003) < 0.003
    workers.close()


def test_pools_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        Workers(0)
    with pytest.raises(ValueError, match="instruction set 'sse9' is not available"):
        isa_number("sse9")


def test_the_shared_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_threads", 0)
    assert default_workers().threads == default_threads() >= 1
    assert use_threads(3).threads == 3
    assert default_workers() is use_threads(3)
    assert use_threads(0) is default_workers()
    assert default_workers().threads == default_threads()
