"""A sweep's feed: every named block once, whole while it is out, whatever the cache and the steps meanwhile."""

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from expert_store import BlocksOnDisk, batch, same, write_blocks
from feeding import ALL, EXPERTS, LAYERS, TOKENS, changed, drain, is_whole, naming, resident, swept
from timing import in_some_try, in_time

from kernels.block import BlockLayout
from kernels.experts.host.binding import BlockError, Host, HostError
from kernels.experts.host.feed import Block, Feed
from kernels.workers.pool import Workers

Opener = Callable[..., Host]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), LAYERS, EXPERTS)


@pytest.fixture
def blocks(sound: BlocksOnDisk, tmp_path: Path) -> BlocksOnDisk:
    """A file that a test may damage."""
    (tmp_path / "experts.bin").write_bytes(sound.path.read_bytes())
    return BlocksOnDisk(tmp_path / "experts.bin", LAYERS, EXPERTS, sound.packed)


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


@pytest.mark.parametrize("slots", [2, 3, 7, 24, 100])
@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("hold", [0, 3])
def test_nothing_resident(blocks: BlocksOnDisk, opened: Opener, slots: int, readers: int, hold: int) -> None:
    host = opened(slots=slots, readers=readers)
    feed = Feed(host)
    feed.begin(1, naming(ALL), TOKENS)
    order = drain(feed, blocks, 1, hold=hold)
    feed.end()
    assert sorted(order) == list(ALL)
    counters = host.counters()
    assert (counters["hits"], counters["misses"], counters["sweep_blocks"]) == (0, EXPERTS, EXPERTS)
    assert counters["demand_read_bytes"] == EXPERTS * blocks.layout.block_bytes
    if readers == 1:
        assert order == list(ALL), "the order of the file"


def test_all_resident(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened()
    swept(host, blocks, 0)
    before = host.counters()
    some = [3, 17, 5, 22]
    assert swept(host, blocks, 0, some) == sorted(some)
    now = changed(host, before)
    assert (now["hits"], now["misses"], now["demand_read_bytes"], now["sweep_wait_ns"]) == (4, 0, 0, 0)
    assert swept(host, blocks, 0, []) == []


def test_what_is_in_ram_comes_first(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(read_delay_us=2000)
    swept(host, blocks, 0, [9, 20, 23])
    before = host.counters()
    order = swept(host, blocks, 0)
    assert order[:3] == [9, 20, 23]
    assert sorted(order) == list(ALL)
    assert (changed(host, before)["hits"], changed(host, before)["misses"]) == (3, EXPERTS - 3)


@pytest.mark.parametrize("slots", [2, 3, 6, 12, 24, 48])
@pytest.mark.parametrize("policy", ["shipped", "lru", "s3fifo"])
def test_steps_between_the_groups(blocks: BlocksOnDisk, opened: Opener, slots: int, policy: str) -> None:
    """A decoding sequence goes on while blocks are out and on their way: its bits, and theirs, are right."""
    host = opened(slots=slots, policy=policy)
    seeds = iter(range(1000))

    def decode() -> None:
        seed = next(seeds)
        for layer in range(LAYERS):
            given = batch(blocks, 1 + seed % 2, 5, seed)
            assert same(host.step(layer, *given), blocks.expected(layer, *given))
        host.check()

    feed = Feed(host, ahead=8)
    for layer in (0, 1, 0):
        feed.begin(layer, naming(ALL), TOKENS)
        feed.expect(1 - layer, ALL)
        assert sorted(drain(feed, blocks, layer, most=3, hold=2, between=decode)) == list(ALL)
        feed.end()
        host.check()


def test_bytes_that_are_given_back_may_change(blocks: BlocksOnDisk, opened: Opener) -> None:
    """The control of all the comparisons here: a block that is used after its release shows."""
    host = opened(slots=2)
    feed = Feed(host)
    feed.begin(0, naming(ALL), TOKENS)
    block = feed.next()
    assert block is not None
    assert is_whole(blocks, 0, block)
    feed.release(block.number)
    drain(feed, blocks, 0)
    assert not is_whole(blocks, 0, block)
    feed.end()


def test_a_step_goes_before_the_feed(blocks: BlocksOnDisk, opened: Opener) -> None:
    """With one reader and many blocks to come, a step waits for the read under way and its own."""
    given = batch(blocks, 1, 1, seed=1)
    expected = blocks.expected(1, *given)

    def read_by_then() -> int:
        """Blocks; on a busy machine the feed's own before the step begins, and after it has ended, too."""
        host = opened(readers=1, read_delay_us=3000)
        feed = Feed(host)
        feed.begin(0, naming(ALL), TOKENS)
        out = host.step(1, *given)
        read = host.counters()["demand_read_bytes"] // blocks.layout.block_bytes
        assert same(out, expected)
        drain(feed, blocks, 0)
        assert host.counters()["demand_read_bytes"] == (EXPERTS + 1) * blocks.layout.block_bytes
        feed.end()
        return read

    assert in_some_try(read_by_then, lambda read: read <= 3) <= 3


def test_the_feed_begins_no_read_while_a_step_reads(blocks: BlocksOnDisk, opened: Opener) -> None:
    """Not even with readers to spare: its last block would come later. The cache is full: reads begin by evicting."""
    read_s = 0.15
    given = batch(blocks, 1, 1, seed=1)

    def begun_meanwhile() -> int | None:
        """How many; None if this machine was so busy that the step's read may have ended before it was looked."""
        host = opened(slots=8, readers=4, read_delay_us=int(1e6 * read_s))
        swept(host, blocks, 0, range(8))
        before = host.counters()
        step = threading.Thread(target=host.step, args=(1, *given))
        asked = time.monotonic()
        step.start()
        assert in_time(lambda: changed(host, before)["evictions"] == 1)
        feed = Feed(host)
        feed.begin(0, naming(range(8, 16)), TOKENS)
        time.sleep(0.03)
        begun = changed(host, before)["evictions"] - 1
        in_between = time.monotonic() < asked + read_s
        step.join()
        assert sorted(drain(feed, blocks, 0)) == list(range(8, 16))
        assert changed(host, before)["evictions"] == 1 + 8
        feed.end()
        return begun if in_between else None

    assert in_some_try(begun_meanwhile, lambda begun: begun is not None) == 0


def test_a_block_that_both_want_is_read_once(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(readers=3, read_delay_us=1000)
    feed = Feed(host)
    for seed in range(3):
        feed.begin(seed % 2, naming(ALL), TOKENS)
        given = batch(blocks, 2, 9, seed)
        assert same(host.step(seed % 2, *given), blocks.expected(seed % 2, *given))
        drain(feed, blocks, seed % 2)
        feed.end()
    assert host.counters()["demand_read_bytes"] == LAYERS * EXPERTS * blocks.layout.block_bytes


def test_steps_leave_nothing_in_ram_but_what_is_yet_to_come(blocks: BlocksOnDisk, opened: Opener) -> None:
    """What steps have brought stands in the way of what the feed would read first, and has its turn. (It waited.)"""
    host = opened(slots=2)
    swept(host, blocks, 0, [1, 3])
    feed = Feed(host)
    feed.begin(0, naming([1, 3, 5, 7, 9]), TOKENS)
    ids, x = torch.tensor([[7, 9]], dtype=torch.int32), torch.randn(1, blocks.layout.latent)
    host.step(0, ids, torch.ones(1, 2), x)
    before = host.counters()
    assert resident(host, 0) == {7, 9}
    assert sorted(drain(feed, blocks, 0)) == [1, 3, 5, 7, 9]
    feed.end()
    assert changed(host, before)["demand_read_bytes"] == 3 * blocks.layout.block_bytes


def test_what_may_be_out_is_bounded(blocks: BlocksOnDisk, opened: Opener) -> None:
    host = opened(slots=12)
    feed = Feed(host, ahead=64)
    feed.begin(0, naming(ALL), TOKENS)
    out: list[Block] = []
    while taken := feed.take(24):
        out += taken
    assert taken == [], "not the end: some must be given back"
    assert len(out) == 3, "half of the slots, and half of these for blocks that are read"
    with pytest.raises(AssertionError, match="release some first"):
        feed.next()
    given = batch(blocks, 2, 5, seed=2)
    assert same(host.step(0, *given), blocks.expected(0, *given))
    feed.release(*(block.number for block in out))
    with pytest.raises(AssertionError, match="not out"):
        feed.release(out[0].number)
    assert len(drain(feed, blocks, 0)) == EXPERTS - 3
    feed.end()


def test_one_slot_is_not_enough(opened: Opener) -> None:
    with pytest.raises(HostError, match="at least two"):
        Feed(opened(slots=1)).begin(0, naming(ALL), TOKENS)


def test_what_is_not_of_the_model(opened: Opener) -> None:
    feed = Feed(opened())
    for layer, counts in ((-1, naming(ALL)), (LAYERS, naming(ALL)), (0, naming(ALL)[1:])):
        with pytest.raises(ValueError, match="of a model"):
            feed.begin(layer, counts, TOKENS)
    feed.expect(7, [1])
    feed.expect(1, [-1, EXPERTS])


@pytest.mark.parametrize("damage", ["checksum", "truncated"])
@pytest.mark.parametrize("slots", [2, 48])
def test_a_block_that_cannot_be_read(blocks: BlocksOnDisk, opened: Opener, damage: str, slots: int) -> None:
    """It is named, all leases come back, and the next feed and step work."""
    host = opened(slots=slots)
    whole = blocks.path.read_bytes()
    at = blocks.offset(1, 13)
    if damage == "checksum":
        blocks.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    else:
        os.truncate(blocks.path, at + 1000)
    feed = Feed(host)
    for _ in range(2):
        feed.begin(1, naming(ALL), TOKENS)
        with pytest.raises(BlockError, match=r"MoE layer 1, expert (13|1[4-9]|2\d): .*(checksum|truncated)"):
            drain(feed, blocks, 1)
        feed.end()
        host.check()
        assert sorted(swept(host, blocks, 1, range(13))) == list(range(13))
        given = batch(blocks, 2, 5, seed=4)
        assert same(host.step(0, *given), blocks.expected(0, *given))
    blocks.path.write_bytes(whole)
    assert sorted(swept(host, blocks, 1)) == list(ALL)


def test_a_block_that_does_not_come(blocks: BlocksOnDisk, opened: Opener) -> None:
    def waited_in_vain() -> str:
        """What was said; nothing if this machine was so busy that the block had come before it was asked for."""
        host = opened(read_delay_us=100_000)
        feed, said = Feed(host), ""
        feed.begin(1, naming([5]), TOKENS)
        try:
            early = feed.take(1, timeout_s=0.01) or []
        except BlockError as error:
            said, early = str(error), []
            assert host.counters()["sweep_wait_ns"] >= 1e7
        feed.release(*(block.number for block in early))
        assert [*(block.expert for block in early), *drain(feed, blocks, 1)] == [5], "it was only late"
        feed.end()
        return said

    assert re.search(r"layer 1, expert 5: .*not come in time", in_some_try(waited_in_vain, bool))


def test_others_run_while_it_waits(opened: Opener) -> None:
    """The GIL is released."""

    def counted_meanwhile() -> int:
        feed = Feed(opened(read_delay_us=100_000))
        feed.begin(0, naming([1]), TOKENS)
        counted, done = 0, threading.Event()

        def take() -> None:
            feed.take(1)
            done.set()

        taking = threading.Thread(target=take)
        taking.start()
        while not done.wait(0.001):
            counted += 1
        taking.join()
        feed.end()
        return counted

    assert in_some_try(counted_meanwhile, lambda counted: counted > 10) > 10


def test_an_abandoned_sweep(blocks: BlocksOnDisk, opened: Opener) -> None:
    """Blocks out, arrived, on their way and expected: all leases come back at once, and what follows is sound."""
    host = opened(slots=10, readers=3, read_delay_us=3000)
    feed = Feed(host)
    for layer in (0, 1, 1):
        feed.begin(layer, naming(ALL), TOKENS)
        feed.expect(1 - layer, ALL)
        block = feed.next()
        assert block is not None
        feed.end()
        feed.end()
        host.check()
        with pytest.raises(AssertionError, match="not out"):
            feed.release(block.number)
    issued = host.counters()["prefetch_issued"]
    time.sleep(0.05)
    assert host.counters()["prefetch_issued"] == issued, "what was expected is forgotten"
    given = batch(blocks, 3, 9, seed=3)
    assert same(host.step(0, *given), blocks.expected(0, *given))
    assert sorted(swept(host, blocks, 1)) == list(ALL)


def test_the_host_spends_little_on_what_is_in_ram(tmp_path: Path) -> None:
    """512 blocks of a layer in less than 2 ms of processor time: a tenth of what copying them takes."""
    many = write_blocks(tmp_path, 1, 512, BlockLayout(32, 16))
    workers = Workers(1, spin_us=0)
    host = Host(many.catalog(), workers, slots=600, readers=1)
    feed, spent = Feed(host), []
    counts = naming(range(512), of=512)
    for _ in range(8):
        begun, out = time.thread_time(), 0
        feed.begin(0, counts, TOKENS)
        while taken := feed.take(32):
            feed.release(*(block.number for block in taken))
            out += len(taken)
        feed.end()
        spent.append(time.thread_time() - begun)
        assert out == 512
    assert host.counters()["hits"] == 7 * 512
    assert min(spent) < 2e-3
    host.check()
    host.close()
    workers.close()
