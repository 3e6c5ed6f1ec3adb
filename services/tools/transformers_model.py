"""A checkpoint as transformers' NemotronHForCausalLM in float32, to measure it with an implementation that is not ours.

Owns names and the one departure from transformers: its mixer clamps dt in prefill only, so the limit is taken off.
"""

import importlib.util
import re
from typing import Any

import torch
from torch import Tensor

from services.engine.checkpoint import Checkpoint
from services.engine.model_config import language_config, read_config
from services.engine.weights import expert_name, expert_tensors, read_linear

TRANSFORMERS = "5.24.0"


class TransformersError(Exception):
    """transformers is not installed. The message says how to get it."""

    code = "no_transformers"


_QUANTISATION_KEYS = ("quantization_config", "architectures", "torch_dtype", "dtype")


def load(checkpoint: Checkpoint) -> Any:
    """The model, in evaluation mode, all of it in memory as float32. Raises TransformersError without the package."""
    if importlib.util.find_spec("transformers") is None:
        raise TransformersError(f"this command needs transformers: pip install transformers=={TRANSFORMERS}")
    from transformers import NemotronHConfig, NemotronHForCausalLM

    raw = language_config(read_config(checkpoint.folder))
    config = NemotronHConfig(**{key: value for key, value in raw.items() if key not in _QUANTISATION_KEYS})
    with torch.device("meta"):
        model = NemotronHForCausalLM(config)
    model.load_state_dict(state_dict(checkpoint), strict=True, assign=True)
    for layer in model.model.layers:
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    model.requires_grad_(False).eval()  # type: ignore[no-untyped-call]
    return model


def state_dict(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """float32 values under transformers' names; a layer's experts are one 3-D tensor each for up and down."""
    config, entries = checkpoint.config, checkpoint.tensors
    experts = expert_tensors(config).linears
    state: dict[str, Tensor] = {}
    for name in entries:
        linear, _, suffix = name.rpartition(".")
        if linear in experts or re.search(r"_scale(_2)?$", suffix):
            continue
        if linear in checkpoint.formats:
            state[_theirs(name)] = read_linear(entries, linear, checkpoint.formats[linear]).dequantise()
        else:
            state[_theirs(name)] = entries[name].read().to(torch.float32)
    for layer in config.moe_layers:
        for part in ("up_proj", "down_proj"):
            names = [f"{expert_name(layer, expert)}.{part}" for expert in range(config.experts)]
            values = [read_linear(entries, name, checkpoint.formats[name]).dequantise() for name in names]
            state[f"model.layers.{layer}.mixer.experts.{part}"] = torch.stack(values)
    return state


def _theirs(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"
