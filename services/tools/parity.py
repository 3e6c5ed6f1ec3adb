"""How far the engine's model is from the independent reference on a text. Owns the measures and their bars.

KL is of the reference's next-token distribution from ours, in nats, over every position of the text. Greedy: the text
is continued by the most likely ids, and both are fed the same ids and choose at each place. The ids are the reference's
own; ours where the reference can be run only once (`propose`, `Expected.given`): it is the same up to a disagreement.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.model import Segment
from services.engine.state import State

MEAN_KL_BAR = 0.003
GREEDY_TOKENS = 64
GREEDY_BAR = 63


class Network(Protocol):
    """The engine's model, on a CPU or a GPU."""

    def new_state(self, tokens: int) -> State: ...
    def forward(self, segments: list[Segment]) -> Tensor: ...
    def forward_all(self, segments: list[Segment]) -> Tensor: ...


@dataclass(frozen=True)
class Parity:
    """`margins`: at each greedy place where we chose otherwise, how far the reference's first logit led its second."""

    tokens: int
    perplexity: float
    reference_perplexity: float
    mean_kl: float
    max_kl: float
    top1: float  # share of positions with the same most likely id
    greedy: int  # of GREEDY_TOKENS
    margins: tuple[float, ...]

    @property
    def passed(self) -> bool:
        return self.mean_kl <= MEAN_KL_BAR and self.greedy >= GREEDY_BAR  # a NaN fails


@dataclass(frozen=True)
class Expected:
    """What the reference says about `ids`: logits after each [n, vocab], greedy ids, and the logits that chose them.

    `continued` is what it was fed behind `ids`, one id less than it chose.
    """

    ids: list[int]
    logits: Tensor
    continued: list[int]
    greedy: list[int]
    greedy_logits: Tensor

    @staticmethod
    def given(ids: list[int], continued: list[int], logits: Tensor) -> "Expected":
        """From the reference's logits after each of `ids` and `continued`."""
        rows = logits[len(ids) - 1 :]
        return Expected(ids, logits[: len(ids)], continued, rows.argmax(dim=1).tolist(), rows)


@torch.inference_mode()
def ask_reference(reference: Any, ids: list[int]) -> Expected:
    """Run transformers once over `ids` and then token by token."""
    out = reference(input_ids=torch.tensor([ids]), use_cache=True)
    rows = [out.logits[0, -1]]
    for _ in range(GREEDY_TOKENS - 1):
        step = reference(input_ids=rows[-1].argmax().view(1, 1), cache=out.cache, use_cache=True)
        rows.append(step.logits[0, -1])
    greedy = [int(row.argmax()) for row in rows]
    return Expected(ids, out.logits[0], greedy[:-1], greedy, torch.stack(rows))


def propose(model: Network, ids: list[int]) -> list[int]:
    """The engine's own greedy continuation, one id less than GREEDY_TOKENS."""
    state = model.new_state(len(ids) + GREEDY_TOKENS)
    chosen = [int(model.forward([Segment(state, ids)])[0].argmax())]
    while len(chosen) < GREEDY_TOKENS - 1:
        chosen.append(int(model.forward([Segment(state, chosen[-1:])])[0].argmax()))
    state.release()
    return chosen


def compare(model: Network, expected: Expected) -> Parity:
    """Run the engine's model: the text at once, then one id a step, as when it decodes."""
    state = model.new_state(len(expected.ids) + GREEDY_TOKENS)
    logits = model.forward_all([Segment(state, expected.ids)])
    rows = [logits[-1]]
    for id_ in expected.continued:
        rows.append(model.forward([Segment(state, [id_])])[0])
    state.release()
    agrees = [int(row.argmax()) == id_ for row, id_ in zip(rows, expected.greedy, strict=True)]
    leads = expected.greedy_logits.topk(2).values
    kl = divergence(expected.logits, logits)
    return Parity(
        tokens=len(expected.ids),
        perplexity=perplexity(logits, expected.ids),
        reference_perplexity=perplexity(expected.logits, expected.ids),
        mean_kl=float(kl.mean()),
        max_kl=float(kl.max()),
        top1=float((logits.argmax(1) == expected.logits.argmax(1)).double().mean()),
        greedy=sum(agrees),
        margins=tuple(float(a - b) for (a, b), same in zip(leads, agrees, strict=True) if not same),
    )


def divergence(reference: Tensor, ours: Tensor) -> Tensor:
    """KL(reference || ours) of each row of logits [n, vocab] -> float64 [n]."""
    p, q = (torch.log_softmax(logits.double(), dim=1) for logits in (reference, ours))
    return (p.exp() * (p - q)).sum(dim=1)


def perplexity(logits: Tensor, ids: list[int]) -> float:
    """Of every id but the first, given those before it."""
    return math.exp(torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:])))
