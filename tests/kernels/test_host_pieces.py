"""Blocks read in pieces: the same bits, several at once, demanded ones first."""

import time
from functools import partial
from pathlib import Path

import pytest
import torch
from expert_store import LAYOUT, batch, same, write_blocks
from timing import in_some_try, in_time

from kernels.block import PAGE, BlockLayout
from kernels.experts.host.binding import PIECE_BYTES, Catalog, Host, read_rate
from kernels.experts.host.drives import EmulatedDrive
from kernels.workers.pool import Workers
from services.tools.synthetic_blocks import SyntheticBlocks

WHOLE = 1 << 30
LARGE = BlockLayout(512, 704)


@pytest.mark.parametrize("readers", [1, 2, 5])
@pytest.mark.parametrize("piece_bytes", [1, PAGE, 2 * PAGE, LAYOUT.block_bytes - 1])
def test_the_size_of_pieces_changes_no_bit(tmp_path: Path, piece_bytes: int, readers: int) -> None:
    assert LAYOUT.block_bytes >= 4 * PAGE
    blocks = write_blocks(tmp_path, 2, 12)
    host = Host(blocks.catalog(), Workers(2), slots=5, readers=readers, poison=True, piece_bytes=piece_bytes)
    for number in range(6):
        host.prefetch(number % 2, [1, 5, 7, 11])
        arguments = batch(blocks, 3, 4, seed=number)
        assert same(host.step(number % 2, *arguments), blocks.expected(number % 2, *arguments))
    host.check()
    host.close()


def drive_and_blocks(gb_s: float, lane_gb_s: float) -> tuple[EmulatedDrive, Catalog, SyntheticBlocks]:
    blocks = SyntheticBlocks(LARGE, 1, 8)
    memory, catalog = blocks.memory(8)
    return EmulatedDrive(memory, gb_s=gb_s, lane_gb_s=lane_gb_s, latency_us=0), catalog, blocks


def step(host: Host, blocks: SyntheticBlocks, expert: int) -> float:
    begun = time.perf_counter()
    host.step(0, torch.tensor([[expert]], dtype=torch.int32), torch.ones(1, 1), blocks.inputs(1, seed=1))
    return time.perf_counter() - begun


def test_one_block_gets_the_whole_drive() -> None:
    """A read of its own gets a quarter of this one; in pieces a block is there four times as early."""

    def seconds(piece_bytes: int) -> float:
        drive, catalog, blocks = drive_and_blocks(gb_s=0.016, lane_gb_s=0.004)
        host = Host(catalog, Workers(1), slots=2, readers=4, piece_bytes=piece_bytes, drives=[drive])
        found = step(host, blocks, 3)
        assert drive.counts().reads == (1 if piece_bytes == WHOLE else 4)
        host.close()
        return found

    whole_s = LARGE.block_bytes / 0.004e9
    assert seconds(WHOLE) >= 0.98 * whole_s
    assert in_some_try(lambda: seconds(LARGE.block_bytes // 4), lambda one: one < 0.6 * whole_s) < 0.6 * whole_s


def test_the_rate_is_of_whole_blocks() -> None:
    drive, catalog, _ = drive_and_blocks(gb_s=0.05, lane_gb_s=0.05)
    for depth in (1, 3):
        rate = partial(read_rate, catalog, [drive], depth, limit_ns=100_000_000)
        assert 0.02 < in_some_try(rate, lambda one: one > 0.02) <= 0.051
    drive, catalog, _ = drive_and_blocks(gb_s=0.1, lane_gb_s=0.01)
    assert read_rate(catalog, [drive], 1, limit_ns=1) < 0.011


def test_what_was_begun_ahead_waits_for_what_is_demanded() -> None:
    """One reader, a hint of some blocks, each of many pieces: a step's block waits for a piece, not for a block."""

    def read_meanwhile() -> int:
        """Bytes, until the step had what it needs; on a busy machine the hinted blocks' own before it began, too."""
        drive, catalog, blocks = drive_and_blocks(gb_s=0.004, lane_gb_s=0.004)
        host = Host(catalog, Workers(1), slots=8, readers=1, prefetch="on", piece_bytes=PAGE, drives=[drive])
        host.prefetch(0, [0, 1])
        assert in_time(lambda: drive.counts().reads >= 2)
        before = drive.counts().read_bytes
        step(host, blocks, 5)
        found, counters = drive.counts().read_bytes - before, host.counters()
        assert counters["demand_read_bytes"] == LARGE.block_bytes
        host.close()
        return found + counters["prefetch_read_bytes"]  # these are counted when a block is whole

    most = 1.5 * LARGE.block_bytes  # neither of the hinted blocks is whole
    assert in_some_try(read_meanwhile, lambda found: found < most) < most


def test_a_hinted_block_that_is_demanded_is_hurried() -> None:
    """It lies behind another one that was hinted before it."""

    def asked_for() -> dict[str, int]:
        drive, catalog, blocks = drive_and_blocks(gb_s=0.02, lane_gb_s=0.02)
        host = Host(
            catalog, Workers(1), slots=8, readers=2, prefetch="on", piece_bytes=LARGE.block_bytes // 8, drives=[drive]
        )
        for _ in range(2):
            host.prefetch(0, [0, 1, 2, 3])
            assert in_time(lambda: host.counters()["prefetch_issued"] >= 1)
            step(host, blocks, 0)
        host.check()
        counters = host.counters()
        host.close()
        assert counters["prefetch_useful"] >= 1
        assert counters["hits"] + counters["misses"] == 2
        return counters

    # On a busy machine it may be whole before it is demanded.
    assert in_some_try(asked_for, lambda counters: counters["misses"] == 1)["misses"] == 1


def test_pieces_are_what_blocks_are_read_in() -> None:
    blocks = SyntheticBlocks(LARGE, 1, 2)
    memory, catalog = blocks.memory(2)
    for piece_bytes, pieces in ((LARGE.block_bytes // 3, 3), (PIECE_BYTES, 1), (PAGE, LARGE.block_bytes // PAGE)):
        drive = EmulatedDrive(memory, gb_s=10)
        host = Host(catalog, Workers(1), slots=2, readers=3, piece_bytes=piece_bytes, drives=[drive])
        step(host, blocks, 1)
        host.close()
        assert drive.counts().reads == pieces
        assert drive.counts().read_bytes == LARGE.block_bytes
