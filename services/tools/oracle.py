"""The independent reference: a ModelOpt checkpoint run by transformers in float32.

Reads the files, unpacks FP4 and FP8 and maps the names with code of its own, from the formats' descriptions, so that a
mistake in the engine's loader or kernels cannot hide in both. It imports nothing of the engine or of kernels/, and must
not. `load` has everything in memory at once; for models that do not fit see oracle_layers.py.

    E4M3   sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity
    NVFP4  two E2M1 codes a byte, the even column in the low four bits; x E4M3 scale of 16 columns x weight_scale_2
    FP8    E4M3 x weight_scale
"""

import importlib.util
import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from services.vocabulary import read_vocabulary

Array = npt.NDArray[Any]

TRANSFORMERS = "5.24.0"
NOT_OF_THE_MODEL = ("quantization_config", "architectures", "torch_dtype", "dtype", "transformers_version")


OTHER_PARTS = re.compile(r"(language_model\.)?(mtp\.|vision_|mlp1\.|sound_)")


class OracleError(Exception):
    """The reference cannot be had: transformers is missing, or the checkpoint is not one it can run."""

    code = "no_reference"


def load(checkpoint: Path) -> Any:
    """A transformers NemotronHForCausalLM in float32, ready to be called. Raises OracleError."""
    try:
        model = build(config(checkpoint))
        weights = dequantise(read(checkpoint))
    except (OSError, KeyError, ValueError) as error:
        raise OracleError(
            f"{checkpoint}: the reference cannot read it: {error!r}; `thimble fetch --check` gets what is damaged"
        ) from error
    try:
        model.load_state_dict(their_names(weights), strict=True, assign=True)
    except RuntimeError as error:
        raise OracleError(f"{checkpoint}: does not fit transformers' model: {error}") from error
    return model


def config(checkpoint: Path) -> Any:
    """transformers' NemotronHConfig. Raises OracleError without the package, OSError and ValueError."""
    if importlib.util.find_spec("transformers") is None:
        raise OracleError(f"this command needs transformers: pip install transformers=={TRANSFORMERS}")
    from transformers import NemotronHConfig

    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    raw = raw.get("llm_config") or raw.get("text_config") or raw
    return NemotronHConfig(**{key: value for key, value in raw.items() if key not in NOT_OF_THE_MODEL})


def build(config: Any) -> Any:
    """The model in evaluation mode, without weights: every one of them is still to be assigned."""
    from transformers import NemotronHForCausalLM

    with torch.device("meta"):
        model = NemotronHForCausalLM(config)
    for layer in model.model.layers:
        # transformers clamps the time step when it reads a prompt but not when it decodes; the model has no clamp.
        if hasattr(layer.mixer, "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    model.requires_grad_(False).eval()  # type: ignore[no-untyped-call]
    return model


def tokenizer(checkpoint: Path) -> Callable[[str], list[int]]:
    """Text to ids by the checkpoint's own tokenizer, nothing added. Raises OracleError."""
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_str(read_vocabulary(checkpoint / "tokenizer.json", "tokenizers"))
    except Exception as error:  # tokenizers raises Exception itself
        raise OracleError(f"{checkpoint}: no usable tokenizer.json: {error}") from error
    loaded.no_truncation()
    loaded.no_padding()
    return lambda text: list(loaded.encode(text, add_special_tokens=False).ids)


def read(checkpoint: Path) -> dict[str, tuple[str, Array]]:
    """The language model's tensors of the folder's safetensors files by name: type there, bytes as integers or floats.

    Mapped, not read: they take no memory before they are used.
    """
    kinds = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "U8": "u1", "F8_E4M3": "u1"}
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, "r")
        (header_bytes,) = struct.unpack("<Q", data[:8].tobytes())
        for name, entry in json.loads(data[8 : 8 + header_bytes].tobytes()).items():
            if name != "__metadata__" and not OTHER_PARTS.match(name):
                begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
                array = np.asarray(data[begin:end]).view(kinds[entry["dtype"]]).reshape(entry["shape"])
                tensors[name] = (entry["dtype"], array)
    if not tensors:
        raise FileNotFoundError("no *.safetensors")
    return tensors


def dequantise(tensors: dict[str, tuple[str, Array]]) -> dict[str, Array]:
    """float32 values of every tensor that is not a scale."""
    values = {}
    for name, (kind, array) in tensors.items():
        if re.search(r"_scale(_2)?$", name):
            continue
        if kind == "U8":
            groups = e4m3(tensors[name + "_scale"][1]).repeat(16, axis=1)
            values[name] = fp4(array) * groups * tensors[name + "_scale_2"][1]
        elif kind == "F8_E4M3":
            values[name] = e4m3(array) * tensors[name + "_scale"][1]
        elif kind == "BF16":
            values[name] = (array.astype("<u4") << 16).view("<f4")
        else:
            values[name] = array
    return {name: array.astype(np.float32) for name, array in values.items()}


def e4m3(codes: Array) -> Array:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3 & 15).astype(int), codes & 7
    return sign * np.where(exponent, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)


def fp4(packed: Array) -> Array:
    codes = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    codes[:, 0::2] = packed & 15
    codes[:, 1::2] = packed >> 4
    sign = np.where(codes & 8, -1.0, 1.0)
    exponent, mantissa = (codes >> 1 & 3).astype(int), codes & 1
    return sign * np.where(exponent, (1 + mantissa / 2) * 2.0 ** (exponent - 1), mantissa / 2)


def their_names(weights: dict[str, Array]) -> dict[str, torch.Tensor]:
    """The names that transformers has in memory; a layer's experts are one tensor for `up` and one for `down`."""
    state: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, array in weights.items():
        name = re.sub(r"^(language_model\.)?(backbone\.|model\.)", "model.", name).removeprefix("language_model.")
        expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(up_proj|down_proj)\.weight", name)
        if expert:
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = array
        else:
            state[name] = torch.from_numpy(array.copy())
    for name, by_number in experts.items():
        state[name] = torch.from_numpy(np.stack([by_number[number] for number in range(len(by_number))]))
    return state
