"""`thimble teach`: from a checkpoint that reads to one that also sees drawings, numbers, words and small invoices.

The language model is not touched: the new checkpoint has its tensors and texts, the vision tensors beside them, and a
config.json that names both. What the old one saw with is not taken over, so that the demo can be taught anew, unless
`--from` names it.
A run that was interrupted goes on with the same line.
"""

import argparse
import json
import os
import shutil
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from services.engine.checkpoint import SINGLE
from services.engine.errors import CheckpointError
from services.engine.model_config import language_config, read_config
from services.engine.names import canonical
from services.engine.tensorfile import write_tensors
from services.tools.amounts import count, nothing_or_more, whole
from services.tools.complaints import UsageError
from services.tools.train_vision import scoring
from services.tools.train_vision.batches import Prompts
from services.tools.train_vision.language import Language
from services.tools.train_vision.network import Network, config_entries, small_config
from services.tools.train_vision.training import Options, Training

REPLACED = ("*.safetensors", "*.index.json", "config.json", "preprocessor_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="a quantised checkpoint, such as demo; a tower it has is left out"
    )
    parser.add_argument("out", type=Path, help="folder for the new checkpoint; must not exist")
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument(
        "--minutes", type=nothing_or_more, default=7.0, help="of training, runs before this one included (7)"
    )
    parser.add_argument("--batch", type=whole, default=128, help="pictures a step for the tower alone (128)")
    parser.add_argument("--words", type=whole, default=128, help="pictures a step before the language model (128)")
    parser.add_argument("--workers", type=count, default=max(1, (os.cpu_count() or 2) - 2), help="processes that draw")
    parser.add_argument(
        "--pool", type=whole, default=120_000 if cuda else 1500, help="drawings to keep in memory, 0.2 MB each"
    )
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=cuda, help="compiled layers (on a GPU)"
    )
    parser.add_argument("--width", type=whole, default=192, help="of the tower, a multiple of 48 (192)")
    parser.add_argument("--blocks", type=whole, default=5, help="of the tower (5)")
    parser.add_argument(
        "--graph", action=argparse.BooleanOptionalAction, default=cuda, help="steps as CUDA graphs (on a GPU)"
    )
    parser.add_argument(
        "--from",
        "--tower",
        dest="start",
        type=Path,
        help="begin with the tower of this checkpoint (a folder, or one file of tensors); its projector is left",
    )
    parser.add_argument(
        "--alone", type=nothing_or_more, help="share of the minutes for the tower alone (0.5; 0.45 with --tower)"
    )
    parser.add_argument("--record", type=Path, metavar="CSV", help="append a row for each examination and topic")
    parser.add_argument("--score", type=count, default=8, help="384 held-out pictures each, examined at the end (8)")
    parser.add_argument(
        "--state", type=Path, help="what an interrupted run goes on from (OUT.state); removed when it is done"
    )


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device: leave --device out, or give cpu, which takes many hours")
    if args.width % 48:
        raise UsageError(f"--width {args.width}: give a multiple of 48")
    language = language_config(read_config(args.checkpoint))
    if args.out.exists():
        raise CheckpointError(f"{args.out}: exists; give a new folder")
    state = args.state or args.out.with_name(args.out.name + ".state")
    network = Network(small_config(language["hidden_size"], args.width, args.blocks))
    if args.start:
        try:
            taken = network.take(vision_tensors(args.start))
        except CheckpointError as error:
            raise CheckpointError(f"{args.start}: {error}") from error
        _say(f"{args.start}: {len(taken)} tensors of its tower taken over, of {len(network.checkpoint_tensors())}")
    reads = Language(args.checkpoint, torch.bfloat16 if args.device.startswith("cuda") else torch.float32)
    prompts = Prompts(args.checkpoint)
    warm = args.start is not None
    alone = args.alone if args.alone is not None else 0.45 if warm else 0.5
    options = Options(
        args.device, args.batch, args.words, args.workers, args.pool, args.compile, args.graph, warm, alone
    )
    training = Training(reads, prompts, network, options, _say)
    _say(f"ready after {time.monotonic() - began:.0f} s")
    training.run(args.minutes, state)
    ended = time.monotonic()
    right, asked = training.score(args.score)
    for line in scoring.lines(right, asked):
        _say(line)
    if args.record:
        steps = training.progress.steps
        scoring.record(args.record, right, asked, f"{args.out.name}, {args.minutes:g} minutes, {steps} steps")
    _say(f"examined in {time.monotonic() - ended:.0f} s")
    write(args.checkpoint, args.out, network)
    state.unlink()
    size = sum(path.stat().st_size for path in args.out.iterdir())
    _say(f"{args.out}: {size / 1e6:.2f} MB, a checkpoint that sees; next: thimble repack {args.out} STORE")
    return 0


def vision_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """By the checkpoint's names; of a folder, or of one file. Raises CheckpointError."""
    try:
        return {
            name: tensor
            for path in (sorted(checkpoint.glob("*.safetensors")) if checkpoint.is_dir() else [checkpoint])
            for name, tensor in load_file(path).items()
            if canonical(name)[0] == "vision"
        }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot be read as tensors: {error}; give a checkpoint's folder or a file") from error


def write(checkpoint: Path, out: Path, network: Network) -> None:
    """The checkpoint with the network in place of what it saw with, in the style of 3.5-Super-VL; all tensors in one
    file, which needs no index."""
    raw = read_config(checkpoint)
    language = dict(language_config(raw))
    quantised = language.pop("quantization_config", None) or raw.get("quantization_config")
    whole = {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "llm_config": language,
        "sound_config": None,
        **config_entries(network.config),
    }
    tensors = network.checkpoint_tensors()
    for path in sorted(checkpoint.glob("*.safetensors")):
        found = load_file(path)
        tensors |= {name: found[name] for name in found if canonical(name)[0] != "vision"}
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns(*REPLACED))
    write_tensors(out / SINGLE, tensors)
    text = json.dumps(whole | ({"quantization_config": quantised} if quantised else {}), separators=(",", ":"))
    (out / "config.json").write_text(text + "\n", encoding="utf-8")


def _say(text: str) -> None:
    print(text, flush=True)
