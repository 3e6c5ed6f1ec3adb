"""The model's tensors: which there must be, in which of ModelOpt's formats each linear is, and what its values are.

Formats are decided per linear from what is in the files, never from a list of modules. Names are canonical: no
`language_model.`, no `backbone.` or `model.`. Owns no file and no expert block; see checkpoint.py and experts/store.py.

    format        weight                 weight_scale          weight_scale_2   input_scale
    NVFP4         U8 [N, K/2]            F8_E4M3 [N, K/16]     F32 []           F32 []
    W4A16_NVFP4   U8 [N, K/2]            F8_E4M3 [N, K/16]     F32 []
    FP8           F8_E4M3 [N, K]         F32 []                                 F32 [] (may be absent)
    BF16 F16 F32  that type [N, K]
"""

from collections.abc import Iterable, Mapping
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
    """Every tensor but the routed experts, read when asked for; the caller owns what it gets."""

    def __init__(self, entries: Mapping[str, Entry], config: ModelConfig) -> None:
        """Raises CheckpointError if a tensor is missing, unknown or misshapen."""
        self._entries = entries
        self.formats = check_tensors(entries, dense_tensors(config))

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
            query, kv = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
            linears |= {mixer + "q_proj": (query, hidden), mixer + "o_proj": (hidden, query)}
            linears |= {mixer + "k_proj": (kv, hidden), mixer + "v_proj": (kv, hidden)}
            optional += [mixer + name for name in KV_SCALES]
        else:
            plain[mixer + "gate.weight"] = (config.experts, hidden)
            plain[mixer + "gate.e_score_correction_bias"] = (config.experts,)
            linears[mixer + "fc1_latent_proj"] = (config.latent_size, hidden)
            linears[mixer + "fc2_latent_proj"] = (hidden, config.latent_size)
            linears[mixer + "shared_experts.up_proj"] = (config.shared_width, hidden)
            linears[mixer + "shared_experts.down_proj"] = (hidden, config.shared_width)
    return Expected(linears, plain, tuple(optional))


def expert_tensors(config: ModelConfig) -> Expected:
    """The routed experts' linears."""
    up, down = (config.expert_width, config.latent_size), (config.latent_size, config.expert_width)
    linears: dict[str, Shape] = {}
    for layer in config.moe_layers:
        for expert in range(config.experts):
            name = expert_name(layer, expert)
            linears |= {f"{name}.up_proj": up, f"{name}.down_proj": down}
    return Expected(linears, {})


def expert_name(layer: int, expert: int) -> str:
    """`layer` counts all layers."""
    return f"layers.{layer}.mixer.experts.{expert}"


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
