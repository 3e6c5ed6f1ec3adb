"""The engine's model against transformers on the original checkpoint, and mistakes that the figures must show.

The reference's weights come from the checkpoint's files through code that shares nothing with the engine's.
"""

import ast
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from services.engine import model as model_module
from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.model import Model
from services.tools import faults, oracle, oracle_layers, parity
from services.tools.passages import PASSAGES

CAUGHT = 10 * parity.MEAN_KL_BAR


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


def norm_before_the_gate(model: Model, undo: ExitStack) -> None:
    def wrong(y: Tensor, z: Tensor, weight: Tensor, group: int, eps: float) -> Tensor:
        groups = y.view(len(y), -1, group)
        normed = groups / (groups.square().mean(2, keepdim=True) + eps).sqrt()
        return normed.flatten(1) * weight * torch.nn.functional.silu(z)

    undo.enter_context(mock.patch.object(model_module, "gated_group_rms_norm", wrong))


def assert_caught(found: parity.Parity) -> None:
    """By a figure, far from the bar, not by an exception."""
    assert found.mean_kl >= CAUGHT, found
    assert not found.passed


@pytest.mark.parametrize(
    ("mistake", "passage"),
    [
        # A trained correction is small beside the scores of what the router knows; it shows where nothing is known.
        (faults.ignore_the_correction_bias, "chinese"),
        (faults.weigh_by_corrected_scores, "chat"),
        (faults.turn_rope_on, "chat"),
        (norm_before_the_gate, "chat"),
    ],
)
def test_a_mistake_in_the_model_is_caught(
    model: Model, expected: dict[str, parity.Expected], mistake: faults.ModelFault, passage: str
) -> None:
    with ExitStack() as undo:
        mistake(model, undo)
        assert_caught(parity.compare(model, expected[passage]))


@pytest.mark.parametrize(
    "mistake",
    [
        faults.swap_the_nibbles,
        faults.shift_the_scales_by_a_group,
        faults.take_down_as_it_was_in_the_checkpoint,
        faults.drop_the_scaling_factor,
    ],
)
def test_a_mistake_in_the_store_is_caught(
    demo_store: Store, tmp_path: Path, expected: dict[str, parity.Expected], mistake: faults.StoreFault
) -> None:
    with running(mistake(demo_store, tmp_path / "store")) as model:
        assert_caught(parity.compare(model, expected["chat"]))


def test_an_unchanged_copy_of_the_store_passes(
    demo_store: Store, tmp_path: Path, expected: dict[str, parity.Expected]
) -> None:
    """So that it is the change that is caught, not the copying."""
    with running(faults.rewrite(demo_store, tmp_path / "store", lambda data, layout: None)) as model:
        assert parity.compare(model, expected["chat"]).passed


def test_the_reference_shares_no_code_with_the_engine() -> None:
    imported = {
        name
        for module in (oracle, oracle_layers)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        for name in (
            [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
        )
    }
    ours = {name for name in imported if name.startswith(("services", "kernels"))}
    # The second of the two uses the first; whether the library survives a tokenizer.json is tried in another process.
    assert ours <= {"services.tools", "services.tools.oracle", "services.vocabulary"}
    assert {"numpy", "torch", "transformers"} <= imported
