"""What two positions in one step give on paper, beside forecast.py's single ones. Owns the assumptions of drafts: how
many experts two tokens share, and what the multi-token-prediction block itself costs.

Such a step reads the dense weights once and hands over once; it moves the union of both tokens' experts, each of them
once. An expert that both name is in RAM for the second of them: the misses of a token are all among those that it does
not share. Its bytes move once, but for the rows of `down` that only the second token needs; its sums are made twice,
which costs a processor time, if it is not the memory that both wait for. A right draft is a token without a step of its
own, and its states are then read and written once more; a wrong one is nothing.
"""

import math
from dataclasses import dataclass, replace

from services.engine.gpu.ledger import Layout
from services.engine.model_config import ModelConfig
from services.engine.tensorfile import DTYPES
from services.engine.weights import draft_tensors
from services.tools.forecast import decode
from services.tools.hardware import Box
from services.tools.predict import Method, Rates, Shape

REPEATED = 0.4  # of a layer's experts, those that the next token names again
ACCEPTED = (0.6, 0.75, 0.85, 0.9)  # reported for the real model's first draft: 0.85 to 0.88
DRAFT_BYTES = 2  # of a weight: the block is published in BF16


@dataclass(frozen=True)
class TwoTokens:
    """Milliseconds: of a step with one position, with two, of a draft, and what a right one costs beside."""

    one_ms: float
    two_ms: float
    draft_ms: float
    right_ms: float = 0.0
    again: float = 0.0  # as `again` below

    def gain(self, accepted: float) -> float:
        """Of speed, if that share of drafts is right."""
        return (1 + accepted) * self.one_ms / (self.two_ms + self.draft_ms + accepted * self.right_ms)

    @property
    def break_even(self) -> float:
        """The share of right drafts from which on it pays."""
        return (self.two_ms + self.draft_ms - self.one_ms) / (self.one_ms - self.right_ms)


def block_bytes(config: ModelConfig, dense: Layout) -> int:
    """What a draft reads on the card: the block's tensors but its experts, and lm_head again."""
    expected = draft_tensors(config)
    weights = sum(math.prod(shape) for part in (expected.linears, expected.plain) for shape in part.values())
    head = [(dtype, shape) for name, (dtype, shape) in dense.items() if name.startswith("lm_head.")]
    return DRAFT_BYTES * weights + sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in head)


def again(shape: Shape, rates: Rates) -> float:
    """What a second token of the same expert adds, in shares of the first one's time, where processor and card divide a
    layer. The card waits for bytes alone."""
    method = Method.SPLIT
    first = method.expert_bytes(shape)
    both = method.expert_bytes(replace(shape, alive=1 - (1 - shape.alive) ** 2))
    side_by_side = rates.cpu_gb_s / (first * (1 + rates.again)) + rates.pcie_gb_s / both
    return max(1 / side_by_side, both / rates.dram_gb_s) * rates.expert_gb_s(method) / first - 1


def two_tokens(
    shape: Shape,
    box: Box,
    hits: float,
    draft_bytes: int,
    state_bytes: int,
    repeated: float = REPEATED,
    more_dense_ms: float = 0.0,
) -> TwoTokens:
    """`draft_bytes`: as `block_bytes`; 0 for drafts that cost nothing, such as copies. `state_bytes`: of a sequence.
    `more_dense_ms`: what the dense part of two positions takes beyond that of one, beside the same bytes."""
    top_k = shape.experts_per_token
    union = round((2 - repeated) * top_k)
    misses = 2 * top_k * (1 - hits)
    one = decode(shape, box, Method.SPLIT, hits)
    two = decode(replace(shape, experts_per_token=union), box, Method.SPLIT, max(0.0, 1 - misses / union))
    expert_ms, more = one.experts_ms / top_k, again(shape, box.rates)  # in all layers
    twice_ms = (2 * top_k - union) * more * expert_ms
    right_ms = 2 * state_bytes / box.vram_gb_s / 1e6
    draft_ms = 0.0
    if draft_bytes:
        draft = replace(shape, dense_bytes=draft_bytes, moe_layers=1)
        draft_ms = decode(draft, box, Method.SPLIT, hits).total_ms
        right_ms += ((union - top_k) * expert_ms + twice_ms) / shape.moe_layers  # the block then takes two ids at once
    return TwoTokens(one.total_ms, two.total_ms + twice_ms + more_dense_ms, draft_ms, right_ms, more)
