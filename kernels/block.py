"""The byte layout of an expert block: the only place that knows it.

A block holds one expert's packed weights, in this order, padded to whole pages so that O_DIRECT can read it:

    up values     width rows x latent/2 bytes    row n: neuron n's E2M1 input codes, even one in the low nibble
    up scales     width rows x latent/16 bytes   E4M3, one per 16 inputs
    down values   width rows x latent/2 bytes    row n: neuron n's output codes, even one in the low nibble
    down scales   width/16 rows x latent bytes   E4M3, row g = the scales of 16-neuron group g, one per output

`down` in a checkpoint is [latent, width] with codes packed along width; here it is transposed so that a dead neuron is
a row that need not be read. Packing is a permutation of codes: no value changes. Per-tensor scales are in the manifest.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.elementary.binding import POINTER, SIZE, bind

PAGE = 4096
GROUP = 16  # weights that share a scale, fixed by NVFP4

Bytes = npt.NDArray[np.uint8]

DOWN = "thimble_block_down", POINTER, POINTER, POINTER, POINTER, SIZE, SIZE


@dataclass(frozen=True)
class BlockLayout:
    """Offsets and sizes in bytes of a block for experts of `latent` inputs and outputs and `width` neurons."""

    latent: int
    width: int

    def __post_init__(self) -> None:
        if self.latent <= 0 or self.latent % 32 or self.width <= 0 or self.width % GROUP:
            raise ValueError(
                f"expert of latent size {self.latent} and width {self.width}: the latent size must be a positive "
                f"multiple of 32 and the width one of {GROUP}"
            )

    @property
    def up_values(self) -> int:
        return 0

    @property
    def up_scales(self) -> int:
        return self.width * self.latent // 2

    @property
    def down_values(self) -> int:
        return self.up_scales + self.width * self.latent // GROUP

    @property
    def down_scales(self) -> int:
        return self.down_values + self.width * self.latent // 2

    @property
    def used_bytes(self) -> int:
        return self.down_scales + self.width // GROUP * self.latent

    @property
    def block_bytes(self) -> int:
        return -(-self.used_bytes // PAGE) * PAGE

    def pack(self, up_weight: Bytes, up_scale: Bytes, down_weight: Bytes, down_scale: Bytes) -> Bytes:
        """A block from the checkpoint's tensors, all as uint8.

        up_weight [width, latent/2], up_scale [width, latent/16], down_weight [latent, width/2],
        down_scale [latent, width/16] -> [block_bytes], padding zero. Raises ValueError on any other shape.
        """
        expected = {
            "up_weight": (up_weight, (self.width, self.latent // 2)),
            "up_scale": (up_scale, (self.width, self.latent // GROUP)),
            "down_weight": (down_weight, (self.latent, self.width // 2)),
            "down_scale": (down_scale, (self.latent, self.width // GROUP)),
        }
        for name, (array, shape) in expected.items():
            if array.shape != shape or array.dtype != np.uint8:
                raise ValueError(f"{name}: expected uint8 {shape}, found {array.dtype} {array.shape}")
        block = np.zeros(self.block_bytes, np.uint8)
        values, scales = self.up(block)
        values[:], scales[:] = up_weight, up_scale
        self.place_down(block, down_weight, down_scale)
        return block

    def up(self, block: Bytes) -> tuple[Bytes, Bytes]:
        """Where `up` lies in a block, as in the checkpoint: views [width, latent/2] and [width, latent/16]."""
        return (
            block[: self.up_scales].reshape(self.width, self.latent // 2),
            block[self.up_scales : self.down_values].reshape(self.width, self.latent // GROUP),
        )

    def place_down(self, block: Bytes, down_weight: Bytes, down_scale: Bytes) -> None:
        """Write `down`, as it is in the checkpoint, to its place in a block of which it touches nothing else."""
        assert block.shape == (self.block_bytes,)
        assert block.flags.c_contiguous
        assert down_weight.shape == (self.latent, self.width // 2)
        assert down_scale.shape == (self.latent, self.width // GROUP)
        values, scales = block[self.down_values : self.down_scales], block[self.down_scales : self.used_bytes]
        function = bind(*DOWN)
        if function is None:
            place_down(down_weight, down_scale, values.reshape(self.width, -1), scales.reshape(-1, self.latent))
            return
        down_weight, down_scale = np.ascontiguousarray(down_weight), np.ascontiguousarray(down_scale)
        places = (array.ctypes.data for array in (down_weight, down_scale, values, scales))
        function(*places, self.latent, self.width)

    def unpack(self, block: Bytes) -> tuple[Bytes, Bytes, Bytes, Bytes]:
        """The four checkpoint tensors of a block: the inverse of `pack`."""
        if block.shape != (self.block_bytes,) or block.dtype != np.uint8:
            raise ValueError(f"block: expected uint8 ({self.block_bytes},), found {block.dtype} {block.shape}")
        up_weight, up_scale = self.up(block)
        rows = block[self.down_values : self.down_scales].reshape(self.width, self.latent // 2)
        scales = block[self.down_scales : self.used_bytes].reshape(self.width // GROUP, self.latent)
        return up_weight.copy(), up_scale.copy(), _repack_nibbles(_split_nibbles(rows).T), scales.T.copy()

    def rotate_neurons(self, block: Bytes, groups: int) -> Bytes:
        """The same expert with its neurons in another order, each `groups` 16-neuron groups later: other bytes at every
        place, the same function."""
        rotated = block.copy()
        parts = (self.up_values, self.up_scales, self.down_values, self.down_scales, self.used_bytes)
        for begin, end in itertools.pairwise(parts):
            by_group = block[begin:end].reshape(self.width // GROUP, -1)
            rotated[begin:end] = np.roll(by_group, groups, axis=0).reshape(-1)
        return rotated


def place_down(down_weight: Bytes, down_scale: Bytes, values: Bytes, scales: Bytes) -> None:
    """[latent, width/2] and [latent, width/16] into [width, latent/2] and [width/16, latent].

    The definition that block.cpp must equal, and what there is without a compiler.
    """
    # Two outputs and two neurons at a time: their four codes trade places within two bytes, bytes are transposed.
    first, second = down_weight[0::2], down_weight[1::2]
    values[0::2] = (first & 15 | second << 4).T
    values[1::2] = (first >> 4 | second & 0xF0).T
    scales[:] = down_scale.T


def _split_nibbles(packed: Bytes) -> Bytes:
    """[rows, n/2] packed codes -> [rows, n] codes, the low nibble first."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(packed.shape[0], -1)


def _repack_nibbles(codes: Bytes) -> Bytes:
    """[rows, n] codes -> [rows, n/2] packed, the even code in the low nibble."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
