"""Nine mistakes that an engine of this model can make, put into a sound one on purpose.

A mistake is made either in a copy of a store (whose checksums then fit the wrong bytes) or in the running model, until
the stack that it was given is closed. Owns no measure: what the mistakes do to the answers is in controls.py.
"""

import dataclasses
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import xxhash
from torch import Tensor

from kernels.attention.cpu import attend
from kernels.block import BlockLayout, Bytes
from kernels.mamba.cpu import selective_scan
from kernels.router.cpu import choose
from services.engine import model as model_module
from services.engine.experts.store import DENSE, EXPERTS, Block, Store
from services.engine.model import Model, Moe

StoreFault = Callable[[Store, Path], Store]  # the second is a folder for the copy, not there yet
ModelFault = Callable[[Model, ExitStack], None]

ROPE_THETA = 10_000.0
LEAST_DT = 0.001  # the config's time_step_min, which is for initialisation only


def rewrite(store: Store, folder: Path, change: Callable[[Bytes, BlockLayout], None]) -> Store:
    """A copy of `store` in `folder`, each of whose blocks went through `change`, with checksums that fit."""
    folder.mkdir()
    shutil.copy(store.folder / DENSE, folder)
    blocks: list[list[Block]] = []
    with (folder / EXPERTS).open("wb") as file:
        for layer, layer_blocks in enumerate(store.blocks):
            blocks.append([])
            for expert, block in enumerate(layer_blocks):
                data = store.read_block(layer, expert)
                change(data, store.layout)
                file.write(data.tobytes())
                blocks[-1].append(dataclasses.replace(block, xxh64=xxhash.xxh64_intdigest(data.tobytes())))
    return dataclasses.replace(store, folder=folder, blocks=tuple(map(tuple, blocks)))


def swap_the_nibbles(store: Store, folder: Path) -> Store:
    def change(data: Bytes, layout: BlockLayout) -> None:
        for begin, end in ((layout.up_values, layout.up_scales), (layout.down_values, layout.down_scales)):
            data[begin:end] = data[begin:end] >> 4 | data[begin:end] << 4

    return rewrite(store, folder, change)


def shift_the_scales_by_a_group(store: Store, folder: Path) -> Store:
    def change(data: Bytes, layout: BlockLayout) -> None:
        up = data[layout.up_scales : layout.down_values].reshape(layout.width, -1)
        up[:] = np.roll(up, 1, axis=1)
        down = data[layout.down_scales : layout.used_bytes].reshape(-1, layout.latent)
        down[:] = np.roll(down, 1, axis=0)

    return rewrite(store, folder, change)


def take_down_as_it_was_in_the_checkpoint(store: Store, folder: Path) -> Store:
    def change(data: Bytes, layout: BlockLayout) -> None:
        _, _, down, scales = layout.unpack(data)
        data[layout.down_values : layout.down_scales] = down.reshape(-1)
        data[layout.down_scales : layout.used_bytes] = scales.reshape(-1)

    return rewrite(store, folder, change)


def exchange_one_expert(store: Store, folder: Path) -> Store:
    """One expert of the first MoE layer is another one's bytes and scales."""
    first, *others = store.blocks
    blocks = ((first[1], *first[1:]), *others)
    return dataclasses.replace(store, blocks=blocks)


def drop_the_scaling_factor(store: Store, folder: Path) -> Store:
    return dataclasses.replace(store, config=dataclasses.replace(store.config, routed_scale=1.0))


def ignore_the_correction_bias(model: Model, undo: ExitStack) -> None:
    for mixer in model.mixers:
        if isinstance(mixer, Moe):
            undo.enter_context(mock.patch.object(mixer, "bias", torch.zeros_like(mixer.bias)))


def weigh_by_corrected_scores(model: Model, undo: ExitStack) -> None:
    def wrong(logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
        ids, _ = choose(logits, bias, top_k, scale, normalise)
        weights = (torch.sigmoid(logits) + bias).gather(1, ids.long())
        return ids, weights / weights.sum(1, keepdim=True) * scale

    undo.enter_context(mock.patch.object(model_module, "choose", wrong))


def turn_rope_on(model: Model, undo: ExitStack) -> None:
    def rotate(x: Tensor, first: int) -> Tensor:
        half = x.shape[2] // 2
        angles = torch.arange(first, first + len(x))[:, None, None] * ROPE_THETA ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=2)

    def wrong(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        return attend(rotate(query, first), rotate(key, 0), value, first)

    undo.enter_context(mock.patch.object(model_module, "attend", wrong))


def clamp_dt(model: Model, undo: ExitStack) -> None:
    """softplus(dt + bias) is at least LEAST_DT, as transformers' prefill has it unless told otherwise."""
    least = math.log(math.expm1(LEAST_DT))

    def wrong(
        x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor
    ) -> Tensor:
        return selective_scan(x, (dt + dt_bias).clamp(min=least) - dt_bias, b, c, a, d, dt_bias, state)

    undo.enter_context(mock.patch.object(model_module, "selective_scan", wrong))
