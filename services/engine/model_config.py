"""The model's shape, normalised from a checkpoint's config.json. Owns no tensor and no quantisation format.

Accepts the language model's keys at top level or under `llm_config`/`text_config`, the layers as a pattern string
(`hybrid_override_pattern`: M, E, *) or as a list in either vocabulary (mamba/moe/attention or
linear_attention/moe/full_attention). RoPE keys are present in some configs and never used by the model: ignored.
Whatever would change the arithmetic in a way this engine does not compute is refused, with the key's name.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kernels.block import BlockLayout
from services.engine.errors import CheckpointError
from services.engine.parsing import parse_json

Layer = Literal["mamba", "moe", "attention"]

ARCHITECTURES = ("NemotronHForCausalLM", "NemotronH_Omni_Reasoning_V3")
MODEL_TYPES = ("nemotron_h", "nemotron_h_omni")
NESTED = ("llm_config", "text_config")
LAYER_WORDS: dict[str, Layer] = {
    "M": "mamba",
    "mamba": "mamba",
    "linear_attention": "mamba",
    "E": "moe",
    "moe": "moe",
    "*": "attention",
    "attention": "attention",
    "full_attention": "attention",
}

# Keys whose other values would mean arithmetic that this engine does not do. Absent is read as the value here.
FIXED: dict[str, Any] = {
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": None,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes are counts of elements. Layer indices count all layers from 0; `moe_layers[i]` is MoE layer i's index."""

    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm_eps: float
    context_tokens: int  # informational: the model has no positions

    attention_heads: int
    kv_heads: int
    head_dim: int

    mamba_heads: int
    mamba_head_dim: int
    mamba_state: int  # state columns of each head
    mamba_groups: int  # B and C are shared by mamba_heads / mamba_groups heads
    conv_kernel: int

    experts: int
    experts_per_token: int
    expert_width: int  # neurons of a routed expert
    latent_size: int  # inputs and outputs of a routed expert
    shared_width: int  # neurons of the shared expert
    routed_scale: float  # multiplies the normalised router weights
    norm_topk: bool

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise CheckpointError(f"config: {field.name} is {value!r}, expected a positive whole number")
        for name in ("norm_eps", "routed_scale"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise CheckpointError(f"config: {name} is {value!r}, expected a positive finite number")
        if not self.layers or any(layer not in get_args(Layer) for layer in self.layers):
            raise CheckpointError(f"config: layers {self.layers!r} must be a non-empty list of {get_args(Layer)}")
        if "moe" not in self.layers:
            raise CheckpointError("config: no moe layer; this engine is for mixture-of-experts models")
        for whole, part in (
            ("attention_heads", "kv_heads"),
            ("mamba_heads", "mamba_groups"),
            ("mamba_inner", "mamba_groups"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise CheckpointError(
                    f"config: {whole} ({getattr(self, whole)}) is not a multiple of {part} ({getattr(self, part)})"
                )
        if self.experts_per_token > self.experts:
            raise CheckpointError(
                f"config: {self.experts_per_token} experts per token, but only {self.experts} experts"
            )
        try:
            _ = self.block
        except ValueError as error:
            raise CheckpointError(f"config: {error}") from error

    @property
    def block(self) -> BlockLayout:
        return BlockLayout(latent=self.latent_size, width=self.expert_width)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return self._indices("moe")

    @property
    def mamba_layers(self) -> tuple[int, ...]:
        return self._indices("mamba")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return self._indices("attention")

    @property
    def mamba_inner(self) -> int:
        return self.mamba_heads * self.mamba_head_dim

    @property
    def conv_channels(self) -> int:
        """Rows of the convolution: x, then B, then C."""
        return self.mamba_inner + 2 * self.mamba_groups * self.mamba_state

    @property
    def in_proj_rows(self) -> int:
        """z, then the convolution's channels, then one dt a head."""
        return self.mamba_inner + self.conv_channels + self.mamba_heads

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "layers": list(self.layers)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `to_json`. Raises CheckpointError on unknown, missing or wrong values."""
        known = {field.name for field in dataclasses.fields(ModelConfig)}
        if set(values) != known:
            raise CheckpointError(f"config: unexpected or missing keys {sorted(set(values) ^ known)}")
        return ModelConfig(**{**values, "layers": tuple(values["layers"])})

    @staticmethod
    def read(folder: Path) -> "ModelConfig":
        """From `folder`/config.json. Raises CheckpointError if it is missing, not JSON, or not a model of ours."""
        return ModelConfig.from_hf(read_config(folder))

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ModelConfig":
        """From a config.json's content, nested or flat. Raises CheckpointError that names the key."""
        check_architecture(config)
        lm = language_config(config)
        for key, only in FIXED.items():
            if lm.get(key, only) != only:
                raise CheckpointError(f"config: {key} is {lm[key]!r}; this engine computes only {only!r}")
        return ModelConfig(
            vocab_size=_whole(lm, "vocab_size"),
            hidden_size=_whole(lm, "hidden_size"),
            layers=_layers(lm),
            norm_eps=_number(lm, "layer_norm_epsilon", "norm_eps", "rms_norm_eps"),
            context_tokens=_whole(lm, "max_position_embeddings"),
            attention_heads=_whole(lm, "num_attention_heads"),
            kv_heads=_whole(lm, "num_key_value_heads"),
            head_dim=_whole(lm, "head_dim"),
            mamba_heads=_whole(lm, "mamba_num_heads"),
            mamba_head_dim=_whole(lm, "mamba_head_dim"),
            mamba_state=_whole(lm, "ssm_state_size"),
            mamba_groups=_whole(lm, "n_groups"),
            conv_kernel=_whole(lm, "conv_kernel"),
            experts=_whole(lm, "n_routed_experts"),
            experts_per_token=_whole(lm, "num_experts_per_tok"),
            expert_width=_whole(lm, "moe_intermediate_size"),
            latent_size=_whole(lm, "moe_latent_size"),
            shared_width=_whole(lm, "moe_shared_expert_intermediate_size"),
            routed_scale=_number(lm, "routed_scaling_factor"),
            norm_topk=_flag(lm, "norm_topk_prob", absent=True),
        )

    def _indices(self, kind: Layer) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer == kind)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `folder`/config.json. Raises CheckpointError if it is missing or not a JSON object."""
    path = folder / "config.json"
    try:
        config = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found; give the folder that holds the checkpoint's config.json") from error
    except OSError as error:
        why = error.strerror or error
        raise CheckpointError(f"{path}: cannot be read: {why}; give the checkpoint's folder") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; fetch the checkpoint again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(config).__name__}")
    return config


def check_architecture(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the config names an architecture that this engine runs."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f"config: architectures is {names!r}, expected a list of names")
    if config.get("model_type") in MODEL_TYPES or any(name in ARCHITECTURES for name in names):
        return
    raise CheckpointError(
        f"config: architectures {names!r}, model_type {config.get('model_type')!r} is not a model of ours; "
        f"expected one of {', '.join(ARCHITECTURES)}"
    )


def language_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object that holds the language model's keys."""
    nested = [key for key in NESTED if isinstance(config.get(key), dict)]
    if len(nested) > 1 and config[nested[0]] != config[nested[1]]:
        raise CheckpointError(f"config: both {' and '.join(nested)} are present and differ")
    return config[nested[0]] if nested else config


def _layers(lm: Mapping[str, Any]) -> tuple[Layer, ...]:
    spellings = {key: lm[key] for key in ("hybrid_override_pattern", "layers_block_type", "layer_types") if lm.get(key)}
    if not spellings:
        raise CheckpointError("config: neither hybrid_override_pattern nor layers_block_type is present")
    read: dict[str, tuple[Layer, ...]] = {}
    for key, words in spellings.items():
        if not isinstance(words, str | list):
            raise CheckpointError(f"config: {key} is {words!r}, expected a list of layers")
        unknown = [word for word in words if not isinstance(word, str) or word not in LAYER_WORDS]
        if unknown:
            raise CheckpointError(
                f"config: {key} has the unknown layer {unknown[0]!r}; known: {', '.join(LAYER_WORDS)}"
            )
        read[key] = tuple(LAYER_WORDS[word] for word in words)
    if len(set(read.values())) > 1:
        raise CheckpointError(f"config: {' and '.join(read)} describe different layers")
    layers = next(iter(read.values()))
    count = lm.get("num_hidden_layers")
    if count is not None and count != len(layers):
        raise CheckpointError(f"config: num_hidden_layers is {count}, but {next(iter(read))} lists {len(layers)}")
    return layers


def _whole(lm: Mapping[str, Any], key: str) -> int:
    value = lm.get(key)
    if type(value) is not int or value < 1:
        found = "missing" if key not in lm else repr(value)
        raise CheckpointError(f"config: {key} is {found}, expected a positive whole number")
    return value


_MOST = 10**30  # of any whole number in a config: JSON has some that no float can be


def _number(lm: Mapping[str, Any], *keys: str) -> float:
    present = [key for key in keys if lm.get(key) is not None]
    if not present:
        raise CheckpointError(f"config: {' or '.join(keys)} is missing")
    for key in present:
        value = lm[key]
        if type(value) not in (int, float) or (type(value) is int and abs(value) > _MOST):
            raise CheckpointError(f"config: {key} is {str(value)[:40]}, expected a number")
    values = {float(lm[key]) for key in present}
    if len(values) > 1:
        raise CheckpointError(f"config: {' and '.join(present)} differ: {sorted(values)}")
    return values.pop()


def _flag(lm: Mapping[str, Any], key: str, absent: bool) -> bool:
    value = lm.get(key, absent)
    if type(value) is not bool:
        raise CheckpointError(f"config: {key} is {value!r}, expected true or false")
    return value
