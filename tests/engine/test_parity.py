"""The engine's model against transformers on the original checkpoint, and mistakes that the figures must show.

The reference's weights come from the checkpoint's files through code that shares nothing with the engine's.
"""

import ast
import dataclasses
import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from kernels.attention.reference import attend
from kernels.block import BlockLayout
from kernels.router.reference import choose
from services.engine import model as model_module
from services.engine.experts.store import DENSE, EXPERTS, Block, Store
from services.engine.experts.streamer import open_experts
from services.engine.model import Model, Moe
from services.tools import oracle, parity
from services.tools.passages import PASSAGES

CAUGHT = 10 * parity.MEAN_KL_BAR
Patch = Callable[[Model, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def expected(demo_checkpoint: Path) -> dict[str, parity.Expected]:
    reference, tokenizer = oracle.load(demo_checkpoint), oracle.tokenizer(demo_checkpoint)
    return {name: parity.ask_reference(reference, tokenizer(text)) for name, text in PASSAGES.items()}


@contextmanager
def running(store: Store) -> Iterator[Model]:
    experts = open_experts(store, slots=10_000)
    yield Model(store.dense(), store.config, experts)
    experts.close()


@pytest.fixture
def model(demo_store: Store) -> Iterator[Model]:
    with running(demo_store) as model:
        yield model


def test_the_model_is_transformers(model: Model, expected: dict[str, parity.Expected]) -> None:
    for name, said in expected.items():
        found = parity.compare(model, said)
        assert found.passed, (name, found)
        assert found.perplexity == pytest.approx(found.reference_perplexity, rel=0.01), name


def moes(model: Model) -> list[Moe]:
    return [mixer for mixer in model.mixers if isinstance(mixer, Moe)]


def ignore_the_correction_bias(model: Model, patch: pytest.MonkeyPatch) -> None:
    for moe in moes(model):
        patch.setattr(moe, "bias", torch.zeros_like(moe.bias))


def weigh_by_corrected_scores(model: Model, patch: pytest.MonkeyPatch) -> None:
    def wrong(logits: Tensor, bias: Tensor, top_k: int, scale: float, normalise: bool) -> tuple[Tensor, Tensor]:
        ids, _ = choose(logits, bias, top_k, scale, normalise)
        weights = (torch.sigmoid(logits) + bias).gather(1, ids.long())
        return ids, weights / weights.sum(1, keepdim=True) * scale

    patch.setattr(model_module, "choose", wrong)


def drop_the_scaling_factor(model: Model, patch: pytest.MonkeyPatch) -> None:
    for moe in moes(model):
        patch.setattr(moe, "config", dataclasses.replace(moe.config, routed_scale=1.0))


def turn_rope_on(model: Model, patch: pytest.MonkeyPatch) -> None:
    def rotate(x: Tensor, first: int) -> Tensor:
        half = x.shape[2] // 2
        angles = torch.arange(first, first + len(x))[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=2)

    def wrong(query: Tensor, key: Tensor, value: Tensor, first: int) -> Tensor:
        return attend(rotate(query, first), rotate(key, 0), value, first)

    patch.setattr(model_module, "attend", wrong)


def norm_before_the_gate(model: Model, patch: pytest.MonkeyPatch) -> None:
    def wrong(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float) -> Tensor:
        groups = y.view(len(y), -1, group)
        normed = groups / (groups.square().mean(2, keepdim=True) + eps).sqrt()
        return normed.flatten(1) * weight * torch.nn.functional.silu(z)

    patch.setattr(model_module, "gated_group_rms_norm", wrong)


def swap_the_nibbles(data: np.ndarray, layout: BlockLayout) -> None:
    for begin, end in ((layout.up_values, layout.up_scales), (layout.down_values, layout.down_scales)):
        data[begin:end] = data[begin:end] >> 4 | data[begin:end] << 4


def shift_the_scales_by_a_group(data: np.ndarray, layout: BlockLayout) -> None:
    up = data[layout.up_scales : layout.down_values].reshape(layout.width, -1)
    up[:] = np.roll(up, 1, axis=1)
    down = data[layout.down_scales : layout.used_bytes].reshape(-1, layout.latent)
    down[:] = np.roll(down, 1, axis=0)


def take_down_as_it_was_in_the_checkpoint(data: np.ndarray, layout: BlockLayout) -> None:
    _, _, down, scales = layout.unpack(data)
    data[layout.down_values : layout.down_scales] = down.reshape(-1)
    data[layout.down_scales : layout.used_bytes] = scales.reshape(-1)


def changed_store(store: Store, folder: Path, change: Callable[[np.ndarray, BlockLayout], None]) -> Store:
    """A store like `store`, each of whose blocks went through `change`, checksums and all."""
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


def exchange_neighbouring_experts(store: Store) -> Store:
    blocks = tuple(tuple(layer[expert ^ 1] for expert in range(len(layer))) for layer in store.blocks)
    return dataclasses.replace(store, blocks=blocks)


def assert_caught(found: parity.Parity) -> None:
    """By a figure, far from the bar, not by an exception."""
    assert found.mean_kl >= CAUGHT, found
    assert not found.passed


@pytest.mark.parametrize(
    "mistake",
    [
        ignore_the_correction_bias,
        weigh_by_corrected_scores,
        drop_the_scaling_factor,
        turn_rope_on,
        norm_before_the_gate,
    ],
)
def test_a_mistake_in_the_model_is_caught(
    model: Model, expected: dict[str, parity.Expected], mistake: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(model, monkeypatch)
    assert_caught(parity.compare(model, expected["chat"]))


@pytest.mark.parametrize(
    "mistake", [swap_the_nibbles, shift_the_scales_by_a_group, take_down_as_it_was_in_the_checkpoint]
)
def test_a_mistake_in_the_blocks_is_caught(
    demo_store: Store, tmp_path: Path, expected: dict[str, parity.Expected], mistake: Callable
) -> None:
    with running(changed_store(demo_store, tmp_path / "store", mistake)) as model:
        assert_caught(parity.compare(model, expected["chat"]))


def test_exchanged_experts_are_caught(demo_store: Store, expected: dict[str, parity.Expected]) -> None:
    with running(exchange_neighbouring_experts(demo_store)) as model:
        assert_caught(parity.compare(model, expected["chat"]))


def test_an_unchanged_copy_of_the_store_passes(
    demo_store: Store, tmp_path: Path, expected: dict[str, parity.Expected]
) -> None:
    """So that it is the change that is caught, not the copying."""
    with running(changed_store(demo_store, tmp_path / "store", lambda data, layout: None)) as model:
        assert parity.compare(model, expected["chat"]).passed


def test_the_reference_shares_no_code_with_the_engine() -> None:
    imported = {
        name
        for node in ast.walk(ast.parse(inspect.getsource(oracle)))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
        )
    }
    assert not {name for name in imported if name.startswith(("services", "kernels"))}
    assert {"numpy", "torch", "transformers"} <= imported
