"""The block layout: sizes, and that packing only permutes codes."""

import numpy as np
import pytest

from kernels import block as module
from kernels.block import DOWN, GROUP, PAGE, BlockLayout, Bytes, place_down
from kernels.elementary.binding import bind

SUPER = BlockLayout(latent=1024, width=2688)
ODD = BlockLayout(latent=96, width=48)


def tensors(layout: BlockLayout, seed: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    random = np.random.default_rng(seed)

    def some(*shape: int) -> Bytes:
        return random.integers(0, 256, shape, dtype=np.uint8)

    latent, width = layout.latent, layout.width
    return (
        some(width, latent // 2),
        some(width, latent // GROUP),
        some(latent, width // 2),
        some(latent, width // GROUP),
    )


def test_super_is_756_pages() -> None:
    assert SUPER.block_bytes == 3_096_576 == 756 * PAGE
    assert SUPER.used_bytes == SUPER.block_bytes


def test_parts_follow_each_other_and_padding_is_zero() -> None:
    codes = 96 * 48 // 2
    scales = 96 * 48 // 16
    assert (ODD.up_values, ODD.up_scales, ODD.down_values, ODD.down_scales, ODD.used_bytes) == (
        0,
        codes,
        codes + scales,
        2 * codes + scales,
        2 * codes + 2 * scales,
    )
    block = ODD.pack(*tensors(ODD, 1))
    assert block.shape == (ODD.block_bytes,)
    assert ODD.block_bytes % PAGE == 0
    assert not block[ODD.used_bytes :].any()


def test_up_is_as_in_the_checkpoint() -> None:
    up_weight, up_scale, *down = tensors(ODD, 2)
    block = ODD.pack(up_weight, up_scale, *down)
    assert np.array_equal(block[: ODD.up_scales], up_weight.reshape(-1))
    assert np.array_equal(block[ODD.up_scales : ODD.down_values], up_scale.reshape(-1))


def test_down_is_neuron_major() -> None:
    """Each code and scale is looked up where the layout says it lies, by arithmetic of its own."""
    *up, down_weight, down_scale = tensors(ODD, 3)
    block = ODD.pack(*up, down_weight, down_scale)
    for output, neuron in [(0, 0), (1, 0), (0, 1), (95, 47), (94, 46), (37, 20), (64, 15), (64, 16)]:
        stored = block[ODD.down_values + neuron * 48 + output // 2] >> 4 * (output % 2) & 15
        assert stored == down_weight[output, neuron // 2] >> 4 * (neuron % 2) & 15
        assert block[ODD.down_scales + neuron // 16 * 96 + output] == down_scale[output, neuron // 16]


# Whole squares of the transposition, squares cut short, and less than one.
SHAPES = [SUPER, ODD, BlockLayout(32, 16), BlockLayout(64, 272), BlockLayout(32, 528), BlockLayout(1024, 48)]


@pytest.mark.parametrize("layout", SHAPES, ids=str)
def test_down_in_cpp_is_its_definition(layout: BlockLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bind(*DOWN) is not None
    *_, weight, scale = tensors(layout, 7)
    values = np.empty((layout.width, layout.latent // 2), np.uint8)
    scales = np.empty((layout.width // GROUP, layout.latent), np.uint8)
    place_down(weight, scale, values, scales)
    wanted = np.full(layout.block_bytes, 0xA5, np.uint8)
    wanted[layout.down_values : layout.down_scales] = values.reshape(-1)
    wanted[layout.down_scales : layout.used_bytes] = scales.reshape(-1)

    def placed(weight: Bytes) -> Bytes:
        block = np.full(layout.block_bytes, 0xA5, np.uint8)
        layout.place_down(block, weight, scale)
        return block

    assert np.array_equal(placed(weight), wanted), "and nothing beside it is written"
    assert np.array_equal(placed(np.asfortranarray(weight)), wanted)
    assert not np.array_equal(placed(weight ^ 1), wanted)
    with monkeypatch.context() as patch:
        patch.setattr(module, "bind", lambda *_: None)
        assert np.array_equal(placed(weight), wanted)
        assert not np.array_equal(placed(weight ^ 1), wanted)


@pytest.mark.parametrize("layout", [ODD, BlockLayout(32, 16), BlockLayout(128, 128)], ids=str)
def test_unpacking_gives_back_every_byte(layout: BlockLayout) -> None:
    given = tensors(layout, 4)
    for before, after in zip(given, layout.unpack(layout.pack(*given)), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("which", range(4))
def test_a_misshapen_tensor_is_named(which: int) -> None:
    given = list(tensors(ODD, 5))
    given[which] = given[which][:-1]
    name = ("up_weight", "up_scale", "down_weight", "down_scale")[which]
    with pytest.raises(ValueError, match=name):
        ODD.pack(*given)


@pytest.mark.parametrize(("latent", "width"), [(0, 16), (48, 16), (32, 8), (32, -16)])
def test_sizes_that_cannot_be_packed_are_refused(latent: int, width: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        BlockLayout(latent, width)


def test_a_block_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(ValueError, match="block"):
        ODD.unpack(np.zeros(ODD.block_bytes + 1, np.uint8))


def test_rotated_neurons_keep_their_weights() -> None:
    given = tensors(ODD, 6)
    rotated = ODD.unpack(ODD.rotate_neurons(ODD.pack(*given), 1))
    assert np.array_equal(rotated[0], np.roll(given[0], 16, axis=0))
    assert np.array_equal(rotated[1], np.roll(given[1], 16, axis=0))
    assert np.array_equal(rotated[2], np.roll(given[2], 8, axis=1))
    assert np.array_equal(rotated[3], np.roll(given[3], 1, axis=1))
