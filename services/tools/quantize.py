"""Quantize a BF16 checkpoint into ModelOpt's mixed-precision layout, as the real model is published.

    routed experts, shared experts, lm_head   NVFP4
    Mamba in_proj and out_proj                FP8
    everything else                           as it was

Owns the recipe, the names and the two descriptions of it (`hf_quant_config.json`, `quantization_config`); the rounding
is in kernels/nvfp4 and kernels/fp8. Activation scales come from running the texts given with --calibrate.
"""

import argparse
import importlib.metadata
import json
import shutil
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import kernels.fp8.reference as fp8
import kernels.nvfp4.reference as nvfp4
from services.engine.checkpoint import SINGLE, Checkpoint
from services.engine.errors import CheckpointError
from services.engine.experts.store import TEXT_FILES
from services.engine.model_config import read_config
from services.engine.tensorfile import write_file, write_tensors
from services.engine.weights import FLOATS
from services.tools import calibrate, oracle
from services.tools.amounts import whole
from services.tools.texts import TextError, Texts

Algorithm = Literal["NVFP4", "FP8"]
Choice = Literal["mse", "max"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="a BF16 checkpoint folder")
    parser.add_argument("target", type=Path, help="folder for the quantized checkpoint; must not hold one yet")
    parser.add_argument(
        "--calibrate", type=Path, nargs="+", required=True, metavar="TEXT", help="*.txt or *.jsonl[.gz]"
    )
    parser.add_argument("--windows", type=whole, default=64, help="how many windows of 1024 tokens of each text (64)")
    parser.add_argument(
        "--choose",
        choices=("mse", "max"),
        default="mse",
        help="scales of the least squared error, or those that just fit the largest weight (mse)",
    )


def run(args: argparse.Namespace) -> int:
    source = Checkpoint.open(args.source)
    if (args.target / "config.json").exists():
        raise CheckpointError(f"{args.target}: holds a checkpoint already; choose another folder")
    inputs = _calibrate(source, args.calibrate, args.windows)
    counts = quantize(source, args.target, inputs, args.choose, say=print)
    size = (args.target / SINGLE).stat().st_size
    print(f"{args.target}: {size / 1e6:.1f} MB, linears: {', '.join(f'{n} {name}' for name, n in counts.items())}")
    return 0


def quantize(
    source: Checkpoint, target: Path, inputs: Mapping[str, float], choose: Choice, say: Callable[[str], None]
) -> dict[str, int]:
    """Write the quantized checkpoint; `inputs` is max|x| of each linear (canonical name). Returns linears per format.

    An expert that no calibration token reached takes its layer's largest value, as it may see the same inputs.
    """
    for name, found in source.formats.items():
        if found not in FLOATS:
            raise CheckpointError(f"tensor {name}.weight: is {found} already; give an unquantized checkpoint")
    formats = {name: algorithm(name) for name in source.formats}
    tensors: dict[str, Tensor] = {}
    modules: dict[str, Algorithm] = {}
    borrowed = 0
    for canonical, entry in source.tensors.items():
        linear, _, _ = canonical.rpartition(".")
        form = formats.get(linear)
        if form is None:
            tensors[entry.name] = entry.read()
            continue
        largest, own = _largest_input(linear, inputs)
        borrowed += not own
        name = entry.name.removesuffix(".weight")
        modules[name] = form
        tensors |= {f"{name}.{k}": v for k, v in _quantize_linear(entry.read(), form, largest, choose).items()}
    # As the real model's: the multi-token-prediction block stays in BF16.
    tensors |= {entry.name: entry.read() for entry in source.mtp.values()}
    if borrowed:
        say(f"{borrowed} expert linears saw no calibration token and take their layer's largest input")
    target.mkdir(parents=True, exist_ok=True)
    write_tensors(target / SINGLE, tensors)
    for name in TEXT_FILES:
        if (source.folder / name).exists():
            shutil.copyfile(source.folder / name, target / name)
    described, flattened = _descriptions(modules)
    _write_json(target / "hf_quant_config.json", described)
    # Written last: a folder with a config.json is a whole checkpoint.
    _write_json(target / "config.json", read_config(source.folder) | {"quantization_config": flattened})
    kinds = [form or "unchanged" for form in formats.values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def algorithm(linear: str) -> Algorithm | None:
    """The recipe: which format a linear gets, by its canonical name; None leaves it as it is."""
    if linear == "lm_head" or ".experts." in linear or ".shared_experts." in linear:
        return "NVFP4"
    if linear.endswith((".in_proj", ".out_proj")):
        return "FP8"
    return None


def _calibrate(source: Checkpoint, paths: list[Path], windows: int) -> dict[str, float]:
    model = oracle.load(source.folder)
    texts = Texts(source.folder, window=1024)
    chosen = [window for path in paths for window in islice(texts.windows(path), windows)]
    if not chosen:
        raise TextError(f"{paths[0]}: no text to calibrate with")
    print(f"calibrating on {sum(len(window.ids) for window in chosen)} tokens")
    return calibrate.largest_inputs(model, chosen)


def _largest_input(linear: str, inputs: Mapping[str, float]) -> tuple[float, bool]:
    """max|x| of a linear, and whether it is its own."""
    if linear in inputs:
        return inputs[linear], True
    layer, _, rest = linear.partition(".experts.")
    part = rest.rpartition(".")[2]
    others = [value for name, value in inputs.items() if name.startswith(f"{layer}.experts.") and name.endswith(part)]
    if not rest or not others:
        raise CheckpointError(f"linear {linear}: no calibration token reached it; give more text")
    return max(others), False


def _quantize_linear(weights: Tensor, form: Algorithm, largest_input: float, choose: Choice) -> dict[str, Tensor]:
    if form == "NVFP4":
        weight, scale, scale_2 = nvfp4.quantise(weights, choose)
        input_scale = largest_input / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        return {"weight": weight, "weight_scale": scale, "weight_scale_2": scale_2} | _input_scale(input_scale)
    weight, scale = fp8.quantise(weights, choose)
    return {"weight": weight, "weight_scale": scale} | _input_scale(largest_input / fp8.E4M3_MAX)


def _input_scale(scale: float) -> dict[str, Tensor]:
    # A linear whose inputs were all zero keeps a scale that can be divided by.
    return {"input_scale": torch.tensor(scale if scale > 0 else 1.0, dtype=torch.float32)}


def _descriptions(modules: Mapping[str, Algorithm]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of hf_quant_config.json and of config.json's quantization_config."""
    entries: dict[Algorithm, dict[str, Any]] = {
        "NVFP4": {"quant_algo": "NVFP4", "group_size": nvfp4.GROUP},
        "FP8": {"quant_algo": "FP8"},
    }
    layers = {name: entries[form] for name, form in sorted(modules.items())}
    producer = {"name": "thimble", "version": importlib.metadata.version("thimble")}
    quantization = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "quantized_layers": layers}
    flattened = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "ignore": [],
        "quantized_layers": layers,
        "producer": producer,
    }
    return {"producer": producer, "quantization": quantization}, flattened


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_file(path, [json.dumps(content, indent=1).encode() + b"\n"])
