"""Two tokens in one step: a draft of the next id is fed behind the last one, and if the model chooses the same id, what
it says behind that is good, too. Owns when drafts are tried, and what becomes of them.

What is said never changes: the id behind the draft is chosen by the model's own logits, by the request's own rules and
its own randomness, as without drafts (greedy and drawn: an id is a function of logits, seed and position). A draft is
right if that id is the same. A wrong one leaves nothing behind, as `Segment.drafts` promises. But its experts are read
too: one that cannot be, damaged in every copy, ends all answers of the step though none of them needed it.

With `auto` a kind of drafts is tried as long as it pays: a right one saves a step, each costs its share of one. Both
are measured as it goes: the time of steps without drafts, by how many answer; what a draft adds to it; how often drafts
are right. Kinds that do not pay are tried again now and then.
"""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from services.engine.drafts import Source
from services.engine.metrics import Metrics
from services.engine.model import Segment
from services.engine.reading import Network
from services.engine.sequence import Sequence
from services.engine.state import State

LEAST_SAMPLES = 8  # before a judgement
CYCLE, TRIED = 128, 4  # of so many steps (or drafts) so many are done the other way, to know what that takes now
WINDOW = 32  # samples that a mean remembers
MOST_OFF = 4.0  # times the mean: what is beyond counts as that, such as a step that waited for a slow disk


@dataclass
class Mean:
    """Of about the last WINDOW samples."""

    value: float = 0.0
    samples: int = 0

    def add(self, sample: float) -> None:
        if self.samples >= LEAST_SAMPLES and self.value > 0:
            sample = min(sample, MOST_OFF * self.value)
        self.samples += 1
        self.value += (sample - self.value) / min(self.samples, WINDOW)


@dataclass
class Judgement:
    """Of one kind. `right`: share of drafts; `extra`: share of a step that a draft for every sequence adds to it."""

    tried: int = 0
    accepted: int = 0
    right: Mean = field(default_factory=Mean)
    extra: Mean = field(default_factory=Mean)
    passed_over: int = 0

    @property
    def gain(self) -> float:
        """Tokens in a time with a draft for every sequence, over those without; 1 before anything is known."""
        return (1 + self.right.value) / (1 + self.extra.value) if self.extra.samples else 1.0

    def wants(self) -> bool:
        """Whether a draft of this kind is to be tried now, if there is one."""
        if min(self.right.samples, self.extra.samples) < LEAST_SAMPLES or self.gain > 1:
            return True
        self.passed_over += 1
        return self.passed_over % CYCLE < TRIED


class Speculation:
    """Without sources every step is one token for each sequence. Used by the engine's thread only."""

    def __init__(
        self,
        sources: Seq[Source] = (),
        settle: Callable[[State, int], None] = lambda state, accepted: None,
        metrics: Metrics | None = None,
        always: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`settle`: the network's; `always`: whether it pays or not."""
        self.sources, self._settle, self._metrics = sources, settle, metrics
        self._always, self._clock = always, clock
        self.judgements = {source.kind: Judgement() for source in sources}
        self._plain_s: dict[int, Mean] = {}  # of steps without drafts, by sequences
        self._steps = 0
        self._kinds: dict[Sequence, str] = {}  # whose draft is tried in this step

    def forward(
        self, network: Network, batch: Seq[Sequence], give_way: Callable[[], bool]
    ) -> list[tuple[Sequence, Segment, Tensor]]:
        """A step of those that answer: for each what was fed, and the logits after its last id and after its draft."""
        begun = self._clock()
        drafts = self._drafts(batch)
        segments = [
            Segment(sequence.state, [sequence.last_id], drafts=drafts.get(sequence, ()))
            for sequence in batch
            if sequence.state is not None
        ]
        logits = network.forward(segments, give_way)
        self._timed(len(batch), self._clock() - begun)
        rows = logits.split([1 + len(segment.drafts) for segment in segments])  # type: ignore[no-untyped-call]
        return list(zip(batch, segments, rows, strict=True))

    def take(
        self, sequence: Sequence, segment: Segment, logits: Tensor, sample: Callable[[Sequence, Tensor], None]
    ) -> None:
        """Choose from what a step gave, and once more if the draft was right."""
        sample(sequence, logits[0])
        if not segment.drafts:
            return
        right = not sequence.over and sequence.last_id == segment.drafts[0]
        self._settle(segment.state, int(right))
        self._count(self._kinds[sequence], right)
        if right:
            sample(sequence, logits[1])

    def _drafts(self, batch: Seq[Sequence]) -> dict[Sequence, tuple[int]]:
        """From the first source that has one. None that would pass the end of an answer."""
        self._kinds = {}
        drafts: dict[Sequence, tuple[int]] = {}
        if not self.sources or self._is_plain(len(batch)):
            return drafts
        for source in sorted(self.sources, key=self._worth):
            open_ = [s for s in batch if s not in drafts and s.generated_tokens + 2 <= s.request.max_tokens]
            if not open_:
                break
            for sequence, draft in zip(open_, self._tried(source, open_), strict=True):
                if draft is not None:
                    drafts[sequence], self._kinds[sequence] = (draft,), source.kind
        return drafts

    def _tried(self, source: Source, sequences: Seq[Sequence]) -> Seq[int | None]:
        """What a source says that costs nothing is asked for in any case: it seldom says anything."""
        none, judged = [None] * len(sequences), self.judgements[source.kind]
        if source.costly and not (self._always or judged.wants()):
            return none
        found = source.draft(sequences)
        return found if source.costly or self._always or (found != none and judged.wants()) else none

    def _worth(self, source: Source) -> tuple[bool, float]:
        """The best comes first, but for one that is not known yet."""
        judged = self.judgements[source.kind]
        return judged.right.samples >= LEAST_SAMPLES, -judged.gain

    def _is_plain(self, sequences: int) -> bool:
        """Whether the time of a step without drafts is to be known better."""
        self._steps += 1
        known = self._plain_s.get(sequences)
        few = known is None or known.samples < LEAST_SAMPLES
        return not self._always and (few or self._steps % CYCLE < TRIED)

    def _timed(self, sequences: int, seconds: float) -> None:
        plain = self._plain_s.setdefault(sequences, Mean())
        if not self._kinds:
            plain.add(seconds)
        elif plain.samples and len(kinds := set(self._kinds.values())) == 1:  # of a mixture, nobody knows whose it is
            share = len(self._kinds) / sequences
            self.judgements[kinds.pop()].extra.add(max(0.0, seconds / plain.value - 1) / share)

    def _count(self, kind: str, right: bool) -> None:
        judged = self.judgements[kind]
        judged.tried += 1
        judged.accepted += right
        judged.right.add(right)
        if self._metrics is not None:
            self._metrics.drafted[kind,].inc()
            self._metrics.accepted[kind,].inc(right)
            self._metrics.draft_gain[kind,].set(judged.gain if judged.extra.samples else 0.0)
