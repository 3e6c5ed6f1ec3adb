"""Drives: copies on other disks, the emulated drive's timing, and how many reads in flight a drive wants."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_store import BlocksOnDisk, batch, same, write_blocks
from timing import in_some_try, in_time

from kernels.block import BlockLayout
from kernels.experts.host.binding import BlockError, Catalog, Copy, Host, HostError, open_drives, read_rate
from kernels.experts.host.drives import EmulatedDrive, FileDrive, choose_depth
from kernels.workers.pool import Workers
from services.tools.synthetic_blocks import SyntheticBlocks

LAYERS, EXPERTS, TOP_K = 2, 12, 4
LAYOUT = BlockLayout(160, 80)
READ_BYTES = 405_504
READ_S = READ_BYTES / 0.02e9  # at 0.02 GB/s


@pytest.fixture
def blocks(tmp_path: Path) -> BlocksOnDisk:
    return write_blocks(tmp_path, LAYERS, EXPERTS)


def with_copy(blocks: BlocksOnDisk, folder: Path, every: int = 1) -> Catalog:
    """A second file with every n-th block, packed."""
    folder.mkdir()
    path, block_bytes = folder / "experts.bin", blocks.layout.block_bytes
    whole = blocks.path.read_bytes()
    offsets = np.full((LAYERS, EXPERTS), -1, np.int64)
    with path.open("wb") as file:
        for key in range(0, LAYERS * EXPERTS, every):
            offsets.flat[key] = file.tell()
            file.write(whole[key * block_bytes :][:block_bytes])
    return replace(blocks.catalog(), copies=(Copy(path, offsets),))


def check_all(host: Host, blocks: BlocksOnDisk) -> None:
    for layer in range(LAYERS):
        arguments = batch(blocks, 6, TOP_K, seed=layer)
        assert same(host.step(layer, *arguments), blocks.expected(layer, *arguments))
    host.check()


@pytest.mark.parametrize("every", [1, 2, 3], ids=["mirror", "every second", "every third"])
def test_blocks_on_two_drives(blocks: BlocksOnDisk, tmp_path: Path, every: int) -> None:
    """The same bits, and both drives are read."""
    catalog = with_copy(blocks, tmp_path / "second", every)
    whole = np.fromfile(blocks.path, np.uint8)
    copied = np.fromfile(catalog.copies[0].path, np.uint8)
    drives = [EmulatedDrive(memory, gb_s=10) for memory in (whole, copied)]
    host = Host(catalog, Workers(2), slots=5, readers=3, poison=True, drives=drives)
    check_all(host, blocks)
    read = [drive.counts().reads for drive in drives]
    assert sum(read) == host.counters()["misses"]
    assert read[1] >= sum(read) / every / 4
    host.close()
    host = Host(catalog, Workers(2), slots=5, readers=3)
    check_all(host, blocks)
    host.close()


@pytest.mark.parametrize("bad", [0, 1])
def test_a_damaged_block_is_read_from_its_copy(blocks: BlocksOnDisk, tmp_path: Path, bad: int) -> None:
    catalog = with_copy(blocks, tmp_path / "second")
    path = (blocks.path, catalog.copies[0].path)[bad]
    data = bytearray(path.read_bytes())
    for key in range(LAYERS * EXPERTS):
        data[key * blocks.layout.block_bytes + 3] ^= 1
    path.write_bytes(data)
    host = Host(catalog, Workers(2), slots=5, readers=2)
    check_all(host, blocks)
    (notice,) = host.notices()
    assert "had to be read again" in notice
    assert f"{path}: the checksum does not match" in notice
    host.close()


def test_damaged_on_both_drives(blocks: BlocksOnDisk, tmp_path: Path) -> None:
    """The control of the above."""
    catalog = with_copy(blocks, tmp_path / "second")
    for path in (blocks.path, catalog.copies[0].path):
        data = bytearray(path.read_bytes())
        data[blocks.offset(1, 3)] ^= 1
        path.write_bytes(data)
    host = Host(catalog, Workers(1), slots=5, readers=2)
    ids, x = torch.tensor([[3]], dtype=torch.int32), torch.ones(1, LAYOUT.latent)
    with pytest.raises(BlockError, match=r"MoE layer 1, expert 3: .*checksum does not match, twice"):
        host.step(1, ids, torch.ones(1, 1), x)
    assert same(host.step(0, ids, torch.ones(1, 1), x), blocks.expected(0, ids, torch.ones(1, 1), x))
    host.close()


@pytest.mark.parametrize("good", [0, 1, 2, None], ids=["the store", "a copy", "another copy", "nowhere"])
@pytest.mark.parametrize("how", ["changed", "truncated"])
def test_three_drives_of_which_one_is_good(blocks: BlocksOnDisk, tmp_path: Path, good: int | None, how: str) -> None:
    """Whichever it is, it is asked. What is wrong everywhere is told of the store itself."""
    catalog = with_copy(blocks, tmp_path / "second")
    catalog = replace(catalog, copies=(*catalog.copies, *with_copy(blocks, tmp_path / "third").copies))
    host = Host(catalog, Workers(2), slots=5, readers=3)
    for number, path in enumerate((blocks.path, *(copy.path for copy in catalog.copies))):
        if number != good:
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.write(bytes(size)) if how == "changed" else file.truncate(0)
    if good is None:
        ids, x = torch.tensor([[3]], dtype=torch.int32), torch.ones(1, LAYOUT.latent)
        with pytest.raises(BlockError, match=rf"expert 3: {blocks.path}: .*; run thimble repack again$"):
            host.step(1, ids, torch.ones(1, 1), x)
    else:
        check_all(host, blocks)
    host.close()


@pytest.mark.parametrize("damaged", [(), (0,), (1,), (0, 1)], ids=["sound", "first", "second", "both"])
def test_a_block_comes_from_both_drives_at_once(damaged: tuple[int, ...]) -> None:
    """Half of its pieces from each; what one has damaged comes from the other."""
    blocks = SyntheticBlocks(BlockLayout(1024, 2688), 1, 2)
    memory, catalog = blocks.memory(1)
    catalog = replace(catalog, copies=(Copy(catalog.path, catalog.offsets),))
    held = [memory.copy(), memory.copy()]
    for drive in damaged:
        held[drive][::409600] ^= 1  # in every piece
    x, ids = blocks.inputs(1, seed=1), torch.tensor([[0]], dtype=torch.int32)

    def reads() -> list[int]:
        drives = [EmulatedDrive(each, gb_s=0.1) for each in held]
        host = Host(catalog, Workers(1), slots=2, readers=8, drives=drives)
        if len(damaged) == 2:
            with pytest.raises(BlockError, match="checksum does not match, twice"):
                host.step(0, ids, torch.ones(1, 1), x)
        else:
            host.step(0, ids, torch.ones(1, 1), x)
            said = "".join(host.notices())
            assert ("had to be read again" in said) == bool(damaged)
        host.check()
        host.close()
        return [drive.counts().reads for drive in drives]

    if damaged:
        reads()
    else:  # on a busy machine a drive is through with a piece before the last one is begun, and gets that one, too
        assert in_some_try(reads, lambda found: found == [4, 4]) == [4, 4]


def test_a_copy_that_is_not_there(blocks: BlocksOnDisk, tmp_path: Path) -> None:
    catalog = with_copy(blocks, tmp_path / "second")
    catalog.copies[0].path.unlink()
    with pytest.raises(HostError, match=r"second/experts\.bin: cannot be opened"):
        Host(catalog, Workers(1), slots=2, readers=1)
    with pytest.raises(ValueError, match="multiples of 4096"):
        replace(blocks.catalog(), copies=(Copy(tmp_path, catalog.offsets + 512),))


def seconds(drive: EmulatedDrive, catalog: Catalog, depth: int) -> float:
    """Of one read by each of `depth` threads at once."""
    begun = time.perf_counter()
    read_rate(catalog, [drive], depth, limit_ns=0)
    return time.perf_counter() - begun


def emulated(**model: float) -> tuple[EmulatedDrive, Catalog]:
    """Sixteen blocks that no checksum fits: the drive does not mind."""
    layout = BlockLayout(512, 704)
    assert layout.block_bytes == READ_BYTES
    offsets = np.arange(16, dtype=np.int64).reshape(1, 16) * READ_BYTES
    ones = np.ones((1, 16), np.float32)
    catalog = Catalog(Path("memory"), layout, offsets, np.zeros((1, 16), np.uint64), ones, ones)
    return EmulatedDrive(np.zeros(16 * READ_BYTES, np.uint8), **model), catalog  # type: ignore[arg-type]


def takes(measure: Callable[[], float], expected_s: float) -> bool:
    """Never less, for no sleep ends early; hardly more in some try, for on a busy machine some end late."""
    most_s = 1.9 * expected_s + 0.01
    return 0.98 * expected_s <= in_some_try(measure, lambda found_s: found_s <= most_s) <= most_s


@pytest.mark.parametrize("depth", [1, 4])
def test_the_emulated_rate(depth: int) -> None:
    """Slow enough that this machine's memory and scheduler do not show: a read at 0.02 GB/s takes 20 ms.
    Each wrong block is read twice."""
    drive, catalog = emulated(gb_s=0.02, lane_gb_s=1.0, latency_us=0)

    def busy_s() -> float:
        before = drive.counts()
        seconds(drive, catalog, depth)
        after = drive.counts()
        assert after.reads - before.reads == 2 * depth
        assert after.read_bytes - before.read_bytes == 2 * depth * READ_BYTES
        return after.busy_s - before.busy_s

    assert takes(lambda: seconds(drive, catalog, depth), 2 * depth * READ_S)
    assert takes(busy_s, 2 * depth * READ_S)


def test_a_single_read_does_not_get_the_whole_drive() -> None:
    drive, catalog = emulated(gb_s=0.08, lane_gb_s=0.02, latency_us=0)
    assert takes(lambda: seconds(drive, catalog, 1), 2 * READ_S)
    assert takes(lambda: seconds(drive, catalog, 4), 2 * READ_S), "four at once, each a quarter"


def test_latency_and_queue_depth() -> None:
    for depth, rounds in ((4, 2), (1, 8)):
        drive, catalog = emulated(gb_s=100.0, latency_us=20_000, depth=depth)
        assert takes(partial(seconds, drive, catalog, 4), rounds * 0.02), depth


def test_lateness_is_counted() -> None:
    drive, catalog = emulated(gb_s=10_000.0, latency_us=0)
    seconds(drive, catalog, 1)
    assert drive.counts().late_s > 0, "no memory is that fast"

    def late_s() -> float:
        """Of copies that take a hundredth of what the drive would: none, unless this machine had other work."""
        drive, catalog = emulated(gb_s=0.02, latency_us=0)
        seconds(drive, catalog, 1)
        return drive.counts().late_s

    assert in_some_try(late_s, lambda late: late == 0) == 0


def test_few_blocks_stand_for_a_large_model() -> None:
    """A catalog whose offsets repeat, over an emulated drive, against the same blocks written out in full."""
    synthetic = SyntheticBlocks(BlockLayout(64, 32), layers=3, experts=50)
    memory, catalog = synthetic.memory(physical=7)
    assert memory.size == 7 * synthetic.layout.block_bytes
    assert len(np.unique(catalog.offsets)) == 7
    host = Host(catalog, Workers(1), slots=20, readers=4, drives=[EmulatedDrive(memory, gb_s=5)])
    ids = torch.tensor([[0, 7, 49, 33]], dtype=torch.int32)
    x = synthetic.inputs(1, seed=1)
    first = host.step(1, ids, torch.ones(1, 4), x)
    alias = (50 + ids) % 7
    assert torch.equal(first, host.step(0, alias.to(torch.int32), torch.ones(1, 4), x))
    assert not torch.equal(first, host.step(2, ids, torch.ones(1, 4), x))
    assert host.counters()["misses"] == 4 + len(set(alias.flatten().tolist())) + 4, "each expert is read by itself"
    host.close()


def test_a_drive_that_ends_too_early(blocks: BlocksOnDisk) -> None:
    memory = np.fromfile(blocks.path, np.uint8)[: -blocks.layout.block_bytes]
    host = Host(blocks.catalog(), Workers(1), slots=4, readers=1, drives=[EmulatedDrive(memory, gb_s=5)])
    with pytest.raises(BlockError, match=r"expert 11: emulated drive: the block is not in"):
        host.step(1, torch.tensor([[11]], dtype=torch.int32), torch.ones(1, 1), torch.ones(1, LAYOUT.latent))
    host.close()


def test_demand_goes_before_prefetch(blocks: BlocksOnDisk) -> None:
    """Many guesses are queued on a slow drive; what a step needs waits for the reads under way at most."""
    memory = np.fromfile(blocks.path, np.uint8)
    ids, x = torch.tensor([[1, 2]], dtype=torch.int32), torch.ones(1, LAYOUT.latent)
    expected = blocks.expected(0, ids, torch.ones(1, 2), x)

    def guesses_meanwhile() -> int:
        """On a busy machine some before the step begins, and after it has ended, too."""
        drive = EmulatedDrive(memory, gb_s=1.0, latency_us=50_000, depth=2)
        host = Host(blocks.catalog(), Workers(1), slots=24, readers=3, drives=[drive])
        host.prefetch(1, list(range(12)))
        assert in_time(lambda: host.counters()["prefetch_issued"] >= 2)
        before = host.counters()["prefetch_issued"]
        out = host.step(0, ids, torch.ones(1, 2), x)
        found = host.counters()["prefetch_issued"] - before
        assert same(out, expected)
        assert in_time(lambda: host.counters()["prefetch_issued"] == 12)
        host.close()
        return found

    assert in_some_try(guesses_meanwhile, lambda found: found <= 4) <= 4, "guesses were read while a step waited"


def test_reads_in_flight_are_as_few_as_are_enough() -> None:
    assert choose_depth({1: 1.0, 2: 1.9, 4: 2.0, 8: 2.0, 16: 2.0}.__getitem__)[0] == 2
    assert choose_depth({1: 1.0, 2: 1.9, 4: 3.0, 8: 6.0, 16: 9.0}.__getitem__)[0] == 16
    depth, rates = choose_depth({1: 5.0, 2: 4.0, 4: 4.0}.__getitem__)
    assert (depth, set(rates)) == (1, {1, 2, 4}), "a disk that wants one read at a time is not tried with many"


def test_the_depth_of_an_emulated_drive_is_found() -> None:
    """Four reads in flight are what it can do; on a busy machine more may look better, fewer hardly do."""
    drive, catalog = emulated(gb_s=0.04, lane_gb_s=0.011, latency_us=100)
    depth, rates = in_some_try(
        lambda: choose_depth(lambda depth: read_rate(catalog, [drive], depth, limit_ns=100_000_000)),
        lambda found: found[0] >= 4 and found[1][1] < found[1][2] < found[1][4],
    )
    assert depth >= 4
    assert rates[1] < rates[2] < rates[4]


def test_rate_of_a_file(blocks: BlocksOnDisk) -> None:
    rate = read_rate(blocks.catalog(), open_drives(blocks.catalog()), 2, limit_ns=10_000_000)
    assert 0 < rate < 100
    with pytest.raises(RuntimeError, match="cannot be opened"):
        FileDrive(Path("/nonexistent"))


def test_the_host_library_knows_no_device() -> None:
    """Nothing under host/ includes or imports what is under device/; the other way is how it is meant."""
    kernels = Path(__file__).parents[2] / "kernels/experts"

    def users(folder: str, used: str) -> list[str]:
        files = [path for path in (kernels / folder).iterdir() if path.suffix in (".h", ".cpp", ".py")]
        return [path.name for path in files if re.search(rf"experts[/.]{used}[/.]", path.read_text())]

    assert users("host", "device") == []
    assert "ring.h" in users("device", "host")
