"""What a request does to logits before an id is drawn from them, and how probable ids were before. Owns no drawing.

Every rule touches the logits of a few ids, each by itself, in float32: results depend on nothing else.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from kernels.elementary.reference import exp, total
from kernels.sampling.reference import LogitsError


def penalise(
    logits: Tensor,
    prompt: Iterable[int],
    answer: Mapping[int, int],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Tensor:
    """logits float32 [V] -> a changed copy. `prompt` are the prompt's ids, `answer` how often the answer holds an id.

    Repetition (Keskar et al. 2019, CTRL): the logit of every id in prompt or answer is divided by it if positive, else
    multiplied. Presence and frequency (OpenAI's API reference): c > 0 times in the answer costs presence + c frequency.
    """
    assert repetition > 0
    out = logits.clone()
    seen = sorted({*prompt, *answer})
    if repetition != 1 and seen:
        at = torch.tensor(seen, device=logits.device)
        values = out[at]
        out[at] = torch.where(values > 0, values / repetition, values * repetition)
    if (presence or frequency) and answer:
        ids, counts = torch.tensor(list(answer.items()), device=logits.device).unbind(1)
        out[ids] -= presence + frequency * counts.float()
    return out


def shift(logits: Tensor, bias: Mapping[int, float], forbidden: Iterable[int]) -> Tensor:
    """logits float32 [V] -> a copy with `bias` added and -inf at the forbidden ids."""
    out = logits.clone()
    if bias:
        out[torch.tensor(list(bias), device=logits.device)] += torch.tensor(list(bias.values()), device=logits.device)
    for id_ in forbidden:
        out[id_] = -torch.inf
    return out


def logprobs(logits: Tensor, id_: int, top: int) -> tuple[float, Sequence[tuple[int, float]]]:
    """Natural log probability of `id_`, and the `top` most probable ids with theirs, best first (ties: lowest id).

    logits float32 [V]. Raises LogitsError.
    """
    best = logits.max()
    if not torch.isfinite(best):
        raise LogitsError.of(best.item())
    shifted = (logits - best).double()
    logs = shifted - math.log(total(exp(shifted).double(), 0))
    order = torch.sort(logits, descending=True, stable=True).indices[:top].tolist() if top else []
    return float(logs[id_]), [(other, float(logs[other])) for other in order]
