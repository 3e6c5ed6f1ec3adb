"""What can go wrong between the host and the disk or the system: a named error, and the next step works again."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from expert_store import LAYOUT, BlocksOnDisk, batch, same, write_blocks

from kernels.block import PAGE
from kernels.experts.host.binding import PIECE_BYTES, BlockError, Catalog, Host, HostError
from kernels.experts.host.drives import EmulatedDrive
from kernels.workers.pool import Workers

EXPERTS, TOP_K = 8, 3


@pytest.fixture
def blocks(tmp_path: Path) -> BlocksOnDisk:
    return write_blocks(tmp_path, 1, EXPERTS)


@pytest.fixture(params=[PIECE_BYTES, PAGE], ids=["in one go", "in pieces"])
def host(blocks: BlocksOnDisk, request: pytest.FixtureRequest) -> Iterator[Host]:
    workers = Workers(2)
    host = Host(blocks.catalog(), workers, slots=4, readers=2, poison=True, piece_bytes=request.param)
    yield host
    host.check()
    host.close()
    workers.close()


def ask(host: Host, *ids: int) -> torch.Tensor:
    some = torch.tensor([ids], dtype=torch.int32)
    return host.step(0, some, torch.ones(some.shape), torch.ones(1, LAYOUT.latent))


def expected(blocks: BlocksOnDisk, *ids: int) -> torch.Tensor:
    some = torch.tensor([ids], dtype=torch.int32)
    return blocks.expected(0, some, torch.ones(some.shape), torch.ones(1, LAYOUT.latent))


@pytest.mark.parametrize("keep", [LAYOUT.block_bytes // 2, 1000, 0], ids=["half a block", "inside a page", "nothing"])
def test_a_file_truncated_while_running(blocks: BlocksOnDisk, host: Host, keep: int) -> None:
    """Blocks that are in RAM go on, the missing one is named, and a repaired file is good again."""
    assert same(ask(host, 0, 1), expected(blocks, 0, 1))
    whole = blocks.path.read_bytes()
    os.truncate(blocks.path, blocks.offset(0, 5) + keep)
    with pytest.raises(BlockError, match=r"MoE layer 0, expert 5: .*truncated.*repack"):
        ask(host, 0, 5, 1)
    assert same(ask(host, 0, 1), expected(blocks, 0, 1))
    assert same(ask(host, 4, 2), expected(blocks, 4, 2))
    with pytest.raises(BlockError, match=r"expert [67]"):
        ask(host, 6, 7)
    blocks.path.write_bytes(whole)
    assert same(ask(host, 5, 6, 7), expected(blocks, 5, 6, 7))


@pytest.mark.parametrize("region", ["up_values", "up_scales", "down_values", "down_scales", "padding"])
def test_a_changed_byte_is_found(blocks: BlocksOnDisk, host: Host, region: str) -> None:
    at = LAYOUT.block_bytes - 1 if region == "padding" else getattr(LAYOUT, region) + 3
    data = bytearray(blocks.path.read_bytes())
    data[blocks.offset(0, 2) + at] ^= 16
    blocks.path.write_bytes(data)
    with pytest.raises(BlockError, match=r"MoE layer 0, expert 2: .*checksum does not match, twice"):
        ask(host, 2, 3)
    assert same(ask(host, 3, 4), expected(blocks, 3, 4))


@pytest.mark.parametrize("damage", ["a page of nothing", "a page of another block", "swapped experts"])
def test_more_than_a_byte_is_found_too(blocks: BlocksOnDisk, host: Host, damage: str) -> None:
    data = bytearray(blocks.path.read_bytes())
    one, other = blocks.offset(0, 2), blocks.offset(0, 3)
    size = LAYOUT.block_bytes if damage == "swapped experts" else 4096
    assert LAYOUT.block_bytes % 4096 == 0
    saved = data[one : one + size]
    data[one : one + size] = bytes(size) if damage == "a page of nothing" else data[other : other + size]
    if damage == "swapped experts":
        data[other : other + size] = saved
    blocks.path.write_bytes(data)
    with pytest.raises(BlockError, match=r"MoE layer 0, expert 2: .*checksum does not match, twice"):
        ask(host, 2)
    if damage == "swapped experts":
        with pytest.raises(BlockError, match="expert 3"):
            ask(host, 3)
    assert same(ask(host, 4, 5), expected(blocks, 4, 5))


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(PIECE_BYTES, 1), (PAGE, LAYOUT.block_bytes // PAGE)])
def test_a_bad_block_is_read_once_more(blocks: BlocksOnDisk, piece_bytes: int, pieces: int) -> None:
    """In one go. The drive counts for itself: of this process' reads others' work may be some."""
    memory = np.fromfile(blocks.path, np.uint8)
    memory[blocks.offset(0, 2)] ^= 1
    drive = EmulatedDrive(memory, gb_s=10)
    host = Host(blocks.catalog(), Workers(2), slots=4, readers=2, piece_bytes=piece_bytes, drives=[drive])
    assert same(ask(host, 1), expected(blocks, 1))
    assert drive.counts().reads == pieces
    with pytest.raises(BlockError, match="checksum does not match, twice"):
        ask(host, 2)
    assert drive.counts().reads == 2 * pieces + 1
    host.close()


def test_a_failed_batch_leaves_the_others_sound(blocks: BlocksOnDisk, host: Host) -> None:
    """Several blocks of one wide step fail while its other jobs wait for room; nothing stays behind."""
    data = bytearray(blocks.path.read_bytes())
    for id in (1, 4, 6):
        data[blocks.offset(0, id)] ^= 1
    blocks.path.write_bytes(data)
    ids, weights, x = batch(blocks, 30, EXPERTS, seed=1)
    for _ in range(3):
        with pytest.raises(BlockError, match=r"expert [146]"):
            host.step(0, ids, weights, x)
        host.check()
        good = torch.where((ids == 1) | (ids == 4) | (ids == 6), 0, ids)
        assert same(host.step(0, good, weights, x), blocks.expected(0, good, weights, x))


def test_a_failed_prefetch_is_not_an_error(blocks: BlocksOnDisk, host: Host) -> None:
    data = bytearray(blocks.path.read_bytes())
    data[blocks.offset(0, 2)] ^= 1
    blocks.path.write_bytes(data)
    host.prefetch(0, [2, 3])
    while host.counters()["prefetch_issued"] < 2 or host.counters()["slots_used"] < 1:
        pass
    assert same(ask(host, 3), expected(blocks, 3))
    with pytest.raises(BlockError, match="expert 2"):
        ask(host, 2)


@pytest.mark.parametrize("code", [0x7F, 0x80, 0xFF])
def test_scales_that_are_negative_or_nan_are_refused(tmp_path: Path, code: int) -> None:
    """A file whose checksums are right and whose bytes are not: made by something else than repack."""
    blocks = write_blocks(tmp_path, 1, 2)
    data = np.fromfile(blocks.path, np.uint8)
    data[LAYOUT.block_bytes + LAYOUT.down_scales + 5] = code
    data.tofile(blocks.path)
    catalog = blocks.catalog()
    catalog.checksums[0, 1] = xxhash.xxh64_intdigest(data[LAYOUT.block_bytes :].tobytes())
    for piece_bytes in (PIECE_BYTES, PAGE):
        host = Host(catalog, Workers(1), slots=2, readers=1, piece_bytes=piece_bytes)
        with pytest.raises(BlockError, match=r"expert 1: .*negative or NaN"):
            ask(host, 1)
        assert same(ask(host, 0), expected(blocks, 0))
        host.close()


def test_an_io_error_and_a_filesystem_without_direct_reads(blocks: BlocksOnDisk) -> None:
    """/proc/self/mem has no O_DIRECT, and reading its first page is a real EIO."""
    catalog = Catalog(Path("/proc/self/mem"), *list(vars(blocks.catalog()).values())[1:])
    host = Host(catalog, Workers(1), slots=2, readers=1)
    (notice,) = host.notices()
    assert "page cache" in notice
    with pytest.raises(BlockError, match="expert 0: /proc/self/mem: cannot be read: Input/output error"):
        ask(host, 0)
    assert host.notices() == [], "a notice is given once"
    host.close()


def test_what_cannot_be_opened(blocks: BlocksOnDisk, tmp_path: Path) -> None:
    good, workers = blocks.catalog(), Workers(1)
    rest = list(vars(good).values())[1:]
    with pytest.raises(HostError, match=r"nothing\.bin: cannot be opened: No such file"):
        Host(Catalog(tmp_path / "nothing.bin", *rest), workers, slots=1, readers=1)
    with pytest.raises(HostError, match="at least one"):
        Host(good, workers, slots=0, readers=1)
    with pytest.raises(HostError, match='no cache policy "magic"'):
        Host(good, workers, slots=1, readers=1, policy="magic")
    host = Host(Catalog(tmp_path, *rest), workers, slots=1, readers=1)  # a folder opens, and refuses to be read
    with pytest.raises(BlockError, match="Is a directory"):
        ask(host, 0)
    host.close()


@pytest.mark.parametrize(
    "wrong",
    [{"up_scales": np.zeros((1, EXPERTS), np.float32)}, {"offsets": np.full((1, EXPERTS), 512, np.int64)}],
    ids=["zero scales", "offsets inside pages"],
)
def test_a_catalog_that_makes_no_sense(blocks: BlocksOnDisk, wrong: dict[str, np.ndarray]) -> None:
    with pytest.raises(ValueError, match=r"scale 0\.0|multiples of 4096"):
        Catalog(**(vars(blocks.catalog()) | wrong))


LIMITED = """
import os, resource, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from services import garbage
with garbage.not_looked_for():
    import torch
    from expert_store import *
from kernels.experts.host.binding import Host, HostError
from kernels.workers.pool import Workers
blocks, workers = write_blocks(Path(sys.argv[2]), 1, 8), Workers(1)
args = batch(blocks, 2, 3, 1)
wanted = blocks.expected(0, *args)
"""
NO_LOCK = """
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
os.geteuid() or os.seteuid(65534)  # the limit does not bind root
host = Host(blocks.catalog(), workers, slots=4, readers=1, lock_memory=True)
print(host.notices())
assert same(host.step(0, *args), wanted)
"""
NO_MEMORY = """
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 40_000, used + 40_000))
try:
    Host(blocks.catalog(), workers, slots=8, readers=1)
except HostError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("limit", "message"),
    [(NO_LOCK, "will not lock 0 MB of expert blocks in RAM"), (NO_MEMORY, "the system refused the memory")],
    ids=["no page lock", "no memory"],
)
def test_a_system_that_refuses(limit: str, message: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        command = [sys.executable, "-c", LIMITED + limit, str(Path(__file__).parent), folder]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert message in run.stdout
