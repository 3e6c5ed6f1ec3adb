"""The vision tower's kernels against their definitions and float64. In the interpreter, or on a GPU.

What is beyond a tensor's rows is NaN: reading it would show.
"""

import pytest
import torch
from gpu_checks import BOUND, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor
from torch.nn.functional import gelu, rms_norm
from torch.nn.functional import layer_norm as torch_layer_norm

from kernels.attention import vision as attention
from kernels.attention.reference import attend_all
from kernels.linear.gpu import Linear
from kernels.linear.sweep import Tiles, linear
from kernels.norm.vision import Places, add_positions, layer_norm, shuffled_norm
from services.engine.vision import projector, tower

EPS = 1e-6
DEFINITION_BOUND = 5e-4  # float32 in another order: a share may round the other way
FLOAT64_BOUND = 4e-3  # what BF16 costs in all
SMALL = Tiles(16, 32, 64, 4, 2)
FILE_TYPES = pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])


def framed(rows: Tensor) -> Tensor:
    """On the device, the same rows between others that are NaN."""
    frame = poisoned(len(rows) + 2, *rows.shape[1:]).to(rows.dtype)
    frame[1:-1] = rows
    return frame[1:-1]


class Heads:
    """Queries, keys and values of a picture, exact in BF16."""

    def __init__(self, tokens: int, heads: int, size: int) -> None:
        self.tokens, self.heads, self.size = tokens, heads, size
        self.query, self.key, self.value = (
            randn(tokens, heads * size, seed=seed, scale=scale).bfloat16() for seed, scale in ((1, 2.0), (2, 1), (3, 1))
        )

    def run(self, rows: slice = slice(None)) -> Tensor:
        """In place, as the tower does. `rows`: of the keys and values, another picture's."""
        query, kv = framed(self.query), framed(torch.cat([self.key, self.value], 1)[rows])
        attention.attend(query[: len(kv)], kv, self.heads, query[: len(kv)])
        assert not query[: len(kv)].isnan().any()
        return query.cpu()

    def parted(self) -> list[Tensor]:
        return [each.float().view(self.tokens, self.heads, self.size) for each in (self.query, self.key, self.value)]

    def exact(self) -> Tensor:
        query, key, value = (each.double().transpose(0, 1) for each in self.parted())
        return ((query @ key.mT / self.size**0.5).softmax(2) @ value).transpose(0, 1).flatten(1)


@pytest.mark.parametrize(
    ("tokens", "heads", "size"),
    [
        (1, 2, 80),
        (63, 2, 80),
        (128, 1, 80),
        (129, 2, 80),
        (300, 1, 80),
        (70, 3, 16),
        (90, 1, 64),
        (65, 2, 24),
        (77, 2, 72),
    ],
)
def test_attention_is_the_definition_and_near_float64(tokens: int, heads: int, size: int) -> None:
    made = Heads(tokens, heads, size)
    found = made.run()
    wanted = attend_all(*made.parted(), attention.KEYS).flatten(1)
    assert relative_error(found, wanted.bfloat16()) < DEFINITION_BOUND
    assert relative_error(found, made.exact()) < FLOAT64_BOUND
    if tokens > 1:
        assert relative_error(found, made.exact().roll(1, 0)) > 0.1, "whose query it is must show"
        other = Heads(tokens, heads, size)
        other.value[-1] += 8
        assert relative_error(other.run(), made.exact()) > 2 * FLOAT64_BOUND, "the last row must count"


def test_attention_of_the_same_rows_is_the_same_bits() -> None:
    made = Heads(130, 2, 80)
    assert torch.equal(made.run(), made.run())
    whole, fewer = made.run(), made.run(slice(0, 129))
    assert torch.equal(fewer[129], made.query[129]), "a row that is not the picture's is left alone"
    assert not torch.equal(whole[:129], fewer[:129])


@FILE_TYPES
@pytest.mark.parametrize("columns", [48, 160, 304])
def test_layer_norm_is_torchs(columns: int, kind: torch.dtype) -> None:
    x = randn(5, columns, scale=3) + 2
    weight, bias = (randn(columns, seed=seed).to(kind) for seed in (1, 2))
    out = poisoned(7, columns).bfloat16()
    layer_norm(framed(x), here(weight), here(bias), EPS, out[1:-1])
    assert out[[0, -1]].isnan().all()
    exact = torch_layer_norm(x.double(), (columns,), weight.double(), bias.double(), EPS)
    assert relative_error(out[1:-1], exact) < FLOAT64_BOUND
    assert float((out[1:-1].cpu() == exact.bfloat16()).double().mean()) > 0.99, "correctly rounded, but for near ties"
    without = torch_layer_norm(x.double() - 2, (columns,), weight.double(), None, EPS)
    assert relative_error(out[1:-1], without) > 0.1, "the bias must show"


@FILE_TYPES
@pytest.mark.parametrize("grid", [(2, 2), (4, 6), (6, 2)])
def test_shuffled_rows_are_the_projectors(grid: tuple[int, int], kind: torch.dtype) -> None:
    x, size = randn(grid[0] * grid[1], 48, scale=3), 48
    weight, bias, outer = (randn(count, seed=count + 1).to(kind) for count in (size, size, 4 * size))
    out = poisoned(len(x) // 4 + 1, 4 * size).bfloat16()
    shuffled_norm(framed(x), grid, here(weight), here(bias), EPS, here(outer), projector.EPS, out[:-1])
    assert out[-1].isnan().all()
    normed = torch_layer_norm(x.double(), (size,), weight.double(), bias.double(), EPS)
    exact = rms_norm(projector.shuffle(normed, grid), (4 * size,), outer.double(), projector.EPS)
    assert relative_error(out[:-1], exact) < FLOAT64_BOUND
    if grid[1] > 2:
        turned = rms_norm(projector.shuffle(normed, (grid[1], grid[0])), (4 * size,), outer.double(), projector.EPS)
        assert relative_error(out[:-1], turned) > 0.1, "the grid must show"


@FILE_TYPES
@pytest.mark.parametrize("grid", [(8, 8), (2, 30), (30, 2), (5, 3)])
def test_positions_are_the_plain_towers(grid: tuple[int, int], kind: torch.dtype) -> None:
    table, before = randn(16, 16, 48).to(kind), randn(grid[0] * grid[1], 48, seed=1)
    down, across = (tower.places(count, max(grid), 16) for count in grid)
    places = Places(grid, down, across, here(before).device)
    found = framed(before)
    for first, stop in ((0, 7), (7, 16)):
        begin, end = tower.lines_of(down[0], first, stop)
        add_positions(found, framed(table)[first : stop + 1], places, (begin * grid[1], end * grid[1]), first)
    window = tower.position_window(table, grid)
    assert relative_error(found - here(before), window) < BOUND
    assert relative_error(found - here(before), window.roll(1, 0)) > 0.1


@FILE_TYPES
def test_linears_add_a_bias_and_take_the_gelu(kind: torch.dtype) -> None:
    x, bias = randn(19, 96).bfloat16(), randn(40, seed=2).to(kind)
    plain = randn(40, 96, seed=1, scale=0.3).bfloat16()
    weights = Linear.pack("BF16", framed(plain))
    exact = x.double() @ plain.double().T + bias.double()
    before = randn(19, 40, seed=3)
    for finish, wanted in {"store": exact, "gelu": gelu(exact), "add": exact + before.double()}.items():
        out = framed(before) if finish == "add" else poisoned(19, 40)
        linear(framed(x), weights, out, finish, configuration=SMALL, bias=framed(bias[:, None])[:, 0])  # type: ignore[arg-type]
        assert relative_error(out, wanted) < 1e-5
        assert relative_error(out, wanted - bias.double()) > 0.1
    out = poisoned(19, 40)
    linear(framed(x), weights, out, configuration=SMALL)
    assert relative_error(out, exact - bias.double()) < 1e-5
