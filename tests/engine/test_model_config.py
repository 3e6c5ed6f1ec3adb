"""The model's shape from config.json: every way of writing it, and every refusal names its key."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.errors import CheckpointError
from services.engine.model_config import ModelConfig

SUPER_PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
SUPER: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "hidden_size": 4096,
    "hybrid_override_pattern": SUPER_PATTERN,
    "num_hidden_layers": 88,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 262144,
}


def as_super_vl(words: dict[str, str], nested: str = "llm_config") -> dict[str, Any]:
    language = {k: v for k, v in SUPER.items() if k not in ("architectures", "model_type", "num_hidden_layers")}
    del language["rope_theta"], language["partial_rotary_factor"], language["norm_eps"]
    language["layers_block_type"] = [words[letter] for letter in language.pop("hybrid_override_pattern")]
    architecture = {"architectures": ["NemotronH_Omni_Reasoning_V3"], "model_type": "nemotron_h_omni"}
    return {**architecture, nested: language, "sound_config": None}


def test_super_has_the_published_sizes() -> None:
    config = ModelConfig.from_hf(SUPER)
    assert len(config.layers) == 88
    assert (len(config.mamba_layers), len(config.moe_layers)) == (40, 40)
    assert config.attention_layers == (7, 16, 25, 36, 47, 58, 69, 78)
    assert config.in_proj_rows == 18560
    assert config.conv_channels == 10240
    assert config.mamba_inner == 8192
    assert config.block.block_bytes == 3_096_576


@pytest.mark.parametrize("nested", ["llm_config", "text_config"])
@pytest.mark.parametrize(
    "words",
    [
        {"M": "mamba", "E": "moe", "*": "attention"},
        {"M": "linear_attention", "E": "moe", "*": "full_attention"},
    ],
    ids=["mamba", "linear_attention"],
)
def test_every_way_of_writing_it_is_one_config(words: dict[str, str], nested: str) -> None:
    assert ModelConfig.from_hf(as_super_vl(words, nested)) == ModelConfig.from_hf(SUPER)


def test_a_flat_config_may_list_its_layers() -> None:
    listed = {k: v for k, v in SUPER.items() if k not in ("hybrid_override_pattern", "num_hidden_layers")}
    listed["layer_types"] = [{"M": "mamba", "E": "moe", "*": "attention"}[c] for c in SUPER_PATTERN]
    assert ModelConfig.from_hf(listed) == ModelConfig.from_hf(SUPER)


def test_rope_keys_change_nothing() -> None:
    assert ModelConfig.from_hf({**SUPER, "rope_theta": 5e6}) == ModelConfig.from_hf(SUPER)


def test_json_keeps_everything() -> None:
    config = ModelConfig.from_hf(SUPER)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"moe_latent_size": None}, "moe_latent_size"),
        ({"moe_latent_size": 48}, "multiple of 32"),
        ({"moe_intermediate_size": 2690}, "width"),
        ({"num_experts_per_tok": 600}, "600 experts per token"),
        ({"num_key_value_heads": 3}, "kv_heads"),
        ({"n_groups": 7}, "mamba_groups"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon and norm_eps differ"),
        ({"layer_norm_epsilon": None, "norm_eps": None}, "layer_norm_epsilon or norm_eps"),
        ({"layer_norm_epsilon": -1.0, "norm_eps": -1.0}, "norm_eps"),
        ({"routed_scaling_factor": float("inf")}, "routed_scale"),
        ({"routed_scaling_factor": "5"}, "routed_scaling_factor"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"num_hidden_layers": 87}, "num_hidden_layers"),
        ({"hybrid_override_pattern": "ME-"}, "unknown layer '-'"),
        ({"hybrid_override_pattern": "M*", "num_hidden_layers": 2}, "no moe layer"),
        ({"layers_block_type": ["mamba"] * 88}, "describe different layers"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"n_group": 8}, "n_group"),
        ({"use_conv_bias": False}, "use_conv_bias"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"sliding_window": 1024}, "sliding_window"),
        ({"text_config": {}, "llm_config": {"vocab_size": 1}}, "llm_config and text_config"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_this_engine_does_not_compute_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        ModelConfig.from_hf({**SUPER, **change})


@pytest.mark.parametrize("key", [k for k in SUPER if k not in ("architectures", "model_type", "num_hidden_layers")])
def test_a_missing_key_is_named_or_has_a_harmless_meaning(key: str) -> None:
    config = copy.deepcopy(SUPER)
    del config[key]
    if key in ("rope_theta", "partial_rotary_factor", "norm_eps", "layer_norm_epsilon", "norm_topk_prob"):
        assert ModelConfig.from_hf(config) == ModelConfig.from_hf(SUPER)
    else:
        with pytest.raises(CheckpointError, match=key):
            ModelConfig.from_hf(config)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelConfig.read(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found"):
        ModelConfig.read(tmp_path)


def test_a_stored_config_with_other_keys_is_refused() -> None:
    stored = ModelConfig.from_hf(SUPER).to_json()
    with pytest.raises(CheckpointError, match="extra"):
        ModelConfig.from_json({**stored, "extra": 1})
    with pytest.raises(CheckpointError, match="layers"):
        ModelConfig.from_json({**stored, "layers": ["mamba", "M"]})
