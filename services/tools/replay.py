"""Routing and expert inputs to be replayed in a measurement, where random weights would route without any structure.

Owns the least that a decode benchmark needs: of a layer's experts a published share is named again by the next token,
and inputs leave the published share of neurons alive (synthetic_blocks.py). Routing as simulated for caches is in
traces/. What a replay overrides is the decoder's business.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model_config import ModelConfig
from services.tools.synthetic_blocks import SyntheticBlocks

REPEATED = 0.4  # published: of a layer's experts, named again by the next token


@dataclass(frozen=True)
class Trace:
    """`ids` int32 [tokens, layers, rows, k], all of a row's different; `x` float32 [tokens, layers, rows, latent]."""

    ids: Tensor
    x: Tensor
    resident: int  # only the first so many experts of a layer occur

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def repeated(self) -> float:
        """The share of a layer's experts that the token before named, too."""
        before, after = self.ids[:-1, ..., None], self.ids[1:, ..., None, :]
        return float((before == after).any(-1).float().mean())

    def union(self) -> float:
        """How many different experts of a layer all rows of a token name together, on average."""
        ordered = self.ids.flatten(2).sort(-1).values
        return 1.0 + float((ordered[..., 1:] != ordered[..., :-1]).sum(-1).float().mean())

    def joined(self, rows: int) -> "Trace":
        """The first row's tokens, so many at once: rows of a token follow each other."""
        tokens = self.tokens // rows

        def join(tensor: Tensor) -> Tensor:
            first = tensor[: tokens * rows, :, 0]
            return first.reshape(tokens, rows, *first.shape[1:]).transpose(1, 2).contiguous()

        return Trace(join(self.ids), join(self.x), self.resident)


def make(config: ModelConfig, tokens: int, rows: int, resident: int, seed: int) -> Trace:
    """For `rows` sequences that know nothing of each other. Raises ValueError if `resident` is too few or too many."""
    top_k = config.experts_per_token
    kept = round(REPEATED * top_k)
    if not 2 * top_k - kept <= resident <= config.experts:
        raise ValueError(
            f"{resident} resident experts a layer: give {2 * top_k - kept} to {config.experts}, so that {kept} of "
            f"{top_k} can be named again and the others be new"
        )
    random = torch.Generator().manual_seed(seed)
    layers = len(config.moe_layers)

    def draw(count: int) -> Tensor:
        return torch.rand(layers * rows, count, generator=random)

    ids = torch.empty(tokens, layers * rows, top_k, dtype=torch.int64)
    for token in range(tokens):
        scores = draw(resident)
        if token:
            before = ids[token - 1]
            again = before.gather(1, draw(top_k).argsort(1)[:, :kept])
            scores.scatter_(1, before, -1.0)  # the others are new
            fresh = scores.topk(top_k - kept, 1).indices
            named = torch.cat([again, fresh], 1)
        else:
            named = scores.topk(top_k, 1).indices
        ids[token] = named.gather(1, draw(top_k).argsort(1))
    blocks = SyntheticBlocks(config.block, 1, 1)
    x = blocks.inputs(tokens * layers * rows, seed).view(tokens, layers, rows, config.latent_size)
    return Trace(ids.int().view(tokens, layers, rows, top_k), x, resident)
