"""Tower and projector against transformers' own, in float32 on a CPU; what is easily forgotten has a control."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hf_tower import CONFIG, Theirs, random_tensors, write
from torch import Tensor

from services.engine.errors import StoreError
from services.engine.vision import tower
from services.engine.vision.embedding import embed, run
from services.engine.vision.weights import VisionWeights

GRIDS = {"square": (16, 16), "wide": (4, 38), "tall": (38, 4), "least": (4, 4), "most": (32, 32), "a4": (22, 16)}
WORST = 1e-5  # of the largest value


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_tensors()


@pytest.fixture(scope="module")
def theirs(tensors: dict[str, Tensor]) -> Theirs:
    return Theirs(tensors)


@pytest.fixture
def ours(tensors: dict[str, Tensor], tmp_path: Path) -> VisionWeights:
    return VisionWeights(write(tmp_path, tensors), CONFIG)


def _patches(grid: tuple[int, int], seed: int = 1) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(grid[0] * grid[1], 3 * CONFIG.patch**2, generator=random)


def _error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize("name", GRIDS)
def test_embeddings_are_transformers(name: str, ours: VisionWeights, theirs: Theirs) -> None:
    grid = GRIDS[name]
    error = _error(run(embed(ours, _patches(grid), grid)), theirs.embeddings(_patches(grid), grid))
    print(f"{name} {grid}: largest error {error:.1e} of the largest value")
    assert error < WORST


def test_without_the_final_norm_the_features_differ(ours: VisionWeights, theirs: Theirs) -> None:
    grid = GRIDS["a4"]
    bare = theirs.embeddings(_patches(grid), grid, final_norm=False)
    assert _error(run(embed(ours, _patches(grid), grid)), bare) > 0.05


def test_a_picture_turned_on_its_side_is_another_one(ours: VisionWeights, theirs: Theirs) -> None:
    """Positions: the same patches in another grid must not give the same rows."""
    patches = _patches((4, 38))
    wide, tall = (run(embed(ours, patches, grid)) for grid in ((4, 38), (38, 4)))
    assert _error(wide, tall) > 0.05


def test_a_missing_block_is_seen(ours: VisionWeights, theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = ours.blocks
    monkeypatch.setattr(ours, "blocks", lambda: list(blocks())[:-1])
    grid = GRIDS["least"]
    assert _error(run(embed(ours, _patches(grid), grid)), theirs.embeddings(_patches(grid), grid)) > 0.01


@pytest.mark.parametrize("grid", [(16, 16), (8, 8), (5, 3), (40, 40), (2, 80)])
def test_positions_are_the_cut_corner_of_the_resized_table(grid: tuple[int, int], theirs: Theirs) -> None:
    table = random_tensors()["position"].view(16, 16, -1)
    wanted = theirs.tower.embeddings._interpolate_position_embedding(grid, torch.float32)[0]
    assert torch.allclose(tower.position_window(table, grid), wanted, atol=1e-5)
    squeezed = torch.nn.functional.interpolate(
        table.permute(2, 0, 1)[None], size=grid, mode="bilinear", align_corners=False
    )[0]
    same = torch.allclose(squeezed.flatten(1).T, wanted, atol=1e-3)
    assert same == (grid[0] == grid[1]), "the control: squeezing is only right for a square"


def test_positions_of_a_long_line_take_no_square() -> None:
    """6250 patches in a line: the square that others build would be 200 GB at full width."""
    window = tower.position_window(torch.randn(16, 16, 8), (2, 6250))
    assert window.shape == (12500, 8)
    assert torch.isfinite(window).all()


def test_one_block_is_held_at_a_time(ours: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is asked for only when it is needed, so that a ring of two slots is enough."""
    read = ours.blocks
    events: list[str] = []

    def watched() -> Iterator[tower.Block]:
        for index, block in enumerate(read()):
            events.append(f"read {index}")
            yield block

    monkeypatch.setattr(ours, "blocks", watched)
    work = embed(ours, _patches((4, 4)), (4, 4))
    for step in range(4):
        next(work)
        events.append(f"step {step}")
    assert events == ["step 0", "read 0", "step 1", "read 1", "step 2", "read 2", "step 3"]


def test_a_layer_scale_counts(tensors: dict[str, Tensor], ours: VisionWeights, tmp_path: Path) -> None:
    grid = (4, 4)
    results = {}
    for value in (1.0, 0.5):
        scales = {f"blocks.{b}.layer_scale{i}": torch.full((CONFIG.width,), value) for b in range(3) for i in (1, 2)}
        folder = tmp_path / str(value)
        folder.mkdir()
        results[value] = run(embed(VisionWeights(write(folder, tensors | scales), CONFIG), _patches(grid), grid))
    plain = run(embed(ours, _patches(grid), grid))
    assert torch.equal(results[1.0], plain)
    assert _error(results[0.5], plain) > 0.05


@pytest.mark.parametrize("name", ["final_norm.weight", "blocks.2.fc1.bias", "position"])
def test_a_file_without_a_tensor_is_refused(name: str, tensors: dict[str, Tensor], tmp_path: Path) -> None:
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    with pytest.raises(StoreError, match=rf"{name} is not there with shape .*repack"):
        VisionWeights(write(tmp_path, rest), CONFIG)
