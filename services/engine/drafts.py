"""Where drafts come from: guesses at the id behind the last one of an answer. Owns no judgement of them: they are
tried, and what is wrong costs time and, on a sound disk, never a word.

    ngram   what followed the last few ids where they came before, in prompt or answer: quotes, edits, lists
    mtp     what the model's own multi-token-prediction block says
"""

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.engine.errors import StepError
from services.engine.sequence import Sequence
from services.engine.state import State
from services.engine.vision.ids import FIRST

ALIKE = 3  # ids that have to be the same before what followed them is a guess

log = logging.getLogger(__name__)


class Source(Protocol):
    """One kind of drafts. Used by the engine's thread only."""

    kind: str
    costly: bool  # to ask, beside what its drafts cost when they are tried

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        """For each, whose last id was chosen and is not fed yet: the next id, or None."""
        ...


class Copying:
    """Drafts from what each sequence has read and said."""

    kind, costly = "ngram", False

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, Text] = WeakKeyDictionary()

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        return [self._text(sequence).following() for sequence in sequences]

    def _text(self, sequence: Sequence) -> "Text":
        text = self._texts.get(sequence)
        if text is None:
            text = self._texts[sequence] = Text()
        state = sequence.state
        assert state is not None
        text.extend(state.ids[text.size - text.ahead :])
        text.extend([sequence.last_id], ahead=1)
        return text


class Text:
    """Ids in order. The last `ahead` of them may be said again, by whoever knows them better."""

    def __init__(self) -> None:
        self._ids: npt.NDArray[np.int64] = np.empty(1024, np.int64)
        self.size = self.ahead = 0

    def extend(self, ids: Seq[int], ahead: int = 0) -> None:
        """In the place of what was ahead."""
        begin = self.size - self.ahead
        self.size, self.ahead = begin + len(ids), ahead
        if self.size > len(self._ids):
            self._ids = np.concatenate([self._ids[:begin], np.empty(2 * self.size - begin, np.int64)])
        self._ids[begin : self.size] = ids

    def following(self) -> int | None:
        """What followed the last ALIKE ids where they came before, the last time."""
        ids = self._ids[: self.size]
        if len(ids) <= ALIKE:
            return None
        places = len(ids) - ALIKE  # where an earlier run of them may begin
        same = np.ones(places, np.bool_)
        for offset in range(ALIKE):
            same &= ids[offset : offset + places] == ids[len(ids) - ALIKE + offset]
        found = np.flatnonzero(same)
        if not len(found):
            return None
        id_ = int(ids[found[-1] + ALIKE])
        return id_ if id_ < FIRST else None  # a picture's place is no word


class Predicting:
    """Drafts of the multi-token-prediction block: what the request's own way of choosing makes of its logits. With the
    same randomness as will choose from the model's, so that where both agree, so do the ids."""

    kind, costly = "mtp", True

    def __init__(self, logits: Callable[[Seq[State], Seq[int]], Tensor]) -> None:
        """`logits`: DraftHead's."""
        self._logits = logits

    def draft(self, sequences: Seq[Sequence]) -> list[int | None]:
        known = [s for s in sequences if s.state is not None and s.state.can_draft]
        found: dict[Sequence, int | None] = {}
        if known:
            states = [s.state for s in known if s.state is not None]
            try:
                rows = self._logits(states, [s.last_id for s in known])
            except StepError as error:  # the answer can do without
                log.warning("no drafts in this step: %s", error)
                return [None] * len(sequences)
            for sequence, state, row in zip(known, states, rows, strict=True):
                found[sequence] = sequence.choosing.guess(row, state.tokens + 1)
        return [found.get(sequence) for sequence in sequences]
