"""The model's tensors: which there must be, in which of ModelOpt's formats each linear is, and what its values are.

Formats are decided per linear from what is in the files, never from a list of modules. Names are canonical: no
`language_model.`, no `backbone.` or `model.`. Owns no file and no expert block; see checkpoint.py and experts/store.py.

    format        weight                 weight_scale          weight_scale_2   input_scale
    NVFP4         U8 [N, K/2]            F8_E4M3 [N, K/16]     F32 []           F32 []
    W4A16_NVFP4   U8 [N, K/2]            F8_E4M3 [N, K/16]     F32 []
    FP8           F8_E4M3 [N, K]         F32 []                                 F32 [] (may be absent)
    BF16 F16 F32  that type [N, K]
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

import kernels.fp8.reference as fp8
import kernels.nvfp4.reference as nvfp4
from services.engine.errors import CheckpointError
from services.engine.model_config import ModelConfig
from services.engine.tensorfile import Entry

Format = Literal["NVFP4", "W4A16_NVFP4", "FP8", "BF16", "F16", "F32"]
Shape = tuple[int, ...]

FLOATS = ("BF16", "F16", "F32")
KV_SCALES = ("k_proj.k_scale", "v_proj.v_scale")
DRAFT_ATTENTION, DRAFT_MOE = "mtp.layers.0", "mtp.layers.1"  # the layers of the multi-token-prediction block


@dataclass(frozen=True)
class Expected:
    """Shapes of one part of the model: linears by name without `.weight`, other tensors by full name."""

    linears: dict[str, Shape]
    plain: dict[str, Shape]
    optional_scalars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Linear:
    """One linear's tensors as they are in the checkpoint, packed, so that a GPU can hold it as it is."""

    format: Format
    weight: Tensor
    weight_scale: Tensor | None = None
    weight_scale_2: Tensor | None = None
    input_scale: Tensor | None = None

    def dequantise(self) -> Tensor:
        """float32 [N, K]."""
        if self.format in ("NVFP4", "W4A16_NVFP4"):
            assert self.weight_scale is not None
            assert self.weight_scale_2 is not None
            return nvfp4.dequantise(self.weight, self.weight_scale, self.weight_scale_2)
        if self.format == "FP8":
            assert self.weight_scale is not None
            return fp8.dequantise(self.weight, self.weight_scale)
        return self.weight.to(torch.float32)


class DenseWeights:
    """Tensors that are no routed experts', read when asked for; the caller owns what it gets."""

    def __init__(
        self,
        entries: Mapping[str, Entry],
        config: ModelConfig,
        expected: Callable[[ModelConfig], "Expected"] | None = None,
    ) -> None:
        """Of the part of the model that is `expected`, by default all layers. Raises CheckpointError if a tensor is
        missing, unknown or misshapen."""
        self._entries = entries
        self.formats = check_tensors(entries, (expected or dense_tensors)(config))

    def linear(self, name: str) -> Linear:
        """A linear in its own format, by its name without `.weight` (`layers.0.mixer.in_proj`, `lm_head`)."""
        return read_linear(self._entries, name, self.formats[name])

    def plain(self, name: str) -> Tensor:
        """float32 values of a tensor that is never quantised, by its full name (`layers.0.norm.weight`)."""
        return self._entries[name].read().to(torch.float32)

    def entry(self, name: str) -> Entry:
        """Where a tensor lies, by its full name."""
        return self._entries[name]

    def scalar(self, name: str, absent: float) -> float:
        """An optional scalar (a KV scale), or `absent`."""
        return float(self.plain(name)) if name in self._entries else absent


def dense_tensors(config: ModelConfig) -> Expected:
    """Every tensor of the language model but the routed experts."""
    hidden, heads = config.hidden_size, config.mamba_heads
    linears: dict[str, Shape] = {"lm_head": (config.vocab_size, hidden)}
    plain: dict[str, Shape] = {"embeddings.weight": (config.vocab_size, hidden), "norm_f.weight": (hidden,)}
    optional = []
    for index, layer in enumerate(config.layers):
        mixer = f"layers.{index}.mixer."
        plain[f"layers.{index}.norm.weight"] = (hidden,)
        if layer == "mamba":
            linears[mixer + "in_proj"] = (config.in_proj_rows, hidden)
            linears[mixer + "out_proj"] = (hidden, config.mamba_inner)
            plain[mixer + "conv1d.weight"] = (config.conv_channels, 1, config.conv_kernel)
            plain[mixer + "conv1d.bias"] = (config.conv_channels,)
            plain[mixer + "norm.weight"] = (config.mamba_inner,)
            plain |= {mixer + name: (heads,) for name in ("A_log", "D", "dt_bias")}
        elif layer == "attention":
            linears |= _attention(mixer, config)
            optional += [mixer + name for name in KV_SCALES]
        else:
            plain |= _router(mixer, config)
            linears |= _around_experts(mixer, config)
    return Expected(linears, plain, tuple(optional))


def draft_tensors(config: ModelConfig) -> Expected:
    """Every tensor of the multi-token-prediction block but its routed experts: an attention layer, then a MoE layer."""
    hidden = config.hidden_size
    norms = [f"{DRAFT_ATTENTION}.{name}" for name in ("enorm", "hnorm", "norm")]
    norms += [f"{DRAFT_MOE}.{name}" for name in ("norm", "final_layernorm")]
    linears: dict[str, Shape] = {f"{DRAFT_ATTENTION}.eh_proj": (hidden, 2 * hidden)}
    linears |= _attention(f"{DRAFT_ATTENTION}.mixer.", config) | _around_experts(f"{DRAFT_MOE}.mixer.", config)
    plain: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms}
    return Expected(linears, plain | _router(f"{DRAFT_MOE}.mixer.", config))


def _attention(mixer: str, config: ModelConfig) -> dict[str, Shape]:
    hidden, query, kv = config.hidden_size, config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, query)}
    return {mixer + name: shape for name, shape in shapes.items()}


def _router(mixer: str, config: ModelConfig) -> dict[str, Shape]:
    weight, bias = (config.experts, config.hidden_size), (config.experts,)
    return {mixer + "gate.weight": weight, mixer + "gate.e_score_correction_bias": bias}


def _around_experts(mixer: str, config: ModelConfig) -> dict[str, Shape]:
    hidden, latent, shared = config.hidden_size, config.latent_size, config.shared_width
    shapes = {"fc1_latent_proj": (latent, hidden), "fc2_latent_proj": (hidden, latent)}
    shapes |= {"shared_experts.up_proj": (shared, hidden), "shared_experts.down_proj": (hidden, shared)}
    return {mixer + name: shape for name, shape in shapes.items()}


def expert_tensors(config: ModelConfig) -> Expected:
    """The routed experts' linears."""
    return _experts(config, [f"layers.{layer}" for layer in config.moe_layers])


def draft_expert_tensors(config: ModelConfig) -> Expected:
    """Those of the multi-token-prediction block."""
    return _experts(config, [DRAFT_MOE])


def _experts(config: ModelConfig, layers: Iterable[str]) -> Expected:
    up, down = (config.expert_width, config.latent_size), (config.latent_size, config.expert_width)
    linears: dict[str, Shape] = {}
    for layer in layers:
        for expert in range(config.experts):
            name = expert_name(layer, expert)
            linears |= {f"{name}.up_proj": up, f"{name}.down_proj": down}
    return Expected(linears, {})


def expert_name(layer: str, expert: int) -> str:
    """`layer` as its tensors are called: `layers.1`, of all layers, or DRAFT_MOE."""
    return f"{layer}.mixer.experts.{expert}"


def check_tensors(entries: Mapping[str, Entry], *parts: Expected) -> dict[str, Format]:
    """The format of every linear. Raises CheckpointError that names a missing, unknown or misshapen tensor."""
    formats: dict[str, Format] = {}
    used: set[str] = set()
    for part in parts:
        for name, shape in part.plain.items():
            _expect(entries, name, FLOATS, shape)
        used.update(part.plain)
        for name, shape in part.linears.items():
            formats[name] = _linear_format(entries, name, shape)
            used.update(linear_parts(name, formats[name], entries))
        for name in part.optional_scalars:
            if name in entries:
                _expect(entries, name, ("F32",), ())
                used.add(name)
    unknown = [name for name in entries if name not in used]
    if unknown:
        raise CheckpointError(
            f"tensor {unknown[0]}: unknown, and {len(unknown) - 1} more; expected none of that name in this model"
            if len(unknown) > 1
            else f"tensor {unknown[0]}: unknown; expected none of that name in this model"
        )
    return formats


def linear_parts(name: str, form: Format, entries: Iterable[str]) -> list[str]:
    """Full names of the tensors that make up a linear of this format."""
    suffixes = ["weight"]
    if form in ("NVFP4", "W4A16_NVFP4"):
        suffixes += ["weight_scale", "weight_scale_2"]
    if form == "FP8":
        suffixes += ["weight_scale"]
    if form == "NVFP4" or (form == "FP8" and f"{name}.input_scale" in entries):
        suffixes += ["input_scale"]
    return [f"{name}.{suffix}" for suffix in suffixes]


def read_linear(entries: Mapping[str, Entry], name: str, form: Format) -> Linear:
    """A linear's tensors. Raises CheckpointError if a scale is negative, zero where it may not be, or not finite."""
    tensors = {part.rpartition(".")[2]: entries[part].read() for part in linear_parts(name, form, entries)}
    for suffix, tensor in tensors.items():
        if suffix != "weight":
            check_scale(f"{name}.{suffix}", tensor)
    return Linear(form, **tensors)


def check_scale(name: str, scale: Tensor) -> None:
    """Raise CheckpointError unless a scale tensor holds only what the formulas take."""
    if scale.dtype == torch.float8_e4m3fn:
        # A sign bit or one of the two NaN codes; a block scale of zero is allowed, its weights are zeros. Compared by
        # numpy: torch's threads cost more than the comparison when many experts are packed at once.
        bad = torch.from_numpy(scale.view(torch.uint8).numpy() >= 0x7F)
        if not bad.numpy().any():
            return
        wanted = "no negative one and no NaN"
    else:
        bad = ~(torch.isfinite(scale) & (scale >= torch.finfo(torch.float32).tiny))
        wanted = "a positive finite normal number"
    if bad.any():
        raise CheckpointError(f"tensor {name}: found a scale of {scale[bad].float()[0].item()}, expected {wanted}")


def check_values(name: str, values: Tensor) -> None:
    """Raise CheckpointError if a tensor of weights holds a NaN or an infinity."""
    bad = ~torch.isfinite(values.float() if values.dtype == torch.float8_e4m3fn else values)
    if bad.any():
        raise CheckpointError(f"tensor {name}: found {values[bad][0].float().item()}, expected finite weights")


def _linear_format(entries: Mapping[str, Entry], name: str, shape: Shape) -> Format:
    weight = f"{name}.weight"
    rows, columns = shape
    if weight not in entries:
        raise CheckpointError(f"tensor {weight}: missing; the checkpoint is incomplete or of another model")
    dtype = entries[weight].dtype
    if dtype == "U8":
        if columns % nvfp4.GROUP:
            raise CheckpointError(
                f"tensor {weight}: found NVFP4 (U8), expected another format: its {columns} columns are no multiple "
                f"of {nvfp4.GROUP}"
            )
        _expect(entries, weight, ("U8",), (rows, columns // 2))
        _expect(entries, f"{name}.weight_scale", ("F8_E4M3",), (rows, columns // nvfp4.GROUP))
        _expect(entries, f"{name}.weight_scale_2", ("F32",), ())
        if f"{name}.input_scale" not in entries:
            return "W4A16_NVFP4"
        _expect(entries, f"{name}.input_scale", ("F32",), ())
        return "NVFP4"
    if dtype == "F8_E4M3":
        _expect(entries, weight, ("F8_E4M3",), shape)
        _expect(entries, f"{name}.weight_scale", ("F32",), ())
        if f"{name}.input_scale" in entries:
            _expect(entries, f"{name}.input_scale", ("F32",), ())
        return "FP8"
    _expect(entries, weight, FLOATS, shape)
    return dtype  # type: ignore[return-value]


def _expect(entries: Mapping[str, Entry], name: str, dtypes: tuple[str, ...], shape: Shape) -> None:
    entry = entries.get(name)
    wanted = f"{' or '.join(dtypes)} {list(shape)}"
    if entry is None:
        raise CheckpointError(f"tensor {name}: missing, expected {wanted}")
    # A scalar may be written as one element of one dimension.
    same_shape = entry.shape == shape or (shape == () and entry.shape == (1,))
    if entry.dtype not in dtypes or not same_shape:
        raise CheckpointError(f"tensor {name}: expected {wanted}, found {entry.dtype} {list(entry.shape)}")
