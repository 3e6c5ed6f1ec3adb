"""A small random checkpoint in ModelOpt's exact layout on disk, in the style of 3-Super or of 3.5-Super-VL.

    python -m services.tools.small_checkpoint FOLDER [3-super | 3.5-super-vl | 3.5-super-vl-export]

All styles of one seed hold the same language model and multi-token-prediction block; the two of 3.5 differ in the
names of their vision tensors. Every format occurs: experts NVFP4, and the other linears by the table below, mixed as
3-Super's are. Written with the safetensors package, so that our own reader is not tested by our own writer.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.tools import small_vision

Style = Literal["3-super", "3.5-super-vl", "3.5-super-vl-export"]
Tensors = dict[str, Tensor]

PATTERN = "MEM*E"
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_latent_size": 32,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 96,
    "intermediate_size": 48,
    "routed_scaling_factor": 5.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 512,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
}

# Linears that are neither routed experts nor BF16.
QUANTISED = {
    "layers.0.mixer.in_proj": "FP8",
    "layers.0.mixer.out_proj": "FP8",
    "layers.1.mixer.fc1_latent_proj": "FP8",
    "layers.1.mixer.fc2_latent_proj": "FP8",
    "layers.1.mixer.shared_experts.up_proj": "FP8",
    "layers.1.mixer.shared_experts.down_proj": "NVFP4",
    "layers.2.mixer.out_proj": "FP8",
    "layers.3.mixer.o_proj": "FP8",
    "layers.4.mixer.shared_experts.down_proj": "FP8",
    "lm_head": "W4A16_NVFP4",
}

WORDS = ["system", "user", "assistant", "<end>", "one", "two", "three", "four", "five", "and", "is", "more"]
TEMPLATE = """{% for m in messages %}{{ m.role }} {{ m.content }} <end>
{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"""


def write(
    folder: Path,
    style: Style = "3-super",
    seed: int = 0,
    edit: Callable[[dict[str, Any], Tensors], None] = lambda config, tensors: None,
    vocabulary: int = 96,
    formats: Mapping[str, str] = QUANTISED,
) -> Path:
    """Write a checkpoint; `edit` may change the config and the tensors (names as on disk) first.

    `formats`: of linears that are neither routed experts nor BF16. `vocabulary` in ids.
    """
    folder.mkdir(parents=True)
    sizes = {**SIZES, "vocab_size": vocabulary}
    language, formats = language_model(seed, vocabulary, formats)
    quantised = {f"{_body(name)}": _entry(form) for name, form in formats.items() if form != "BF16"}
    quant = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": quantised}
    tensors = {_body(name): tensor for name, tensor in language.items()} | _mtp(seed)
    config: dict[str, Any]
    if style == "3-super":
        config = {
            "architectures": ["NemotronHForCausalLM"],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": PATTERN,
            "num_hidden_layers": len(PATTERN),
            "norm_eps": 1e-5,
            "rope_theta": 10000,
            "eos_token_id": 2,
            **sizes,
        }
    else:
        words = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
        language_config = {**sizes, "layers_block_type": [words[c] for c in PATTERN], "eos_token_id": 11}
        config = {
            "architectures": ["NemotronH_Omni_Reasoning_V3"],
            "model_type": "nemotron_h_omni",
            "llm_config": language_config,
            "sound_config": None,
            **small_vision.CONFIG,
        }
        # As newer exports do: all experts of a layer under one name, what is left alone under wildcards.
        merged = {re.sub(r"\.experts\.\d+\..*", ".experts", name): entry for name, entry in quantised.items()}
        quant["quantized_layers"] = {f"language_model.{name}": entry for name, entry in merged.items()}
        quant["exclude_modules"] = ["*.mtp*", "vision_model*", "*norm*"]
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        layout: small_vision.Layout = "export" if style.endswith("export") else "original"
        tensors |= small_vision.tensors(layout, SIZES["hidden_size"], seed)
    excluded = quant.get("exclude_modules", [])
    config["quantization_config"] = {"quant_method": "modelopt", "ignore": excluded, **quant}
    edit(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": quant}))
    _save(folder, tensors, shards=1 if style == "3-super" else 3)
    return folder


def write_unquantised(folder: Path, seed: int = 0) -> Path:
    """The same shapes in BF16 alone, flat config, with a tokenizer of a few words and a plain template."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    language, formats = language_model(seed)
    tensors = {_body(name): value for name, value in language.items() if name.rpartition(".")[0] not in formats}
    for name in formats:
        rows, columns = language[f"{name}.weight"].shape
        columns *= 2 if language[f"{name}.weight"].dtype == torch.uint8 else 1
        tensors[_body(f"{name}.weight")] = _linear(rows, columns, "BF16", random)["weight"]
    tensors = {name: value for name, value in tensors.items() if not name.endswith(("k_scale", "v_scale"))}
    save_file(tensors, folder / "model.safetensors")
    names = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    (folder / "config.json").write_text(json.dumps({**names, "hybrid_override_pattern": PATTERN, **SIZES}))
    vocabulary = {word: i for i, word in enumerate(["<unk>", *WORDS])}
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def language_model(
    seed: int, vocabulary: int = 96, quantised: Mapping[str, str] = QUANTISED
) -> tuple[Tensors, dict[str, str]]:
    """Tensors by canonical name, and the format of every linear."""
    random = torch.Generator().manual_seed(seed)
    tensors: Tensors = {}
    formats: dict[str, str] = {}
    hidden, vocab, latent, width, shared = 64, vocabulary, 32, 48, 96
    inner, channels = 64, 64 + 2 * 2 * 16

    def plain(
        name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 0.2, mean: float = 0
    ) -> None:
        tensors[name] = (torch.randn(shape, generator=random) * spread + mean).to(dtype)

    def linear(name: str, rows: int, columns: int, form: str) -> None:
        formats[name] = form
        tensors.update({f"{name}.{k}": v for k, v in _linear(rows, columns, form, random).items()})

    plain("embeddings.weight", vocab, hidden, spread=1)
    plain("norm_f.weight", hidden, mean=1)
    linear("lm_head", vocab, hidden, quantised.get("lm_head", "BF16"))
    for index, layer in enumerate(PATTERN):
        plain(f"layers.{index}.norm.weight", hidden, mean=1)
        mixer = f"layers.{index}.mixer."
        if layer == "M":
            plain(mixer + "conv1d.weight", channels, 1, 4, spread=0.5)
            plain(mixer + "conv1d.bias", channels)
            plain(mixer + "norm.weight", inner, mean=1)
            for name in ("A_log", "D", "dt_bias"):
                plain(mixer + name, 4, spread=1)
            shapes = {"in_proj": (inner + channels + 4, hidden), "out_proj": (hidden, inner)}
        elif layer == "*":
            shapes = {"q_proj": (64, hidden), "k_proj": (32, hidden), "v_proj": (32, hidden), "o_proj": (hidden, 64)}
            tensors[mixer + "k_proj.k_scale"] = torch.tensor(0.01)
            tensors[mixer + "v_proj.v_scale"] = torch.tensor(0.02)
        else:
            plain(mixer + "gate.weight", 8, hidden)
            plain(mixer + "gate.e_score_correction_bias", 8, dtype=torch.float32)
            shapes = {"fc1_latent_proj": (latent, hidden), "fc2_latent_proj": (hidden, latent)}
            shapes |= {"shared_experts.up_proj": (shared, hidden), "shared_experts.down_proj": (hidden, shared)}
            for expert in range(8):
                linear(f"{mixer}experts.{expert}.up_proj", width, latent, "NVFP4")
                linear(f"{mixer}experts.{expert}.down_proj", latent, width, "NVFP4")
        for name, (rows, columns) in shapes.items():
            linear(mixer + name, rows, columns, quantised.get(mixer + name, "BF16"))
    return tensors, formats


def _linear(rows: int, columns: int, form: str, random: torch.Generator) -> Tensors:
    """Random tensors whose weights are about as large as a trained model's."""
    if form == "BF16":
        return {"weight": (torch.randn(rows, columns, generator=random) * columns**-0.5).to(torch.bfloat16)}
    input_scale = {"input_scale": torch.rand((), generator=random) * 0.01 + 0.001}
    if form == "FP8":
        values = (torch.randn(rows, columns, generator=random) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": torch.tensor(0.01 * columns**-0.5), **input_scale}
    codes = torch.randint(0, 256, (rows, columns // 2), generator=random, dtype=torch.uint8)
    # E4M3 codes from 2^-3 to 2^3, and some zeros.
    scales = torch.randint(0x20, 0x50, (rows, columns // 16), generator=random, dtype=torch.uint8)
    scales[torch.rand(scales.shape, generator=random) < 0.05] = 0
    packed = {"weight": codes, "weight_scale": scales.view(torch.float8_e4m3fn)}
    packed["weight_scale_2"] = 0.1 * columns**-0.5 * (1 + torch.rand((), generator=random))
    return packed | (input_scale if form == "NVFP4" else {})


def _mtp(seed: int) -> Tensors:
    """The block's tensors, all BF16: an attention layer, then an MoE layer, with norms around."""
    random = torch.Generator().manual_seed(seed + 1)
    hidden, latent, width, shared = 64, 32, 48, 96
    shapes: dict[str, tuple[int, ...]] = {f"0.{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
    shapes |= {"0.eh_proj.weight": (hidden, 2 * hidden)}
    shapes |= {
        f"0.mixer.{name}_proj.weight": (rows, hidden) for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))
    }
    shapes |= {"1.norm.weight": (hidden,), "1.final_layernorm.weight": (hidden,), "1.mixer.gate.weight": (8, hidden)}
    shapes |= {"1.mixer.gate.e_score_correction_bias": (8,), "1.mixer.fc1_latent_proj.weight": (latent, hidden)}
    shapes |= {"1.mixer.fc2_latent_proj.weight": (hidden, latent)}
    for name, neurons, inputs in (
        ("shared_experts", shared, hidden),
        *((f"experts.{e}", width, latent) for e in range(8)),
    ):
        shapes |= {
            f"1.mixer.{name}.up_proj.weight": (neurons, inputs),
            f"1.mixer.{name}.down_proj.weight": (inputs, neurons),
        }
    return {
        f"mtp.layers.{name}": torch.randn(shape, generator=random).to(
            torch.float32 if "bias" in name else torch.bfloat16
        )
        for name, shape in shapes.items()
    }


def _body(name: str) -> str:
    return name if name.startswith("lm_head") else f"backbone.{name}"


def _entry(form: str) -> dict[str, Any]:
    return {"quant_algo": form, "group_size": 16} if "NVFP4" in form else {"quant_algo": form}


def _save(folder: Path, tensors: Tensors, shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = sorted(tensors)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


if __name__ == "__main__":
    chosen = sys.argv[2] if len(sys.argv) > 2 else "3-super"
    if len(sys.argv) < 2 or chosen not in get_args(Style):
        sys.exit(f"usage: python -m services.tools.small_checkpoint FOLDER [{' | '.join(get_args(Style))}]")
    print(write(Path(sys.argv[1]), chosen))  # type: ignore[arg-type]
