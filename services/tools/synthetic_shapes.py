"""Shapes of models that need no checkpoint: Super's exact one, and one of the same parts that takes seconds.

Owns the two shapes and which linear is in which format: the recipe of 3.5 (Mamba FP8, shared experts and lm_head NVFP4,
the rest BF16), and 3-Super's as `repack --dense fp8` leaves it. Owns no value of any weight.
"""

from dataclasses import replace
from typing import Literal

from services.engine.gpu.ledger import Layout
from services.engine.model_config import LAYER_WORDS, ModelConfig
from services.engine.weights import Format, Shape, dense_tensors, draft_tensors

Recipe = Literal["3.5", "3-fp8"]

SUPER = ModelConfig(
    vocab_size=131072,
    hidden_size=4096,
    layers=tuple(
        LAYER_WORDS[word]
        for word in "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    norm_eps=1e-5,
    context_tokens=262144,
    attention_heads=32,
    kv_heads=2,
    head_dim=128,
    mamba_heads=128,
    mamba_head_dim=64,
    mamba_state=128,
    mamba_groups=8,
    conv_kernel=4,
    experts=512,
    experts_per_token=22,
    expert_width=2688,
    latent_size=1024,
    shared_width=5376,
    routed_scale=5.0,
    norm_topk=True,
)
SMALL = ModelConfig(
    vocab_size=4096,  # the demo's, so that its tokenizer and template fit
    hidden_size=128,
    layers=tuple(LAYER_WORDS[word] for word in "MEM*EME"),
    norm_eps=1e-5,
    context_tokens=4096,
    attention_heads=4,
    kv_heads=2,
    head_dim=32,
    mamba_heads=4,
    mamba_head_dim=32,
    mamba_state=32,
    mamba_groups=2,
    conv_kernel=4,
    experts=32,
    experts_per_token=6,
    expert_width=128,
    latent_size=128,
    shared_width=256,
    routed_scale=2.5,
    norm_topk=True,
)
SUPER_256 = replace(SUPER, experts=256)  # half of the experts: what another engine was measured with
SHAPES = {"super": SUPER, "super-256": SUPER_256, "small": SMALL}
RECIPES: tuple[Recipe, ...] = ("3.5", "3-fp8")


def linear_format(name: str, recipe: Recipe) -> Format:
    """Of a linear by its canonical name without `.weight`."""
    part = name.partition(".mixer.")[2] or name
    if part in ("in_proj", "out_proj"):
        return "FP8"
    if part in ("shared_experts.up_proj", "shared_experts.down_proj", "lm_head"):
        return "W4A16_NVFP4" if recipe == "3.5" else "FP8"
    return "FP8" if recipe == "3-fp8" and part.endswith("_latent_proj") else "BF16"


def draft_layout(config: ModelConfig) -> Layout:
    """Every tensor of the multi-token-prediction block's file, in BF16 as it is published."""
    expected = draft_tensors(config)
    layout: dict[str, tuple[str, Shape]] = {
        f"{name}.weight": ("BF16", shape) for name, shape in expected.linears.items()
    }
    return layout | {
        name: ("F32" if name.endswith("correction_bias") else "BF16", shape) for name, shape in expected.plain.items()
    }


def dense_layout(config: ModelConfig, recipe: Recipe = "3.5") -> Layout:
    """Every tensor of a store's dense file."""
    expected = dense_tensors(config)
    layout: dict[str, tuple[str, Shape]] = {
        name: ("F32" if name.endswith("correction_bias") else "BF16", shape) for name, shape in expected.plain.items()
    }
    for name, (rows, columns) in expected.linears.items():
        form = linear_format(name, recipe)
        if form == "W4A16_NVFP4":
            layout[f"{name}.weight"] = ("U8", (rows, columns // 2))
            layout[f"{name}.weight_scale"] = ("F8_E4M3", (rows, columns // 16))
            layout[f"{name}.weight_scale_2"] = ("F32", ())
        elif form == "FP8":
            layout[f"{name}.weight"] = ("F8_E4M3", (rows, columns))
            layout[f"{name}.weight_scale"] = ("F32", ())
        else:
            layout[f"{name}.weight"] = (form, (rows, columns))
    return layout
