"""What a sweep's feed reads ahead, and what it leaves in the cache: the decode set, and what this layer still needs."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from expert_store import BlocksOnDisk, write_blocks
from feeding import ALL, EXPERTS, LAYERS, TOKENS, changed, drain, naming, resident, swept

from kernels.experts.host.binding import Host
from kernels.experts.host.feed import Feed
from kernels.workers.pool import Workers

Opener = Callable[..., Host]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), LAYERS, EXPERTS)


@pytest.fixture
def opened(blocks: BlocksOnDisk) -> Iterator[Opener]:
    """Opens hosts with evicted blocks poisoned, checks their bookkeeping at the end and closes them."""
    hosts: list[Host] = []

    def open_host(**options: object) -> Host:
        given = {"slots": 100, "readers": 2, "poison": True} | options
        hosts.append(Host(blocks.catalog(), Workers(2, spin_us=0), **given))  # type: ignore[arg-type]
        return hosts[-1]

    yield open_host
    for host in hosts:
        host.check()
        host.close()
        host.workers.close()


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_the_next_layer_is_read_ahead(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=48, readers=3)
    feed = Feed(host)
    feed.begin(0, naming(ALL), TOKENS)
    feed.expect(1, range(0, EXPERTS, 2))
    drain(feed, blocks, 0)
    feed.end()
    wait_until(lambda: len(resident(host, 1)) == EXPERTS // 2)
    before = host.counters()
    assert (before["prefetch_issued"], before["prefetch_useful"]) == (EXPERTS // 2, 0)
    swept(host, blocks, 1)
    now = changed(host, before)
    assert (now["hits"], now["misses"]) == (EXPERTS // 2, EXPERTS // 2)
    assert (now["prefetch_useful"], now["prefetch_wasted"]) == (EXPERTS // 2, 0)


def test_reading_ahead_can_be_switched_off(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(prefetch="off")
    feed = Feed(host)
    feed.begin(0, naming(ALL), TOKENS)
    feed.expect(1, ALL)
    drain(feed, blocks, 0)
    feed.end()
    time.sleep(0.05)
    assert host.counters()["prefetch_issued"] == 0


def test_reading_ahead_takes_nothing_that_this_layer_needs(blocks: BlocksOnDisk, opened: Opener) -> None:
    """Every slot holds a block of this layer: what is expected waits until they are done with, one after the other."""
    host = opened(slots=EXPERTS)
    swept(host, blocks, 0)
    before = host.counters()
    feed = Feed(host)
    feed.begin(0, naming(ALL), TOKENS)
    feed.expect(1, ALL)
    time.sleep(0.05)
    assert changed(host, before)["prefetch_issued"] == 0
    drain(feed, blocks, 0)
    assert changed(host, before)["misses"] == 0
    feed.end()
    wait_until(lambda: len(resident(host, 1)) == EXPERTS)
    assert changed(host, before)["prefetch_wasted"] == 0
    feed.expect(1, [])


def used_by_decode(host: Host, blocks: BlocksOnDisk, layer: int) -> None:
    ids = torch.arange(EXPERTS, dtype=torch.int32)[None]
    for _ in range(3):
        host.step(layer, ids, torch.ones(1, EXPERTS), torch.ones(1, blocks.layout.latent))


def test_the_decode_set_stays(blocks: BlocksOnDisk, opened: Opener) -> None:
    """A sweep, and what it reads ahead, takes the room that the policy gives it and no more; plain LRU gives it all."""
    left = {}
    for policy in ("shipped", "lru"):
        host = opened(slots=EXPERTS, policy=policy)
        used_by_decode(host, blocks, 0)
        feed = Feed(host)
        for _ in range(4):
            feed.begin(1, naming(ALL), TOKENS)
            drain(feed, blocks, 1)
            feed.expect(1, ALL)
            feed.end()
            time.sleep(0.01)
        left[policy] = len(resident(host, 0))
        feed.expect(1, [])
    assert left["shipped"] >= EXPERTS - EXPERTS // 2
    assert left["lru"] == 0


def test_an_expert_that_many_tokens_name_is_of_the_decode_set(blocks: BlocksOnDisk, opened: Opener) -> None:
    often = [2, 3, 5, 7, 11]
    for times, kept in ((TOKENS // 8 + 1, True), (1, False)):
        host = opened(slots=12)
        swept(host, blocks, 0, often, times)
        used_by_decode_of_layer_1 = [*range(4)]
        swept(host, blocks, 1, used_by_decode_of_layer_1, TOKENS)
        swept(host, blocks, 1)
        assert (resident(host, 0) == set(often)) == kept
