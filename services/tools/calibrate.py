"""The largest absolute inputs that a model's linears see on given texts: what static activation scales are made of.

Owns the watching; the model is transformers' (oracle.py). Names are canonical, without `.weight`.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from services.tools.texts import Window


@torch.inference_mode()
def largest_inputs(model: Any, windows: Iterable[Window]) -> dict[str, float]:
    """max|x| of every linear that saw a token, routed experts one by one."""
    largest: dict[str, float] = {}

    def see(name: str, x: Tensor) -> None:
        if x.numel():
            largest[name] = max(largest.get(name, 0.0), float(x.abs().amax()))

    def watch_linear(name: str) -> Any:
        return lambda module, inputs: see(name, inputs[0])

    def watch_experts(name: str) -> Any:
        def watch(module: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
            x, ids, _ = inputs
            for expert in torch.unique(ids).tolist():
                tokens = x[(ids == expert).any(dim=-1)]
                see(f"{name}.{expert}.up_proj", tokens)
                see(f"{name}.{expert}.down_proj", module.act_fn(tokens @ module.up_proj[expert].T))

        return watch

    hooks = []
    for name, module in model.named_modules():
        canonical = name.removeprefix("model.")
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(watch_linear(canonical)))
        elif canonical.endswith(".mixer.experts"):
            hooks.append(module.register_forward_pre_hook(watch_experts(canonical)))
    try:
        for window in windows:
            model(input_ids=torch.tensor([window.ids]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return largest
