"""The next id of one answer: the model's logits, what the request asks for, and what the answer holds so far.

Owns the counts and the thinking of one sequence; kernels/sampling owns the arithmetic. A request that asks for nothing
special is drawn from the logits as they are. A grammar begins behind the thinking; until then the answer cannot end.
"""

import torch
from torch import Tensor

from kernels.sampling.cpu import Counts, logprobs, penalise, sample
from kernels.sampling.penalties import shift
from kernels.sampling.reference import LogitsError
from services.engine.errors import GrammarError
from services.engine.grammar import Matcher
from services.engine.request import Request, Token
from services.engine.vision.ids import FIRST


class Choosing:
    """Call `next` once for every token of the answer. Used by the engine's thread only."""

    def __init__(self, request: Request, matcher: Matcher | None = None) -> None:
        self._request = request
        self._matcher = matcher
        repeated = sorted(id_ for id_ in set(request.ids) if id_ < FIRST) if request.repetition_penalty != 1 else []
        self._prompt = torch.tensor(repeated, dtype=torch.int32)
        self._answer = Counts()
        self._chosen = 0
        self._thinking = request.thinking is not None
        self._thinking_must_end = False
        others = request.thinking.end_ids[1:] if matcher is not None and request.thinking is not None else ()
        self._unfit_ends = frozenset(id_ for id_ in others if matcher is not None and not matcher.fits(id_))

    def stop_thinking(self) -> None:
        """The next id ends the thinking, if the answer still thinks."""
        self._thinking_must_end = True

    def next(self, logits: Tensor, position: int) -> Token:
        """logits float32 [V]; `position` is how many ids the state has read. Raises LogitsError and GrammarError."""
        request = self._request
        id_ = self._draw(logits, position)
        self._chosen += 1
        self._answer.add(id_)
        self._follow(id_)
        if request.logprobs is None:
            return Token(id_)
        return Token(id_, *logprobs(logits, id_, request.logprobs))

    def guess(self, logits: Tensor, position: int) -> int | None:
        """What `next` would choose, if these were the logits: a draft. Nothing changes; None if nothing can be said."""
        try:
            return self._draw(logits, position)
        except (LogitsError, GrammarError):
            return None

    def _draw(self, logits: Tensor, position: int) -> int:
        forced, request = self._forced(), self._request
        if forced is not None:
            return forced
        how = (request.temperature, request.top_p, request.seed, position, request.top_k, request.min_p)
        return sample(self._adjusted(logits), *how)

    def _forced(self) -> int | None:
        thinking = self._request.thinking
        if thinking is None or not self._thinking:
            return None
        spent = thinking.budget_tokens is not None and self._chosen >= thinking.budget_tokens
        return thinking.end_ids[0] if spent or self._thinking_must_end else None

    def _adjusted(self, logits: Tensor) -> Tensor:
        request = self._request
        penalties = (request.repetition_penalty, request.presence_penalty, request.frequency_penalty)
        if penalties != (1, 0, 0):
            logits = penalise(logits, self._prompt, self._answer, *penalties)
        forbidden = self._forbidden()
        if request.logit_bias or forbidden:
            logits = shift(logits, request.logit_bias, forbidden)
        if self._matcher is not None and not self._thinking:
            allowed = self._matcher.allowed(may_stop=self._chosen >= request.min_tokens)
            logits = logits.masked_fill(~allowed.to(logits.device), -torch.inf)
        return logits

    def _forbidden(self) -> frozenset[int]:
        """Ids that cannot come now, whatever their logits. Behind the thinking, the grammar decides about stop ids."""
        request = self._request
        if self._matcher is None:
            return request.stop_ids if self._chosen < request.min_tokens else frozenset()
        return request.stop_ids | self._unfit_ends if self._thinking else frozenset()

    def _follow(self, id_: int) -> None:
        """What an id that was chosen means for the thinking and for the grammar."""
        thinking = self._request.thinking
        begins = not self._thinking  # the answer's text, with this id
        if thinking is not None and self._thinking and id_ in thinking.end_ids:
            self._thinking = False
            begins = id_ != thinking.end_ids[0]  # the others end the thinking because the answer begins with them
        if begins and self._matcher is not None and id_ not in self._request.stop_ids:
            self._matcher.accept(id_)
