"""What a benchmark of drafts says: speeds with and without, here and on a slower card, and the plan beside them.

Owns arithmetic and words, no clock. What was measured are steps of one and of two rows on this machine, with drafts
that cost nothing. What the model's own block would take is computed, from its bytes at the rate of the dense weights
and one more layer of experts. So is the time on a card of SLOW_GB_S: to each step is added what its dense weights and
states take longer there; to each right draft what settling it reads and writes. Experts and hand-off are this
machine's. The plan is draft_forecast.py's, by rates of the same run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.engine.gpu.ledger import MIB
from services.tools.draft_forecast import two_tokens
from services.tools.hardware import CARDS, VRAM_SHARE, Box
from services.tools.predict import Method, Rates, Shape

SLOW_GB_S = 448.0  # of the makers' 8 GB cards' memory; VRAM_SHARE of it is what kernels get


@dataclass
class Sums:
    """Of one share of right drafts, over all rounds. `experts`: that were computed for the answers, in all layers."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    right: int = 0
    experts: int = 0
    tried: int = 0

    def ms(self, more_of_step: float = 0.0, more_of_right: float = 0.0) -> float:
        """Of a token, if steps and right drafts took so many milliseconds more."""
        return (self.seconds * 1e3 + self.steps * more_of_step + self.right * more_of_right) / self.tokens


@dataclass(frozen=True)
class Measured:
    """One run. `shape`: of the model, its `dense_bytes` all that a step of one row reads on the card; `idle_ms`: of it,
    a step that computes no expert; GB/s of RAM to the card, and to processor and card at once."""

    shape: Shape
    draft_bytes: int
    state_bytes: int
    repeated: float
    idle_ms: float
    link_gb_s: float
    together_gb_s: tuple[float, float]
    plain: Sums
    drafted: Mapping[float, Sums] = field(default_factory=dict)

    @property
    def dense_ms(self) -> float:
        return self.idle_ms - self.shape.moe_layers * Rates.handoff_us / 1e3

    def card_gb_s(self, slow: bool) -> float:
        """What its dense weights are read at."""
        return VRAM_SHARE * SLOW_GB_S if slow else self.shape.dense_bytes / self.dense_ms / 1e6

    def more_ms(self, slow: bool, own: bool) -> tuple[float, float, float]:
        """What is added to a plain step, to a step with a draft, and to a right draft; `own`: the block's drafts."""
        card_gb_s = self.card_gb_s(slow)
        step = self.shape.dense_bytes / card_gb_s / 1e6 - self.dense_ms
        settling = 2 * self.state_bytes * (1 / card_gb_s - 1 / self.card_gb_s(False)) / 1e6
        layer = (self.plain.ms() - self.dense_ms) / self.shape.moe_layers  # a hand-off and its experts
        draft = self.draft_bytes / card_gb_s / 1e6 + layer if own else 0.0
        return step, step + draft, settling

    def tok_s(self, share: float | None, slow: bool, own: bool) -> float:
        plain, drafted, settling = self.more_ms(slow, own)
        if share is None:
            return 1e3 / self.plain.ms(plain)
        return 1e3 / self.drafted[share].ms(drafted, settling)

    def gain(self, share: float, slow: bool, own: bool) -> float:
        return self.tok_s(share, slow, own) / self.tok_s(None, slow, own)

    def break_even(self, slow: bool, own: bool) -> float:
        """The share of right drafts from which on they pay: a step with one, over one without."""
        plain, drafted, settling = self.more_ms(slow, own)
        steps = sum(each.steps for each in self.drafted.values())
        both_ms = sum(each.seconds for each in self.drafted.values()) * 1e3 / steps + drafted
        one_ms = self.plain.ms(plain)
        return (both_ms - one_ms) / (one_ms - settling)

    def predicted(self, share: float, slow: bool, own: bool) -> tuple[float, float]:
        """The plan's gain, and its tokens a second without drafts."""
        cpu, gpu = self.together_gb_s
        here = Box(
            CARDS["rtx5060"], 0.0, self.card_gb_s(slow), self.link_gb_s, cpu, cpu + gpu, disk_gb_s=1.0, measured=True
        )
        found = two_tokens(self.shape, here, 1.0, self.draft_bytes if own else 0, self.repeated)
        return found.gain(share), 1e3 / found.one_ms

    def token_bytes(self, sums: Sums) -> float:
        """Expert bytes that were read for a token that was said."""
        return sums.experts / sums.tokens * Method.SPLIT.expert_bytes(self.shape)


WAYS = [(slow, own) for slow in (False, True) for own in (True, False)]


def told(found: Measured) -> Iterator[str]:
    yield (
        f"a token without drafts {found.plain.ms():.2f} ms, of which dense weights {found.dense_ms:.2f}; the block's "
        f"draft would read {found.draft_bytes / MIB:.0f} MiB on the card"
    )
    for slow, own in WAYS:
        yield f"\n{where(slow, own)}: {found.tok_s(None, slow, own):.2f} tok/s without drafts"
        for share, sums in found.drafted.items():
            planned, plain = found.predicted(share, slow, own)
            gain = found.gain(share, slow, own)
            yield (
                f"  {100 * sums.right / max(1, sums.tried):5.1f} % right{found.tok_s(share, slow, own):9.2f} tok/s"
                f"{gain:7.3f} times; planned {planned:.3f} of {plain:.2f} tok/s ({100 * (planned / gain - 1):+.1f} %)"
                f"{found.token_bytes(sums) / 1e6:9.1f} MB of experts a token"
            )
        yield f"  pays from {100 * found.break_even(slow, own):.1f} % on"


def where(slow: bool, own: bool) -> str:
    """In a note's words."""
    dense = (
        f"dense slowed to {VRAM_SHARE * SLOW_GB_S:.0f} GB/s (computed, added to each step)" if slow else "dense as is"
    )
    return f"{dense}, {'the cost of the block added (computed)' if own else 'drafts that cost nothing'}"


def rows(found: Measured, note: str) -> Iterator[tuple[str, float, str, str]]:
    for slow, own in WAYS:
        told_ = f"{note}; {where(slow, own)}"
        for share, sums in found.drafted.items():
            right = f"acceptance {sums.right / max(1, sums.tried):.3f}"
            planned, plain = found.predicted(share, slow, own)
            rates = f"{found.tok_s(share, slow, own):.2f} tok/s, {found.tok_s(None, slow, own):.2f} without"
            yield "mtp.gain", found.gain(share, slow, own), "ratio", f"{right}, {rates}; {told_}"
            yield (
                "mtp.predicted",
                planned,
                "ratio",
                f"{right}, {plain * planned:.2f} tok/s, {plain:.2f} without; {told_}",
            )
        yield "mtp.break_even", found.break_even(slow, own), "ratio", told_
    for name, sums in (("no drafts", found.plain), *((f"acceptance {s:g}", each) for s, each in found.drafted.items())):
        yield "mtp.token_bytes", found.token_bytes(sums), "B", f"expert bytes a token that was said; {name}; {note}"
