"""The trained weights as a BF16 checkpoint in the real model's names, in small files, for `thimble quantize`; and back.

The rounding that the last stage trained with is exactly what quantizing these files does. Owns names and files.
"""

import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from services.engine.checkpoint import INDEX, Checkpoint
from services.engine.errors import CheckpointError
from services.engine.experts.store import TEXT_FILES
from services.engine.tensorfile import write_tensors
from services.engine.weights import read_linear
from services.tools.train_demo.network import Network

SHARD_BYTES = 12_000_000
_WANTED = "give a checkpoint of a model of this size, with its draft block"
FLOAT32 = ("gate.weight", "e_score_correction_bias")
EMBEDDINGS = "backbone.embeddings.weight"
NEVER_SEEN = 0.05  # of the usual length: an embedding that is shorter was only ever decayed


def checkpoint_tensors(network: Network) -> dict[str, Tensor]:
    """By their names on disk; all BF16 but the router."""
    found: dict[str, Tensor] = {}
    for name, value in network.state_dict().items():
        value = value.detach().cpu().to(torch.float32 if name.endswith(FLOAT32) else torch.bfloat16)
        name = name if name.startswith(("lm_head", "mtp.")) else f"backbone.{name}"
        stem, _, part = name.rpartition(".")
        if stem.endswith(".experts"):
            found |= {f"{stem}.{number}.{part}.weight": one.clone() for number, one in enumerate(value)}
        else:
            found[name] = value
    found[EMBEDDINGS] = filled(found[EMBEDDINGS])
    return found


def filled(embeddings: Tensor) -> Tensor:
    """Those of tokens that no text of the training has become the mean of the others: [vocab, hidden], as it was given.

    Decay leaves next to nothing of them, and what a network makes of next to nothing hangs on the last bits of a float:
    no two ways to compute it agree.
    """
    length = embeddings.float().norm(dim=1)
    unseen = length < NEVER_SEEN * length.median()
    mean = embeddings[~unseen].float().mean(0).to(embeddings.dtype)
    return torch.where(unseen[:, None], mean, embeddings)


def load(network: Network, checkpoint: Path) -> None:
    """The network gets a checkpoint's weights, of a network of the same shape; what is quantized as what it stands for.

    Raises CheckpointError, and has changed nothing.
    """
    source = Checkpoint.open(checkpoint)
    entries, formats = source.tensors | source.mtp, source.formats | source.draft_formats()

    def value(name: str) -> Tensor:
        linear = name.removesuffix(".weight")
        return read_linear(entries, linear, formats[linear]).dequantise() if linear in formats else plain(name)

    def plain(name: str) -> Tensor:
        return entries[name].read().float()

    state: dict[str, Tensor] = {}
    for name, there in network.state_dict().items():
        stem, _, part = name.rpartition(".")
        names = (
            [f"{stem}.{number}.{part}.weight" for number in range(len(there))] if stem.endswith(".experts") else [name]
        )
        if not all(one in entries for one in names):
            raise CheckpointError(f"{checkpoint}: has no {names[-1]}; {_WANTED}")
        found = torch.stack([value(one) for one in names]) if stem.endswith(".experts") else value(name)
        if found.shape != there.shape:
            raise CheckpointError(f"{checkpoint}: {name} is {tuple(found.shape)}, not {tuple(there.shape)}; {_WANTED}")
        state[name] = found
    network.load_state_dict(state)


def export(network: Network, run: Path, out: Path) -> int:
    """Write `out`, a new folder, with the run's text files; how many files hold the weights."""
    out.mkdir(parents=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in checkpoint_tensors(network).items():
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_tensors(out / file, shard)
        where |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    for name in TEXT_FILES:
        if (run / name).exists():
            shutil.copyfile(run / name, out / name)
    # Last: a folder with a config.json is a whole checkpoint.
    shutil.copyfile(run / "config.json", out / "config.json")
    return len(shards)
