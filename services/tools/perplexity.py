"""How well a checkpoint predicts given texts, computed by transformers in float32 on its dequantised weights.

Owns the measure: the mean negative log-likelihood of the tokens that count (see texts.py), as perplexity per token and
per UTF-8 byte. Per byte is what other tokenizers can be compared with.
"""

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from services.tools import figures, oracle
from services.tools.amounts import whole
from services.tools.texts import TextError, Texts, Window

WINDOW_TOKENS = 1024


@dataclass(frozen=True)
class Score:
    """Sums over the tokens that count; `nats` is their negative log-likelihood."""

    nats: float
    tokens: int
    size_bytes: int

    @property
    def per_token(self) -> float:
        return math.exp(self.nats / self.tokens)

    @property
    def per_byte(self) -> float:
        return math.exp(self.nats / self.size_bytes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("texts", type=Path, nargs="+", help="*.txt, or *.jsonl[.gz] with text or messages a line")
    parser.add_argument("--window", type=whole, default=WINDOW_TOKENS, help="tokens a document is cut into (1024)")
    parser.add_argument("--record", type=Path, metavar="CSV", help="append demo.ppl_byte and demo.ppl_token rows")
    parser.add_argument("--note", default="", help="put before each row's note, such as how the weights were rounded")


def run(args: argparse.Namespace) -> int:
    model = oracle.load(args.checkpoint)
    texts = Texts(args.checkpoint, args.window)
    for path in args.texts:
        score = measure(model, texts.windows(path))
        if not score.tokens:
            raise TextError(f"{path}: nothing in it can be scored")
        print(
            f"{path.name}: {score.per_token:.3f} a token, {score.per_byte:.4f} a byte, "
            f"{score.nats / score.tokens:.4f} nats a token ({score.tokens} tokens, {score.size_bytes} bytes)"
        )
        if args.record:
            note = f"{args.note}; " * bool(args.note) + f"{path.name}, {score.tokens} tokens"
            figures.append(args.record, "demo.ppl_byte", score.per_byte, "", note)
            figures.append(args.record, "demo.ppl_token", score.per_token, "", note)
    return 0


@torch.inference_mode()
def measure(model: Any, windows: Iterable[Window]) -> Score:
    """Windows are run one by one, so that none sees another and no padding is computed with."""
    nats, tokens, size = 0.0, 0, 0
    for window in windows:
        ids = torch.tensor(window.ids)
        logits = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0, :-1]
        counts = torch.tensor(window.scored[1:])
        losses = torch.nn.functional.cross_entropy(logits[counts], ids[1:][counts], reduction="sum")
        nats, tokens, size = nats + float(losses), tokens + int(counts.sum()), size + window.scored_bytes
    return Score(nats, tokens, size)
