"""What a run has reached on the held-out texts, on the device it trains on: perplexity, with weights as they are and
rounded, drafts that come true, zeros, loads. Figures for the card come from `thimble perplexity` on the checkpoint.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from services.tools.train_demo import documents
from services.tools.train_demo.documents import NOT_SCORED, Batch, Source
from services.tools.train_demo.rounding import Rounding
from services.tools.train_demo.training import Training

WINDOW_TOKENS = 1024  # as `thimble perplexity`


@dataclass(frozen=True)
class Measured:
    """`drafts`: share of learnt tokens where the draft block guessed the model's own likeliest id one step later."""

    per_token: float
    per_byte: float
    drafts: float
    zeros: float
    busiest: float


@torch.no_grad()
def measure(training: Training, name: str, rounded: bool, most_batches: int | None = None) -> Measured:
    """Of the held-out source `name`; windows know nothing of each other."""
    source = documents.load(training.run_folder / "held_out")[name]
    sizes = token_bytes(training.run_folder / "tokenizer.json")
    rounding = Rounding() if rounded else None
    nats = tokens = size = hits = guesses = 0.0
    zeros, busiest, count = 0.0, 0.0, 0
    device = training.device
    for batch in windows(source, training.recipe.rows):
        if count == most_batches:
            break
        ids, targets, places = (torch.from_numpy(t).to(device) for t in (batch.ids, batch.targets, batch.documents))
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=training.half):
            hidden, run = training.network(ids, places, rounding, True)
            logits = training.network.logits(hidden, rounding)
            states = training.network.draft(hidden, ids, run)
            drafted = training.network.draft_logits(states, rounding)[:, :-1].argmax(-1)
        kept = targets != NOT_SCORED
        nats += float(cross_entropy(logits[kept], targets[kept], reduction="sum"))
        tokens += int(kept.sum())
        size += float(sizes[batch.targets[batch.targets != NOT_SCORED]].sum())
        guess = kept[:, 1:] & (places[:, 1:] == places[:, :-1])
        hits += int((drafted == logits[:, 1:].argmax(-1))[guess].sum())
        guesses += int(guess.sum())
        zeros += float(torch.stack(run.zeros).mean())
        loads = torch.stack([load.float().max() / load.float().mean() for load in run.loads.values()])
        busiest, count = max(busiest, float(loads.max())), count + 1
    return Measured(math.exp(nats / tokens), math.exp(nats / size), hits / max(1, guesses), zeros / count, busiest)


def windows(source: Source, rows: int) -> Iterator[Batch]:
    """Every document in windows of WINDOW_TOKENS, a window a row; the longest first, so that rows are alike."""
    begins = np.concatenate(([0], source.ends[:-1]))
    cuts = [
        (at, min(int(end), at + WINDOW_TOKENS))
        for begin, end in zip(begins, source.ends, strict=True)
        for at in range(int(begin), int(end), WINDOW_TOKENS)
    ]
    cuts = sorted((cut for cut in cuts if cut[1] - cut[0] > 1), key=lambda cut: cut[0] - cut[1])
    for first in range(0, len(cuts), rows):
        part = cuts[first : first + rows]
        shape = (len(part), part[0][1] - part[0][0])
        ids, targets, places = np.zeros(shape, np.int64), np.full(shape, NOT_SCORED), np.full(shape, -1)
        for row, (begin, end) in enumerate(part):
            length = end - begin
            ids[row, :length] = source.ids[begin:end]
            targets[row, : length - 1] = np.where(source.scored[begin + 1 : end], ids[row, 1:length], NOT_SCORED)
            places[row, :length] = 0
        yield Batch(ids, targets, places)


def token_bytes(path: Path) -> documents.Ints:
    """How many UTF-8 bytes each id stands for: byte-level vocabularies write each byte as a letter of its own."""
    data = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = data["model"]["vocab"] | {one["content"]: one["id"] for one in data["added_tokens"]}
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for token, id_ in vocabulary.items():
        sizes[id_] = len(token)
    return sizes
