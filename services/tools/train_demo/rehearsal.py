"""Compiling a step's parts before training relies on them: a batch is run with them and without, gradients and all.

What cannot be compiled here, or computes something else, costs speed and nothing else. Owns the order of attempts.
"""

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from services.tools.train_demo.documents import Batch
from services.tools.train_demo.fused import Fused, compiled
from services.tools.train_demo.rounding import Rounding

if TYPE_CHECKING:
    from services.tools.train_demo.training import Training

ATTEMPTS = (("mamba", "attention", "moe", "head"), ("mamba", "attention", "head"), ("mamba", "attention"), ("mamba",))
ALIKE = 0.9  # cosine of all gradients: BF16 alone leaves 0.999, another function far less


def rehearsed(training: "Training", batch: Batch, rounding: Rounding | None, sparsity: bool) -> Fused | None:
    """The parts that work, compiled; the network's weights and the optimiser are not touched."""
    training.fused = None
    wanted = _gradients(training, batch, rounding, sparsity)
    for names in ATTEMPTS:
        began = time.monotonic()
        training.fused = compiled(torch.bfloat16, names)
        try:
            found = _gradients(training, batch, rounding, sparsity)
        except Exception as error:  # whatever a compiler may raise
            why = f"{type(error).__name__}: {str(error)[:400]}"
        else:
            alike = float(torch.cosine_similarity(found[1:].double(), wanted[1:].double(), dim=0))
            losses = (float(found[0]), float(wanted[0]))
            if alike > ALIKE and abs(losses[0] - losses[1]) < 0.02 * abs(losses[1]):
                training.say(f"compiled {', '.join(names)} in {time.monotonic() - began:.0f} s, gradients {alike:.4f}")
                return training.fused
            why = f"gradients {alike:.4f}, losses {losses}"
        training.say(f"not compiled: {', '.join(names)}: {why}")
    return None


def _gradients(training: "Training", batch: Batch, rounding: Rounding | None, sparsity: bool) -> Tensor:
    """The loss, then all gradients in a row, float32."""
    parameters = [p for p in training.network.parameters() if p.requires_grad]
    found = training.losses(batch, rounding, sparsity, sparsity)
    whole = found.model + training.recipe.draft_weight * found.draft + found.sparsity
    gradients = torch.autograd.grad(whole, parameters, allow_unused=True)
    found_all = (torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True))
    return torch.cat([whole.detach().view(1), *(one.detach().float().flatten() for one in found_all)])
