"""The sizes that can be trained: the demo's, and one for tests. Owns config.json, recipe and mixture."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.engine.model_config import language_config, read_config

DEMO = Path(__file__).parents[3] / "demo"
MIXTURE: dict[str, Any] = json.loads((Path(__file__).parent / "mixture.json").read_text(encoding="utf-8"))

# Fewer experts than the committed checkpoint's first version, so that draft block and tower fit beside them in 24 MB.
_DEMO: dict[str, Any] = {"n_routed_experts": 48}
_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "hybrid_override_pattern": "ME*ME",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "chunk_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class Recipe:
    """Learning rates fall on a cosine from the first to the second number of a stage."""

    rows: int
    tokens: int
    warm_up_steps: int
    rates: dict[str, tuple[float, float]]
    balance: dict[str, float]  # what a step adds to the bias of an expert that has too little
    # The corpus is read twenty times over. With a decay of 0.1 and nothing dropped, what had been read was known by
    # heart: 2.35 nats a token where books never seen took 2.98.
    weight_decay: float = 0.8  # of matrices but routers and convolutions
    drop: tuple[float, float, float] = (0.1, 0.1, 0.0)  # by stage; sums and copies get exact without
    clip: float = 1.0
    draft_weight: float = 0.3


RECIPES = {
    "demo": Recipe(
        64,
        1024,
        150,
        {"pretrain": (3e-3, 1.5e-3), "chat": (1.5e-3, 3e-4), "quantise": (3e-4, 0.0)},
        {"pretrain": 1e-3, "chat": 3e-4, "quantise": 1e-4},
    ),
    "tiny": Recipe(
        8,
        64,
        10,
        {"pretrain": (5e-3, 2e-3), "chat": (2e-3, 1e-3), "quantise": (1e-3, 0.0)},
        {"pretrain": 3e-3, "chat": 1e-3, "quantise": 1e-4},
    ),
}
STAGES = ("pretrain", "chat", "quantise")


def config(size: str) -> dict[str, Any]:
    """config.json of a checkpoint that is not quantised, with the draft block named as the real model's is."""
    raw = dict(language_config(read_config(DEMO)))
    raw.pop("quantization_config", None)
    raw |= {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"} | _DEMO
    if size == "tiny":
        raw |= _TINY
    raw["num_hidden_layers"] = len(raw["hybrid_override_pattern"])
    return raw


def write_config(run: Path, size: str) -> None:
    (run / "config.json").write_text(json.dumps(config(size), indent=1) + "\n", encoding="utf-8")
