"""`thimble teach`: from a checkpoint that reads to one that also sees small drawings and numbers.

The language model is not touched: the new checkpoint has the same files, the vision tensors beside them, and a
config.json that names both. What the old one saw with is not taken over, so that the demo can be taught anew.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.engine.errors import CheckpointError
from services.engine.model_config import language_config, read_config
from services.engine.names import canonical
from services.tools.train_vision.network import Network, config_entries, small_config
from services.tools.train_vision.training import Training

REPLACED = ("*.safetensors", "*.index.json", "config.json", "preprocessor_config.json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "checkpoint", type=Path, help="a quantised checkpoint, such as demo; a tower it has is left out"
    )
    parser.add_argument("out", type=Path, help="folder for the new checkpoint; must not exist")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training (8)")
    parser.add_argument("--batch", type=int, default=128, help="drawings a step (128)")
    parser.add_argument("--workers", type=int, default=12, help="processes that draw (12)")
    parser.add_argument("--width", type=int, default=192, help="of the tower, a multiple of 48 (192)")
    parser.add_argument("--blocks", type=int, default=6, help="of the tower (6)")
    parser.add_argument("--score", type=int, default=8, help="batches of held-out drawings to score at the end (8)")


def run(args: argparse.Namespace) -> int:
    language = language_config(read_config(args.checkpoint))
    if args.out.exists():
        raise CheckpointError(f"{args.out}: exists; give a new folder")
    network = Network(small_config(language["hidden_size"], args.width, args.blocks))
    training = Training(args.checkpoint, network, args.device, args.batch, args.workers, print)
    training.run(args.minutes)
    for kind, (right, asked) in training.score(args.score).items():
        print(f"held-out drawings, {kind:<8}{right:>5} of {asked:<5}{100 * right / max(1, asked):6.1f} %")
    write(args.checkpoint, args.out, network)
    print(f"{args.out}: a checkpoint that sees; next: thimble repack {args.out} STORE, thimble up --store STORE")
    return 0


def write(checkpoint: Path, out: Path, network: Network) -> None:
    """The checkpoint with the network in place of what it saw with, in the style of 3.5-Super-VL."""
    raw = read_config(checkpoint)
    language = dict(language_config(raw))
    shutil.copytree(checkpoint, out, ignore=shutil.ignore_patterns(*REPLACED))
    quantised = language.pop("quantization_config", None) or raw.get("quantization_config")
    whole = {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "llm_config": language,
        "sound_config": None,
        **config_entries(network.config),
    }
    (out / "config.json").write_text(
        json.dumps(whole | ({"quantization_config": quantised} if quantised else {}), indent=1)
    )
    parts = {"language.safetensors": {}, "vision.safetensors": network.checkpoint_tensors()}
    for path in sorted(checkpoint.glob("*.safetensors")):
        tensors = load_file(path)
        parts["language.safetensors"] |= {name: tensors[name] for name in tensors if canonical(name)[0] != "vision"}
    where = {name: file for file, tensors in parts.items() for name in tensors}
    for file, tensors in parts.items():
        save_file(tensors, out / file)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
