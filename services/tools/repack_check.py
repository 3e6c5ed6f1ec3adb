"""A finished store held against its checkpoint, byte for byte, through code that shares nothing with the repacking.

Files are read by oracle.py's reader, blocks are laid out here from their description, with numpy:

    up values | up scales | down values, a row a neuron | down scales, a row a group of 16 neurons | zeros to 4096
"""

import json
import random
import re
from pathlib import Path

import numpy as np

from services.tools import oracle
from services.tools.oracle import Array

PAGE_BYTES = 4096


class CheckError(Exception):
    """The store is not the checkpoint's. The message names the expert."""

    code = "repack_check"


def check(checkpoint: Path, store: Path, count: int, seed: int | None = None) -> int:
    """Compare `count` random experts (all, if there are not more); how many were. Raises CheckError."""
    experts = _experts(oracle.read(checkpoint))
    layers = sorted({layer for layer, _ in experts})
    per_layer = len(experts) // len(layers)
    manifest = json.loads((store / "manifest.json").read_text(encoding="utf-8"))
    chosen = random.Random(seed).sample(sorted(experts), min(count, len(experts)))
    with (store / "experts.bin").open("rb") as file:
        for layer, expert in sorted(chosen):
            up, down = experts[layer, expert]["up"], experts[layer, expert]["down"]
            wanted = block(up[0], up[1], down[0], down[1])
            index = layers.index(layer)
            file.seek((index * per_layer + expert) * len(wanted))
            said = manifest["layers"][index]["blocks"][expert]
            scales = [float(np.float32(part[2].reshape(-1)[0])) for part in (up, down)]
            if file.read(len(wanted)) != wanted or [said["up_scale"], said["down_scale"]] != scales:
                raise CheckError(
                    f"{store}: layer {layer}, expert {expert} is not what the checkpoint has; run thimble repack again"
                )
    return len(chosen)


def block(up: Array, up_scales: Array, down: Array, down_scales: Array) -> bytes:
    """`up` [width, latent/2] and `down` [latent, width/2] are packed codes, scales are E4M3 codes; all as on disk."""
    neurons = np.empty((down.shape[1] * 2, down.shape[0]), np.uint8)  # a code each, a neuron a row
    neurons[0::2], neurons[1::2] = (down & 15).T, (down >> 4).T
    packed = neurons[:, 0::2] + neurons[:, 1::2] * 16
    data = b"".join(np.ascontiguousarray(part).tobytes() for part in (up, up_scales, packed, down_scales.T))
    return data + bytes(-len(data) % PAGE_BYTES)


def _experts(tensors: dict[str, tuple[str, Array]]) -> dict[tuple[int, int], dict[str, tuple[Array, ...]]]:
    """Weight, scales and scale of scales of `up` and `down`, by layer and expert."""
    found: dict[tuple[int, int], dict[str, tuple[Array, ...]]] = {}
    for name, (_, weight) in tensors.items():
        if match := re.search(r"layers\.(\d+)\.mixer\.experts\.(\d+)\.(up|down)_proj\.weight$", name):
            parts = (weight, tensors[name + "_scale"][1], tensors[name + "_scale_2"][1])
            found.setdefault((int(match[1]), int(match[2])), {})[match[3]] = parts
    return found
