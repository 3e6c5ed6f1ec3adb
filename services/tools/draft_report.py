"""What a benchmark of drafts says: speeds with and without, here and on a slower card, and the plan beside them.

Owns arithmetic and words, no clock. What was measured are steps of one and of two rows on this machine, with drafts
that cost nothing, and, if the store has one, with the block that drafts. Without one, what that would take is computed,
from its bytes at the rate of the dense weights and one more layer of experts. So is the time on a card of SLOW_GB_S: to
each step is added what its dense weights and states take longer there; to each draft, what the block's do; to each
right one what settling it reads and writes. Experts and hand-off are this machine's. The plan is draft_forecast.py's,
by rates of the same run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from services.engine.gpu.ledger import MIB
from services.tools.draft_forecast import TwoTokens, two_tokens
from services.tools.draft_parts import Parts
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
    network_s: float = 0.0  # of all seconds, in the network's steps

    def ms(self, more_of_step: float = 0.0, more_of_right: float = 0.0) -> float:
        """Of a token, if steps and right drafts took so many milliseconds more."""
        return (self.seconds * 1e3 + self.steps * more_of_step + self.right * more_of_right) / self.tokens

    @property
    def step_ms(self) -> float:
        return self.seconds * 1e3 / self.steps

    @property
    def outside_ms(self) -> float:
        """Of a step, what is not the network's: choosing, drafts, settling."""
        return (self.seconds - self.network_s) * 1e3 / self.steps


@dataclass(frozen=True)
class Measured:
    """One run. `shape`: of the model, its `dense_bytes` all that a step of one row reads on the card; `processor_us`:
    of a layer's experts, with one token and with two of the same; GB/s of RAM to the card, and to processor and card at
    once. `own`: with the block's drafts, if the store has one."""

    shape: Shape
    draft_bytes: int
    state_bytes: int
    repeated: float
    parts: Parts
    processor_us: tuple[float, float]
    link_gb_s: float
    together_gb_s: tuple[float, float]
    plain: Sums
    drafted: Mapping[float, Sums] = field(default_factory=dict)
    own: Mapping[float, Sums] = field(default_factory=dict)

    @property
    def dense_ms(self) -> float:
        return self.parts.idle_ms[0] - self.shape.moe_layers * Rates.handoff_us / 1e3

    def card_gb_s(self, slow: bool) -> float:
        """What its dense weights are read at."""
        return VRAM_SHARE * SLOW_GB_S if slow else self.shape.dense_bytes / self.dense_ms / 1e6

    def sums(self, own: bool) -> Mapping[float, Sums]:
        return self.own if own and self.own else self.drafted

    def more_ms(self, slow: bool, own: bool) -> tuple[float, float, float]:
        """What is added to a plain step, to a step with a draft, and to a right draft; `own`: the block's drafts."""
        card_gb_s, here_gb_s = self.card_gb_s(slow), self.card_gb_s(False)
        step = self.shape.dense_bytes / card_gb_s / 1e6 - self.dense_ms
        settling = 2 * self.state_bytes * (1 / card_gb_s - 1 / here_gb_s) / 1e6
        draft = 0.0
        if own and self.own:  # what it takes here is measured
            draft = self.draft_bytes * (1 / card_gb_s - 1 / here_gb_s) / 1e6
        elif own:
            layer = (self.plain.ms() - self.dense_ms) / self.shape.moe_layers  # a hand-off and its experts
            draft = self.draft_bytes / card_gb_s / 1e6 + layer
        return step, step + draft, settling

    def tok_s(self, share: float | None, slow: bool, own: bool) -> float:
        plain, drafted, settling = self.more_ms(slow, own)
        if share is None:
            return 1e3 / self.plain.ms(plain)
        return 1e3 / self.sums(own)[share].ms(drafted, settling)

    def gain(self, share: float, slow: bool, own: bool) -> float:
        return self.tok_s(share, slow, own) / self.tok_s(None, slow, own)

    def break_even(self, slow: bool, own: bool) -> float:
        """The share of right drafts from which on they pay: a step with one, over one without."""
        plain, drafted, settling = self.more_ms(slow, own)
        steps = sum(each.steps for each in self.sums(own).values())
        both_ms = sum(each.seconds for each in self.sums(own).values()) * 1e3 / steps + drafted
        one_ms = self.plain.ms(plain)
        return (both_ms - one_ms) / (one_ms - settling)

    def planned(self, slow: bool, own: bool) -> TwoTokens:
        """By this run's rates: RAM as both read it at once, the processor's kernels, the card's dense kernels."""
        cpu, gpu = self.together_gb_s
        one_us, two_us = self.processor_us
        kernels_gb_s = self.shape.experts_per_token * Method.CPU.expert_bytes(self.shape) / one_us / 1e3
        here = Box(
            CARDS["rtx5060"], 0.0, self.card_gb_s(slow), gpu, kernels_gb_s, cpu + gpu, disk_gb_s=1.0, measured=True,
            again=max(0.0, two_us / one_us - 1),
        )  # fmt: skip
        idle, two_idle = self.parts.idle_ms
        return two_tokens(
            self.shape, here, 1.0, self.draft_bytes if own else 0, self.state_bytes, self.repeated, two_idle - idle
        )

    def predicted(self, share: float, slow: bool, own: bool) -> tuple[float, float]:
        """The plan's gain, and its tokens a second without drafts."""
        found = self.planned(slow, own)
        return found.gain(share), 1e3 / found.one_ms

    def token_bytes(self, sums: Sums) -> float:
        """Expert bytes that were read for a token that was said."""
        return sums.experts / sums.tokens * Method.SPLIT.expert_bytes(self.shape)


WAYS = [(slow, own) for slow in (False, True) for own in (True, False)]


def told(found: Measured) -> Iterator[str]:
    yield (
        f"a token without drafts {found.plain.ms():.2f} ms, of which dense weights {found.dense_ms:.2f}; the block's "
        f"draft reads {found.draft_bytes / MIB:.0f} MiB on the card; together {found.together_gb_s[0]:.1f} + "
        f"{found.together_gb_s[1]:.1f} GB/s, the link alone {found.link_gb_s:.1f}"
    )
    for name, value, unit, what in part_rows(found):
        yield f"  {name:<24}{value:9.3f} {unit:<6}{what}"
    for slow, own in WAYS:
        planned_of = found.planned(slow, own)
        yield (
            f"\n{where(found, slow, own)}: {found.tok_s(None, slow, own):.2f} tok/s without drafts; planned: one row "
            f"{planned_of.one_ms:.2f} ms, two {planned_of.two_ms:.2f}, a draft {planned_of.draft_ms:.2f}, a right one "
            f"{planned_of.right_ms:.2f} more"
        )
        for share, sums in found.sums(own).items():
            planned, plain = found.predicted(share, slow, own)
            gain = found.gain(share, slow, own)
            yield (
                f"  {100 * sums.right / max(1, sums.tried):5.1f} % right{found.tok_s(share, slow, own):9.2f} tok/s"
                f"{gain:7.3f} times; planned {planned:.3f} of {plain:.2f} tok/s ({100 * (planned / gain - 1):+.1f} %)"
                f"{found.token_bytes(sums) / 1e6:9.1f} MB of experts a token"
            )
        yield f"  pays from {100 * found.break_even(slow, own):.1f} % on"


def part_rows(found: Measured) -> Iterator[tuple[str, float, str, str]]:
    """Name, value, unit, what it is: of a step's parts."""
    parts, plan = found.parts, found.planned(slow=False, own=False)
    yield "mtp.one_idle_ms", parts.idle_ms[0], "ms", "a step of one row that computes no expert"
    yield "mtp.two_idle_ms", parts.idle_ms[1], "ms", "of two rows"
    yield "mtp.one_ms", parts.one_ms, "ms", "a step of one row, the network alone"
    yield "mtp.same_ms", parts.same_ms, "ms", "of two rows that name the same experts"
    yield "mtp.apart_ms", parts.apart_ms, "ms", "of two rows that name none together"
    yield "mtp.again", parts.again, "ratio", "a second token of the same experts, over the first one's time"
    yield "mtp.again_planned", plan.again, "ratio", "the same by the plan"
    yield (
        "mtp.again_cpu",
        found.processor_us[1] / found.processor_us[0] - 1,
        "ratio",
        "the same, on the processor alone",
    )
    yield "mtp.processor_us", found.processor_us[0], "us", "a layer's experts on the processor alone"
    yield "mtp.twice", parts.twice, "ratio", "as many experts again, over the first ones' time"
    yield "mtp.settle_ms", parts.settle_ms, "ms", "settling a right draft"
    yield "mtp.outside_ms", found.plain.outside_ms, "ms", "of a step without drafts, outside of the network"
    for share, sums in found.drafted.items():
        yield "mtp.step_ms", sums.step_ms, "ms", f"a step with a draft that costs nothing, {share:g} right"
        yield "mtp.step_outside_ms", sums.outside_ms, "ms", f"of that, outside of the network, {share:g} right"
    for share, sums in found.own.items():
        more = sums.step_ms - found.drafted[share].step_ms
        yield "mtp.own_draft_ms", more, "ms", f"what the block's draft adds to a step, {share:g} right"


def where(found: Measured, slow: bool, own: bool) -> str:
    """In a note's words."""
    dense = (
        f"dense slowed to {VRAM_SHARE * SLOW_GB_S:.0f} GB/s (computed, added to each step)" if slow else "dense as is"
    )
    asked = "the block's own drafts" if found.own else "the cost of the block added (computed)"
    return f"{dense}, {asked if own else 'drafts that cost nothing'}"


def rows(found: Measured, note: str) -> Iterator[tuple[str, float, str, str]]:
    for slow, own in WAYS:
        told_ = f"{note}; {where(found, slow, own)}"
        for share, sums in found.sums(own).items():
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
    for name, value, unit, what in part_rows(found):
        yield name, value, unit, f"{what}; {note}"
    for name, sums in (("no drafts", found.plain), *((f"acceptance {s:g}", each) for s, each in found.drafted.items())):
        yield "mtp.token_bytes", found.token_bytes(sums), "B", f"expert bytes a token that was said; {name}; {note}"
