"""What two positions in one step give on paper, beside forecast.py's single ones. Owns the assumptions of drafts: how
many experts two tokens share, and what the multi-token-prediction block itself costs.

Such a step reads the dense weights once and hands over once; it moves the union of both tokens' experts, each of them
once. An expert that both name is in RAM for the second of them: the misses of a token are all among those that it does
not share. A right draft is a token without a step of its own, a wrong one nothing.
"""

import math
from dataclasses import dataclass, replace

from services.engine.gpu.ledger import Layout
from services.engine.model_config import ModelConfig
from services.engine.tensorfile import DTYPES
from services.engine.weights import draft_tensors
from services.tools.forecast import decode
from services.tools.hardware import Box
from services.tools.predict import Method, Shape

REPEATED = 0.4  # of a layer's experts, those that the next token names again
ACCEPTED = (0.6, 0.75, 0.85, 0.9)  # reported for the real model's first draft: 0.85 to 0.88
DRAFT_BYTES = 2  # of a weight: the block is published in BF16


@dataclass(frozen=True)
class TwoTokens:
    """Milliseconds: of a step with one position, with two, and of a draft."""

    one_ms: float
    two_ms: float
    draft_ms: float

    def gain(self, accepted: float) -> float:
        """Of speed, if that share of drafts is right."""
        return (1 + accepted) * self.one_ms / (self.two_ms + self.draft_ms)

    @property
    def break_even(self) -> float:
        """The share of right drafts from which on it pays."""
        return (self.two_ms + self.draft_ms) / self.one_ms - 1


def block_bytes(config: ModelConfig, dense: Layout) -> int:
    """What a draft reads on the card: the block's tensors but its experts, and lm_head again."""
    expected = draft_tensors(config)
    weights = sum(math.prod(shape) for part in (expected.linears, expected.plain) for shape in part.values())
    head = [(dtype, shape) for name, (dtype, shape) in dense.items() if name.startswith("lm_head.")]
    return DRAFT_BYTES * weights + sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in head)


def two_tokens(shape: Shape, box: Box, hits: float, draft_bytes: int, repeated: float = REPEATED) -> TwoTokens:
    """`draft_bytes`: as `block_bytes`; 0 for drafts that cost nothing, such as copies."""
    union = round((2 - repeated) * shape.experts_per_token)
    misses = 2 * shape.experts_per_token * (1 - hits)
    two = decode(replace(shape, experts_per_token=union), box, Method.SPLIT, max(0.0, 1 - misses / union))
    draft = replace(shape, dense_bytes=draft_bytes, moe_layers=1)
    draft_ms = decode(draft, box, Method.SPLIT, hits).total_ms if draft_bytes else 0.0
    return TwoTokens(decode(shape, box, Method.SPLIT, hits).total_ms, two.total_ms, draft_ms)
