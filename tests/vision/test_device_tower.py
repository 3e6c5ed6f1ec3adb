"""The tower as a card runs it, near the plain one, the same bits whatever the ring and the memory are like: once by its
kernels in Triton's interpreter, else by their definitions. On a card (`-m gpu`): within the memory that was planned."""

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import plain_kernels
import pytest
import torch
from hf_tower import CONFIG, random_tensors, write
from torch import Tensor

from services.engine.errors import CheckpointError, DeviceError, StepError
from services.engine.gpu.ledger import MIB
from services.engine.vision import device, ring
from services.engine.vision.config import VisionConfig
from services.engine.vision.device import DeviceTower, card_bytes, working_bytes
from services.engine.vision.embedding import embed, run
from services.engine.vision.looks import Looks, Work
from services.engine.vision.pieces import Pieces
from services.engine.vision.weights import VisionWeights
from services.tools import synthetic_vision

CPU = torch.device("cpu")
GRIDS = [(16, 16), (4, 38), (38, 4), (4, 4), (32, 32), (2, 512), (512, 2), (22, 16)]
NEAR = 0.03  # of the largest value, BF16


@pytest.fixture(autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.node.name.startswith(("test_on_a_card", "test_by_its_kernels")):
        plain_kernels.use(monkeypatch)


def stored(folder: Path, tensors: dict[str, Tensor], config: VisionConfig = CONFIG) -> VisionWeights:
    folder.mkdir(exist_ok=True)
    return VisionWeights(write(folder, tensors), config)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> VisionWeights:
    return stored(tmp_path_factory.mktemp("vision"), random_tensors())


@contextmanager
def opened(
    weights: VisionWeights,
    on: torch.device = CPU,
    resident: bool = False,
    slots: int = 2,
    memory: Tensor | None = None,
) -> Iterator[DeviceTower]:
    tower = DeviceTower(weights, on, resident=resident, slots=slots, memory=memory)
    try:
        yield tower
    finally:
        tower.close()


def patches(grid: tuple[int, int], seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(grid[0] * grid[1], 3 * CONFIG.patch**2, generator=random)


def error(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    assert found.dtype == torch.float32
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rows_are_those_of_the_plain_path(
    grid: tuple[int, int], weights: VisionWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory that others left full of NaN."""
    wanted = run(embed(weights, patches(grid), grid))
    memory = torch.full((card_bytes(weights),), 0xFF, dtype=torch.uint8)
    with opened(weights, memory=memory) as tower:
        found = run(tower.embed(patches(grid), grid))
    print(f"{grid}: largest error {error(found, wanted):.1e} of the largest value")
    assert 1e-4 < error(found, wanted) < NEAR
    if len(found) > 1:
        assert error(found.roll(1, 0), wanted) > 0.1


def test_by_its_kernels_rows_are_near(tmp_path: Path) -> None:
    config, grid = replace(CONFIG, blocks=1, prefix=2), (2, 4)
    small = stored(tmp_path, random_tensors(config), config)
    wanted, on = run(embed(small, patches(grid), grid)), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    memory = torch.full((card_bytes(small),), 0xFF, dtype=torch.uint8, device=on)
    with opened(small, on, memory=memory) as tower:
        found = run(tower.embed(patches(grid), grid))
    assert 1e-4 < error(found, wanted) < NEAR
    assert error(found.roll(1, 0), wanted) > 0.1


def test_bits_do_not_depend_on_the_runs_of_rows(weights: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that divide nothing evenly; another picture in between, and other users of the memory."""
    grid, lengths = (22, 16), set()
    with opened(weights) as tower:
        wanted = run(tower.embed(patches(grid), grid))

    def runs(rows: int, most: int) -> Iterator[tuple[int, int]]:
        lengths.add(rows)
        for first in range(0, rows, min(most, 100)):
            yield first, min(first + min(most, 100), rows)

    monkeypatch.setattr(device, "_runs", runs)
    with opened(weights) as tower:
        for seed in (2, 1):
            tower.memory.fill_(0xFF)
            tower.ring.slots.fill_(0xFF)
            found = run(tower.embed(patches(grid, seed), grid))
            assert torch.equal(found, wanted) == (seed == 1), "another picture must show"
    assert lengths == {22 * 16 + CONFIG.prefix}


def test_runs_are_all_rows_once() -> None:
    for rows, most in ((13322, 2048), (4210, 11000), (129, 128), (90, 100), (1, 1), (300, 100)):
        made = list(device._runs(rows, most))
        assert [first for first, _ in made] == [0, *(stop for _, stop in made[:-1])]
        assert made[-1][1] == rows
        assert max(stop - first for first, stop in made) <= most
        assert len(made) == -(-rows // most) or most < 128


@pytest.mark.parametrize(("resident", "slots"), [(False, 2), (False, 3), (True, 2), (True, 5)])
def test_the_way_of_the_weights_changes_no_bit(resident: bool, slots: int, weights: VisionWeights) -> None:
    grid = (22, 16)
    with opened(weights) as tower:
        wanted = run(tower.embed(patches(grid), grid))
    with opened(weights, resident=resident, slots=slots) as tower:
        for seed in (2, 1):
            found = run(tower.embed(patches(grid, seed), grid))
        assert torch.equal(found, wanted)


def test_a_layer_scale_counts(weights: VisionWeights, tmp_path: Path) -> None:
    scales = {f"blocks.1.layer_scale{i}": torch.linspace(0.2, 0.9, CONFIG.width) for i in (1, 2)}
    scaled, grid = stored(tmp_path, random_tensors() | scales), (4, 4)
    wanted = run(embed(scaled, patches(grid), grid))
    with opened(scaled) as tower:
        assert error(run(tower.embed(patches(grid), grid)), wanted) < NEAR
    assert error(wanted, run(embed(weights, patches(grid), grid))) > 0.05


def test_pieces_are_the_whole_file_once(weights: VisionWeights) -> None:
    """But for a line of the position table that two pieces share, and for what only pads."""
    pieces = Pieces.of(weights)
    found = sorted((part.offset, part.size_bytes) for piece in pieces.order for part in piece.parts)
    size_bytes = sum(entry.size_bytes for entry in weights.entries.values())
    line_bytes = CONFIG.table * CONFIG.width * 4
    assert sum(size for _, size in found) == size_bytes + (len(pieces.positions) - 1) * line_bytes
    halves = [half.size_bytes for block in pieces.blocks for half in block]
    assert max(halves) <= pieces.most_bytes <= max(halves) + 3 * 4 * 4 * CONFIG.width, "norms ride with the first rows"


def test_a_table_in_many_pieces(weights: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two lines each: every patch finds both of its neighbours."""
    whole = Pieces.of(weights)

    def cut(count: int, most: int) -> list[tuple[int, int]]:
        step = 2 if count == CONFIG.table else 7
        return [(first, min(first + step, count)) for first in range(0, count, step)]

    monkeypatch.setattr("services.engine.vision.pieces._cut", cut)
    assert len(Pieces.of(weights).order) > 2 * len(whole.order)
    for grid in ((16, 16), (4, 38), (38, 4)):
        with opened(weights) as tower:
            found = run(tower.embed(patches(grid), grid))
        assert error(found, run(embed(weights, patches(grid), grid))) < NEAR


def test_a_block_is_between_two_yields(weights: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever answers gets the word after every block, and weights are read only a few pieces ahead."""
    read: list[str] = []
    plain = ring.Ring._read

    def watched(self: ring.Ring, buffer: int, part: object, done: int, size_bytes: int) -> None:
        read.append(part.name)  # type: ignore[attr-defined]
        plain(self, buffer, part, done, size_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(ring.Ring, "_read", watched)
    with opened(weights) as tower:
        work = tower.embed(patches((4, 4)), (4, 4))
        assert read == [], "nothing before it is its turn"
        steps, blocks = 0, []
        for _ in work:
            steps += 1
            blocks.append(sum(name == "fc1.weight" for name in read))
    assert blocks[0] < CONFIG.blocks
    assert steps >= 1 + CONFIG.blocks + 1
    assert sum(name == "fc1.weight" for name in read) == CONFIG.blocks


def test_weights_in_ram_are_read_once(weights: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    plain = ring.Ring._read

    def watched(self: ring.Ring, buffer: int, part: object, done: int, size_bytes: int) -> None:
        counts.append(size_bytes)
        plain(self, buffer, part, done, size_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(ring.Ring, "_read", watched)
    for resident, times in ((True, 1), (False, 2)):
        counts.clear()
        with opened(weights, resident=resident) as tower:
            for _ in range(2):
                run(tower.embed(patches((4, 4)), (4, 4)))
            parts = sum(part.size_bytes for piece in tower.ring.order for part in piece.parts)
        assert sum(counts) == times * parts


def test_an_abandoned_picture_leaves_the_next_one_alone(weights: VisionWeights) -> None:
    grid = (16, 16)
    with opened(weights) as tower:
        wanted = run(tower.embed(patches(grid), grid))
        for steps in range(6):
            work = tower.embed(patches((32, 32), seed=3), (32, 32))
            for _ in range(steps):
                next(work)
            work.close()
            assert torch.equal(run(tower.embed(patches(grid), grid)), wanted), steps


@pytest.mark.parametrize("resident", [False, True])
def test_a_file_that_ends_early_fails_the_picture_only(resident: bool, tmp_path: Path) -> None:
    weights, grid = stored(tmp_path, random_tensors()), (4, 4)
    path = tmp_path / "vision.safetensors"
    whole = path.read_bytes()
    with opened(weights, resident=resident) as tower:
        with path.open("r+b") as file:
            file.truncate(len(whole) // 2)
        with pytest.raises(CheckpointError, match=r"end inside .*: run thimble repack again"):
            run(tower.embed(patches(grid), grid))
        with path.open("r+b") as file:
            file.write(whole)
        assert error(run(tower.embed(patches(grid), grid)), run(embed(weights, patches(grid), grid))) < NEAR
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vision")]


def test_a_picture_longer_than_planned_is_read_by_the_processor(tmp_path: Path) -> None:
    small = stored(tmp_path, random_tensors(), replace(CONFIG, most_patches=64))
    grid = (2, 40)
    with opened(small) as tower:
        assert torch.equal(run(tower.embed(patches(grid), grid)), run(embed(small, patches(grid), grid)))


def test_the_real_shape_takes_what_is_said(tmp_path: Path) -> None:
    """Counted without the weights: a file of holes."""
    weights = synthetic_vision.holes(tmp_path / "vision.safetensors")
    pieces = Pieces.of(weights)
    assert pieces.most_bytes / 2**20 == pytest.approx(25.02, abs=0.1), "half a block"
    assert pieces.size_bytes / 1e9 == pytest.approx(1.681, abs=0.01)
    assert working_bytes(weights.config) / 2**20 == pytest.approx(168, abs=2)
    assert card_bytes(weights) / 2**20 == pytest.approx(218, abs=3)
    assert len(pieces.order) == 2 + 64 + 8 + 7


def test_a_card_that_fails_ends_the_engine_and_a_damaged_picture_does_not() -> None:
    def failing(error: Exception) -> Callable[[], Generator[None, None, Tensor]]:
        def work() -> Generator[None, None, Tensor]:
            yield
            raise error

        return work

    looks = Looks()
    done = looks.add(failing(ValueError("odd"))())
    looks.advance()
    looks.advance()
    assert isinstance(done.exception(0), StepError)
    lost, left = looks.add(failing(DeviceError("the GPU has failed"))()), looks.add(failing(ValueError())())
    looks.advance()
    with pytest.raises(DeviceError):
        looks.advance()
    assert isinstance(lost.exception(0), DeviceError)
    assert looks.pending
    looks.end(StepError("over"))
    assert isinstance(left.exception(0), StepError)


gpu = pytest.mark.gpu
needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@gpu
@needs_card
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_on_a_card_rows_are_near(grid: tuple[int, int], tmp_path: Path) -> None:
    """The same weights, exact in BF16, on both sides."""
    made = synthetic_vision.write(tmp_path / "vision.safetensors", CONFIG)
    with opened(made, torch.device("cuda")) as tower:
        found = run(tower.embed(patches(grid), grid))
    wanted = run(embed(made, patches(grid), grid))
    print(f"{grid}: largest error {error(found, wanted):.1e} of the largest value")
    assert error(found, wanted) < NEAR
    assert error(found.roll(1, 0), wanted) > 0.1


def beside(work: Work, products: int) -> Work:
    """With so much of other work on the card between two of its pieces."""
    other = torch.randn(2048, 2048, device="cuda")
    while True:
        try:
            next(work)
        except StopIteration as done:
            found: Tensor = done.value
            return found
        for _ in range(products):
            other = (other @ other).tanh_()
        yield


@gpu
@needs_card
@pytest.mark.parametrize(("resident", "slots"), [(False, 2), (False, 3), (True, 2)])
def test_on_a_card_the_same_picture_is_the_same_bits(resident: bool, slots: int, tmp_path: Path) -> None:
    """Whatever ran before it or runs between its blocks; a slot that is overwritten too early would show."""
    made = synthetic_vision.write(tmp_path / "vision.safetensors", replace(CONFIG, blocks=12))
    grid, card = (32, 32), torch.device("cuda")
    with opened(made, card) as tower:
        wanted = run(tower.embed(patches(grid), grid))
    with opened(made, card, resident, slots) as tower:
        for number in range(6):
            left = tower.embed(patches((22, 16), seed=number), (22, 16))
            for _ in range(number):
                next(left)
            left.close()
            found = run(beside(tower.embed(patches(grid), grid), number % 2 * 3))
            assert torch.equal(found, wanted), number


@gpu
@needs_card
def test_on_a_card_the_real_shape_takes_what_was_planned(tmp_path: Path) -> None:
    made = synthetic_vision.holes(tmp_path / "vision.safetensors")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with opened(made, torch.device("cuda")) as tower:
        grid = (128, 104)
        rows = run(tower.embed(torch.randn(grid[0] * grid[1], 768), grid))
        assert rows.shape == (3328, 4096)
        assert torch.isfinite(rows).all()
        wide = (2, 1026)
        assert len(run(tower.embed(torch.randn(wide[0] * wide[1], 768), wide))) == 513
        taken = torch.cuda.max_memory_allocated() - before
    print(f"{taken / MIB:.0f} MiB taken, {card_bytes(made) / MIB:.0f} planned beside kernels")
    assert card_bytes(made) <= taken < card_bytes(made) + 4 * MIB
