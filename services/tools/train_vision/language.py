"""The checkpoint's language model, frozen: the network that train_demo trains, with the quantised weights' values.

Faster than transformers' by far, and gradients flow through it to the rows that stand for a picture. Owns no tower.
"""

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from services.engine.errors import CheckpointError
from services.engine.model_config import ModelConfig, read_config
from services.engine.names import canonical
from services.tools import oracle
from services.tools.train_demo import network
from services.tools.train_demo.fused import Fused, compiled

_ATTEMPTS = (("mamba", "attention", "moe"), ("mamba", "attention"), ("mamba",))
_ALIKE = 0.9  # cosine of gradients: rounding makes routers choose otherwise here and there, what is wrong gives near 0


class Language(nn.Module):
    def __init__(self, checkpoint: Path, precision: torch.dtype) -> None:
        """Raises CheckpointError if the checkpoint is not of a model that train_demo makes."""
        super().__init__()
        self.fused: Fused | None = None  # used where gradients are wanted
        self._network = network.Network(ModelConfig.from_hf(read_config(checkpoint)))
        _, unknown = self._network.load_state_dict(values := _values(checkpoint), strict=False)
        lacking = {name for name in self._network.state_dict() if not name.startswith("mtp.")} - values.keys()
        if unknown or lacking:
            raise CheckpointError(f"{checkpoint}: no model of train-demo's: {sorted({*unknown, *lacking})[:3]}")
        for module in self._network.modules():
            if isinstance(module, network.Linear | network.Experts):  # which are used in this precision anyway
                module.to(precision)
        self.requires_grad_(False)

    def words(self, ids: Tensor) -> Tensor:
        """Embeddings float32 [rows, tokens, hidden] of ids [rows, tokens]."""
        rows: Tensor = self._network.embeddings(ids)
        return rows.float()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """Logits float32 [rows, places, vocabulary] at `places` (int64 [rows, places]); x as `words` gives it."""
        run = network.start(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), None, False)
        run.fused = self.fused if torch.is_grad_enabled() else None
        for layer in self._network.layers:
            x = layer(x, run)
        x = x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
        return self._network.logits(self._network.norm_f(x))

    def compile_layers(self, x: Tensor, say: Callable[[str], None]) -> None:
        """Layers as compiled functions for inputs as large as x, if that works and gives the same gradients here."""
        wanted = self._gradients(x)
        for names in _ATTEMPTS:
            began = time.monotonic()
            self.fused = compiled(torch.bfloat16, names)
            try:
                found = self._gradients(x)
            except Exception as error:  # whatever a compiler may raise
                why = f"{type(error).__name__}: {str(error)[:400]}"
            else:
                alike = float(torch.cosine_similarity(found, wanted, dim=0))
                if alike > _ALIKE:
                    say(f"compiled {', '.join(names)} in {time.monotonic() - began:.0f} s, gradients {alike:.4f}")
                    return
                why = f"gradients {alike:.4f}"
            say(f"not compiled: {', '.join(names)}: {why}")
        self.fused = None

    def _gradients(self, x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        last = torch.full((len(x), 1), x.shape[1] - 1, device=x.device)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = self(leaf, last).logsumexp(-1).sum()
        return torch.autograd.grad(loss, leaf)[0].double().flatten()


def _values(checkpoint: Path) -> dict[str, Tensor]:
    """By the network's names, without a draft block: a layer's experts are one tensor."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, array in oracle.dequantise(oracle.read(checkpoint)).items():
        ours = canonical(name)[1]
        value = torch.from_numpy(np.ascontiguousarray(array))
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight", ours):
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = value
        else:
            state[ours] = value
    return state | {
        name: torch.stack([numbered[i] for i in range(len(numbered))]) for name, numbered in experts.items()
    }
