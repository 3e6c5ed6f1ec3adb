"""The Triton expert step equals the reference bit for bit: in the interpreter here, on the GPU where there is one."""

import numpy as np
import pytest
import torch

from kernels.block import GROUP, BlockLayout
from kernels.experts import reference
from kernels.experts.decode_step import ExpertStep

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOP_K = 3
EXPERTS = 4


def random_block(rng: np.random.Generator, layout: BlockLayout) -> np.ndarray:
    """Any codes, any non-negative finite scales, subnormal ones included."""
    latent, width = layout.latent, layout.width
    shapes = [(width, latent // 2), (width, latent // GROUP), (latent, width // 2), (latent, width // GROUP)]
    limits = [256, 0x7F, 256, 0x7F]
    return layout.pack(*(rng.integers(0, limit, shape, np.uint8) for shape, limit in zip(shapes, limits, strict=True)))


class Layer:
    """Random experts, their blocks where a GPU can read them, and one step set up from a placement."""

    def __init__(self, layout: BlockLayout, tokens: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.layout = layout
        self.blocks = [torch.from_numpy(random_block(rng, layout)) for _ in range(EXPERTS)]
        if DEVICE.type == "cuda":
            self.blocks = [block.pin_memory() for block in self.blocks]
        self.scales = (10.0 ** rng.uniform(-6, -2, (EXPERTS, 2))).astype(np.float32)
        self.ids = torch.from_numpy(
            np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
        )
        self.weights = torch.from_numpy(rng.uniform(0, 5, (tokens, TOP_K)).astype(np.float32))
        self.x = torch.from_numpy(rng.standard_normal((tokens, layout.latent)).astype(np.float32))

    def expert(self, id: int) -> reference.Expert:
        return reference.unpack_expert(self.blocks[id].numpy(), self.layout, *map(float, self.scales[id]))

    def expected(self) -> torch.Tensor:
        return reference.step(self.ids, self.weights, self.x, self.expert)

    def run(self, here: set[int], whole_groups: bool = False) -> torch.Tensor:
        """The experts in `here` by the kernels, the others through host_y; all intermediate memory poisoned."""
        tokens = self.x.shape[0]
        step = ExpertStep(self.layout, EXPERTS, tokens, TOP_K, DEVICE)
        for buffer in (step.h, step.y, step.host_y, step.x_factor, step.y_factor, step.out):
            buffer.fill_(float("nan"))
        for integers in (step.hq, step.partial, step.xq, step.touched, step.touched_count):
            integers.fill_(31111)
        items = [id for id in sorted(here) if (self.ids == id).any()]
        for item, id in enumerate(items):
            step.table[item] = self.blocks[id].data_ptr()
            step.scale_2[item] = torch.from_numpy(self.scales[id])
        step.count.fill_(len(items))
        step.x.copy_(self.x)
        step.weights.copy_(self.weights)
        for token in range(tokens):
            for rank, id in enumerate(self.ids[token].tolist()):
                step.source[token, rank] = items.index(id) if id in items else -1 - token * TOP_K - rank
                if id not in items and torch.isfinite(self.x[token]).all():
                    y, overflowed = reference.apply_expert(self.x[token : token + 1], self.expert(id))
                    step.host_y[token * TOP_K + rank] = torch.nan if overflowed.any() else y[0]
        step.launch(whole_groups)
        return step.out.cpu()


SHAPES = [BlockLayout(128, 80), BlockLayout(32, 16), BlockLayout(256, 48)]


@pytest.mark.parametrize("layout", SHAPES, ids=lambda s: f"{s.latent}x{s.width}")
@pytest.mark.parametrize("tokens", [1, 3])
def test_equals_the_reference(layout: BlockLayout, tokens: int) -> None:
    layer = Layer(layout, tokens)
    assert torch.equal(layer.run(set(range(EXPERTS))), layer.expected())


def test_any_placement_gives_the_same_bits() -> None:
    layer = Layer(BlockLayout(64, 32), tokens=2)
    expected = layer.expected()
    for here in range(2**EXPERTS):
        if here % 5 == 0:
            assert torch.equal(layer.run({id for id in range(EXPERTS) if here >> id & 1}), expected)


def test_reading_whole_groups_changes_nothing() -> None:
    layer = Layer(BlockLayout(64, 32), tokens=1)
    assert torch.equal(layer.run(set(range(EXPERTS)), whole_groups=True), layer.expected())


@pytest.mark.filterwarnings("ignore:overflow")  # the interpreter computes with numpy
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-42, 1e18, 3e38])
def test_sizes_of_input(size: float) -> None:
    """Zero (no neuron alive), tiny, subnormal, and large enough that h overflows."""
    layer = Layer(BlockLayout(32, 32), tokens=2)
    layer.x[0] *= size if size < 1e38 else 1.0
    if size > 1e38:
        layer.x[0] = size
    assert torch.equal(layer.run(set(range(EXPERTS))).nan_to_num(7.0), layer.expected().nan_to_num(7.0))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_input_makes_its_row_nan_and_no_other(poison: float) -> None:
    layer = Layer(BlockLayout(32, 32), tokens=2)
    layer.x[0, 5] = poison
    out = layer.run(set(range(EXPERTS)))
    assert out[0].isnan().all()
    assert torch.equal(out[1], layer.expected()[1])


def test_one_changed_bit_is_seen() -> None:
    layer = Layer(BlockLayout(64, 32), tokens=1)
    expected = layer.expected()
    layer.blocks[int(layer.ids[0, 0])][layer.layout.down_scales] ^= 1
    assert not torch.equal(layer.run(set(range(EXPERTS))), expected)
