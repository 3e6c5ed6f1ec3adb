"""The independent reference for models larger than memory: a layer at a time from disk, with progress and resume.

transformers' own model runs, but each of its layers is read, dequantised, run on all texts at once and dropped again;
embeddings are read by row, lm_head in slices. After every layer the hidden states are kept in a file, so that a run
that was stopped goes on with the layer that it was at. Memory: one MoE layer in float32 (12 GB for Super), the logits.
Like oracle.py it imports nothing of the engine or of kernels/.
"""

import hashlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.tools import oracle
from services.tools.oracle import Array

Tensors = dict[str, tuple[str, Array]]
Say = Callable[[str], None]

_SLICE_ROWS = 4096
_LAYER = re.compile(r"(?:language_model\.)?(?:backbone\.|model\.)?layers\.(\d+)\.")


@torch.inference_mode()
def logits(checkpoint: Path, texts: list[list[int]], kept: Path, say: Say = lambda _: None) -> list[Tensor]:
    """The reference's logits after every id of each text, [n, vocab] each. `kept` is the file to resume from, removed
    at the end. Raises OracleError."""
    try:
        tensors = oracle.read(checkpoint)
        config = oracle.config(checkpoint)
        hidden = _hidden(tensors, config, texts, Kept(kept, _key(checkpoint, texts)), say)
        rows = [hidden[number, : len(ids)] for number, ids in enumerate(texts)]
        head = _named(tensors, "lm_head.weight")
        flat = torch.cat(rows)
        out = torch.empty(len(flat), config.vocab_size)
        for begin in range(0, config.vocab_size, _SLICE_ROWS):
            out[:, begin : begin + _SLICE_ROWS] = flat @ _rows(tensors, head, begin, begin + _SLICE_ROWS).T
    except (OSError, KeyError, ValueError) as error:
        raise oracle.OracleError(
            f"{checkpoint}: the reference cannot read it: {error!r}; `thimble fetch --check` gets what is damaged"
        ) from error
    kept.unlink(missing_ok=True)
    return list(torch.split(out, [len(ids) for ids in texts]))


class Kept:
    """The hidden states after the last finished layer, in a file that is replaced as a whole."""

    def __init__(self, path: Path, key: str) -> None:
        self._path, self._key = path, key

    def load(self) -> tuple[int, Tensor] | None:
        """Layers done and [texts, tokens, hidden]; None if there is nothing of this checkpoint and these texts."""
        try:
            said = torch.load(self._path, weights_only=True)
        except Exception:  # whatever a damaged file makes of torch.load: then the work is done again
            return None
        return (said["layers"], said["hidden"]) if said.get("key") == self._key else None

    def save(self, layers: int, hidden: Tensor) -> None:
        unfinished = self._path.with_name(self._path.name + ".part")
        torch.save({"key": self._key, "layers": layers, "hidden": hidden.clone()}, unfinished)
        os.replace(unfinished, self._path)


class Streamed(torch.nn.Module):
    """Stands where a layer was and has its weights only while it runs. Does nothing if its work was done earlier."""

    def __init__(
        self, layer: Any, load: Callable[[], dict[str, Tensor]], done: Callable[[Tensor], None] | None
    ) -> None:
        super().__init__()
        self.block_type = layer.block_type
        self._hold = [layer]  # in a list, so that it is no submodule
        self._load, self._done = load, done

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        if self._done is None:
            return hidden_states
        [layer] = self._hold
        layer.load_state_dict(self._load(), strict=True, assign=True)
        out: Tensor = layer(hidden_states, **given)
        layer.to("meta")
        self._done(out)
        return out


def _hidden(tensors: Tensors, config: Any, texts: list[list[int]], kept: Kept, say: Say) -> Tensor:
    """After the last norm, [texts, longest, hidden]. What is behind a text's end is not looked at by what is before."""
    model = oracle.build(config)
    before = kept.load()
    if before is None:
        embeddings = _named(tensors, "embeddings.weight")
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        before = (0, _take(tensors, embeddings, ids.flatten().numpy()).view(*ids.shape, -1))
    elif before[0]:
        say(f"reference: going on after layer {before[0]}")
    first, hidden = before
    count = len(model.model.layers)

    def finished(index: int) -> Callable[[Tensor], None] | None:
        def done(out: Tensor) -> None:
            kept.save(index + 1, out)
            say(f"reference: layer {index + 1} of {count}")

        return None if index < first else done

    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = Streamed(layer, partial(_layer_weights, tensors, index), finished(index))
    norm = _named(tensors, "norm_f.weight")
    model.model.norm_f.load_state_dict({"weight": _rows(tensors, norm)}, assign=True)
    model.model.embeddings = torch.nn.Identity()
    return model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def _layer_weights(tensors: Tensors, index: int) -> dict[str, Tensor]:
    """A layer's weights under the names that they have in it; the experts one after the other into one tensor each."""
    names = [name for name in tensors if (found := _LAYER.match(name)) and int(found[1]) == index]
    experts = [name for name in names if ".experts." in name]
    state = oracle.their_names(oracle.dequantise({name: tensors[name] for name in names if name not in set(experts)}))
    state = {name.removeprefix(f"model.layers.{index}."): value for name, value in state.items()}
    for part in ("up_proj", "down_proj"):
        weights = {}
        for name in experts:
            if found := re.search(rf"\.experts\.(\d+)\.{part}\.weight$", name):
                weights[int(found[1])] = name
        for number, name in sorted(weights.items()):
            values = _rows(tensors, name)
            if number == 0:
                state[f"mixer.experts.{part}"] = torch.empty(len(weights), *values.shape)
            state[f"mixer.experts.{part}"][number] = values
    return state


def _rows(tensors: Tensors, name: str, begin: int = 0, end: int | None = None) -> Tensor:
    """float32 of a tensor's rows."""
    return _take(tensors, name, slice(begin, end))


def _take(tensors: Tensors, name: str, rows: Any) -> Tensor:
    kind, array = tensors[name]
    chosen = {name: (kind, array[rows])}
    if name + "_scale" in tensors:
        scale_kind, scale = tensors[name + "_scale"]
        chosen[name + "_scale"] = (scale_kind, scale[rows] if kind == "U8" else scale)
    if name + "_scale_2" in tensors:
        chosen[name + "_scale_2"] = tensors[name + "_scale_2"]
    return torch.from_numpy(oracle.dequantise(chosen)[name])


def _named(tensors: Tensors, ending: str) -> str:
    known = [prefix + ending for prefix in ("", "backbone.", "model.")]
    for name in known + [f"language_model.{name}" for name in known]:
        if name in tensors:
            return name
    raise KeyError(ending)


def _key(checkpoint: Path, texts: list[list[int]]) -> str:
    digest = hashlib.sha256(repr(texts).encode())
    for path in sorted(checkpoint.glob("*.safetensors")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()
