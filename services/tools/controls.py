"""Controls of `thimble verify`: each of nine mistakes, on a small checkpoint built to expose it, must move the figure.

A control is caught when the mean KL with the mistake is at least ten times the bar, while the same checkpoint without
the mistake passes. By the figure, not by an exception: a mistake that stops the engine would be no test of the figure.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.model import Model
from services.tools import faults, oracle, small_checkpoint
from services.tools.parity import MEAN_KL_BAR, Expected, Parity, ask_reference, compare
from services.tools.repack import repack

CAUGHT_KL = 10 * MEAN_KL_BAR
TEXT_TOKENS = 64
Edit = Callable[[dict[str, Any], dict[str, Tensor]], None]


@dataclass(frozen=True)
class Control:
    name: str
    fault: faults.StoreFault | faults.ModelFault
    edit: Edit
    in_store: bool = True


@dataclass(frozen=True)
class Result:
    control: Control
    sound: Parity
    faulty: Parity

    @property
    def caught(self) -> bool:
        return self.sound.passed and self.faulty.mean_kl >= CAUGHT_KL and not self.faulty.passed


def louder(*endings: str, by: float) -> Edit:
    """Multiply the tensors whose names end so."""

    def edit(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(endings) and not name.startswith("mtp."):
                tensors[name] = (tensor.float() * by).to(tensor.dtype)

    return edit


def slow_clocks(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Time steps far below the clamp in every Mamba head, and nothing of the input around the state."""
    for name, tensor in tensors.items():
        if name.endswith(".dt_bias"):
            tensors[name] = torch.full_like(tensor, -10.0)
        elif name.endswith(".D"):
            tensors[name] = torch.zeros_like(tensor)


def as_it_is(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Random experts, five times each, are most of what a layer adds: mistakes in them show by themselves."""


# Trained corrections are small beside the scores and positions matter little to random queries: here they are not.
strong_correction = louder("e_score_correction_bias", by=4.0)
sharp_attention = louder("q_proj.weight", "k_proj.weight", "v_proj.weight", by=3.0)
CONTROLS = (
    Control("nibbles swapped", faults.swap_the_nibbles, as_it_is),
    Control("scales shifted by one group", faults.shift_the_scales_by_a_group, as_it_is),
    Control("down as in the checkpoint", faults.take_down_as_it_was_in_the_checkpoint, as_it_is),
    Control("one expert exchanged", faults.exchange_one_expert, as_it_is),
    Control("correction bias ignored", faults.ignore_the_correction_bias, strong_correction, in_store=False),
    Control("weights from corrected scores", faults.weigh_by_corrected_scores, strong_correction, in_store=False),
    Control("RoPE on", faults.turn_rope_on, sharp_attention, in_store=False),
    Control("dt clamp on", faults.clamp_dt, slow_clocks, in_store=False),
    Control("scaling factor dropped", faults.drop_the_scaling_factor, as_it_is),
)


def run(folder: Path, controls: tuple[Control, ...] = CONTROLS) -> Iterator[Result]:
    """The controls one by one; `folder` must be there and may be deleted afterwards. Raises OracleError."""
    for number, control in enumerate(controls):
        checkpoint = small_checkpoint.write(folder / f"checkpoint{number}", edit=control.edit, seed=number)
        store = repack(checkpoint, folder / f"store{number}", say=lambda _: None)
        generator = torch.Generator().manual_seed(number)
        ids = torch.randint(store.config.vocab_size, (TEXT_TOKENS,), generator=generator).tolist()
        expected = ask_reference(oracle.load(checkpoint), ids)
        sound = measure(store, expected)
        if control.in_store:
            wrong_store: Store = control.fault(store, folder / f"wrong{number}")  # type: ignore[arg-type, assignment]
            faulty = measure(wrong_store, expected)
        else:
            faulty = measure(store, expected, control.fault)  # type: ignore[arg-type]
        yield Result(control, sound, faulty)


def measure(store: Store, expected: Expected, fault: faults.ModelFault | None = None) -> Parity:
    with ExitStack() as stack:
        experts = open_experts(store, slots=sum(map(len, store.blocks)))
        stack.callback(experts.close)
        model = Model(store.dense(), store.config, experts)
        if fault:
            fault(model, stack)
        return compare(model, expected)


def report() -> bool:
    """Run all and print a line for each; whether every one was caught."""
    caught = []
    print(f"{'mistake':<31}{'mean KL':>10}{'x the bar':>11}{'without it':>12}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for result in run(Path(folder)):
            caught.append(result.caught)
            kl, sound = result.faulty.mean_kl, result.sound.mean_kl
            verdict = "caught" if result.caught else "NOT CAUGHT"
            print(f"{result.control.name:<31}{kl:>10.4f}{kl / MEAN_KL_BAR:>11.0f}{sound:>12.1e}  {verdict}", flush=True)
    return all(caught)
