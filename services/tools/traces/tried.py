"""What the published engine's author tried and found not to pay, tried again: one table, by replay and by bytes. Owns
the five experiments, and says of each what neither can see."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kernels.experts.host.replay import SHIPPED, Clock, Routing, replay
from services.tools import figures
from services.tools.predict import GB, Method, Rates, Shape, layer_of, token
from services.tools.traces.kept import without_hottest
from services.tools.traces.sources import Source
from services.tools.traces.steady import steady

SHARE = 0.24
CARD_GB = 0.5  # that an 8 GB card may have left
RIGHT = 0.72  # published: of the guesses at the next layer's experts


@dataclass(frozen=True)
class Tried:
    """One experiment: a figure without what was tried and with it. `unseen`: what would change it and is not known."""

    name: str  # of the row
    what: str
    unit: str
    without: float
    with_it: float
    more_is_better: bool = False
    by: str = "replay"
    unseen: str = ""

    @property
    def gain(self) -> float:
        """Of what it was without; less than nothing if it costs."""
        change = self.with_it / self.without - 1
        return change if self.more_is_better else -change


def run(answers: Source, dialogs: Source, rates: Rates, results: Path | None = None) -> None:
    """`answers` is decode alone, `dialogs` has prompts."""
    print(f"{SHARE:.0%} of the experts in RAM; traces {answers.name} and {dialogs.name}; the routing is made up\n")
    print(f"{'tried':<58}{'by':<9}{'without':>9}{'with':>9}  {'':<18}{'gain':>7}")
    unseen = []
    for one in experiments(answers, dialogs, rates):
        print(
            f"{one.what:<58}{one.by:<9}{one.without:>9.2f}{one.with_it:>9.2f}  {one.unit:<18}{one.gain:>+7.1%}",
            flush=True,
        )
        if one.unseen and one.unseen not in unseen:
            unseen.append(one.unseen)
        if results:
            note = f"{one.what}, by {one.by}: {one.without:.2f} without, {one.with_it:.2f} with, {one.unit}"
            figures.append(results, f"tried.{one.name}", one.gain, "share gained", note)
    print("\nNot seen:")
    for text in unseen:
        print(f"  {text}")


def experiments(answers: Source, dialogs: Source, rates: Rates) -> Iterator[Tried]:
    slots = int(SHARE * answers.shape.blocks)
    layer = layer_of(answers.shape, rates, Method.CPU)
    clock = Clock(layer.gap_ns, layer.expert_ns, layer.read_ns, layer.overlapped, late_ns=layer.late_ns)
    yield from prompts(dialogs, slots, clock)
    yield from guesses(answers, slots, clock)
    yield on_the_card(answers, slots, clock, rates)
    yield early_copies(answers.shape, rates)
    yield neurons(answers.shape, rates)


def prompts(dialogs: Source, slots: int, clock: Clock) -> Iterator[Tried]:
    alone = without_prompts(dialogs.routing)
    for policy, name in (("lru", "their LRU"), (SHIPPED, "ours")):
        [seen], [unseen] = replay(dialogs.routing, policy, [slots], clock), replay(alone, policy, [slots], clock)
        yield Tried(
            f"prompt_experts_{policy}",
            f"prompts' experts into the cache, {name}",
            "% of hits",
            100 * unseen.hit_rate,
            100 * seen.hit_rate,
            more_is_better=True,
            unseen="prompts: how much of its subject a real prompt shares with its answer",
        )


def guesses(answers: Source, slots: int, clock: Clock) -> Iterator[Tried]:
    def ms(ranks: int, ahead: int = 1) -> float:
        on = replace(clock, prefetch="on", ranks=ranks, ahead=ahead)
        [count] = replay(answers.routing, SHIPPED, [slots], on)
        return count.decode_ns / answers.decoded_tokens / 1e6

    top_k = answers.shape.experts_per_token
    tried = ((4, 6, 1), (6, 8, 1), (8, top_k // 2, 1), (top_k // 2, top_k, 1), (8, 8, 2))
    for fewer, more, ahead in tried:
        what = f"{more} guesses for the next layer instead of {fewer}"
        yield Tried(
            f"guesses_{more}_for_{fewer}" if ahead == 1 else "guesses_two_ahead",
            what if ahead == 1 else f"{more} guesses two layers ahead, too",
            "ms a token",
            ms(fewer),
            ms(more, ahead),
            unseen="guesses: how right each rank is was taken from the demo's routers; their mean, 72 %, is published",
        )


def on_the_card(answers: Source, slots: int, clock: Clock, rates: Rates) -> Tried:
    places, warm = int(CARD_GB * GB / answers.shape.block_bytes), answers.decoded_tokens // 2
    without = steady(answers.routing, warm, slots, clock)
    found = steady(without_hottest(answers.routing, places, warm), warm, slots, clock)
    there_ms = (without.lookups - found.lookups) * Method.CPU.expert_bytes(answers.shape) / rates.vram_gb_s / 1e6
    return Tried(
        "experts_on_the_card",
        f"{CARD_GB} GB of the hottest experts kept on the card",
        "ms a token",
        without.ms,
        found.ms + there_ms,
        unseen="experts on the card: the same memory holds two dialogs' states more",
    )


def early_copies(shape: Shape, rates: Rates) -> Tried:
    gap_ns = shape.dense_bytes / shape.moe_layers / rates.vram_gb_s
    copied = min(gap_ns * rates.pcie_gb_s, shape.experts_per_token * (shape.values_bytes + shape.scales_bytes))
    best_ms = RIGHT * copied / rates.pcie_gb_s * shape.moe_layers / 1e6
    without_ms = token(shape, rates, Method.GROUPS, 0).total_ms
    return Tried(
        "early_copies",
        "copies of guessed experts while the card computes, theirs",
        "ms a token at best",
        without_ms,
        without_ms - best_ms,
        by="bytes",
        unseen="early copies: staging memory, order of streams, reads of RAM that the disk's writes share; where bytes "
        "are\n    computed where they lie, nothing is copied, so there is nothing to be early with",
    )


def neurons(shape: Shape, rates: Rates) -> Tried:
    groups, single = (
        method.expert_bytes(shape) * shape.experts_per_token * shape.moe_layers / rates.pcie_gb_s / 1e6
        for method in (Method.GROUPS, Method.CPU)
    )
    return Tried(
        "neurons_for_groups",
        "alive neurons instead of alive groups of 16, theirs",
        "ms of PCIe a token",
        groups,
        single,
        by="bytes",
        unseen="neurons: what pieces of 512 bytes cost over PCIe; thimble bench experts measures it on a card",
    )


def without_prompts(routing: Routing) -> Routing:
    single = routing.rows_of_step == 1
    rows = np.repeat(single, routing.rows_of_step)
    first = np.arange(single.sum() + 1, dtype=np.int64)
    return Routing(routing.layers, routing.experts, routing.layer[single], first, routing.ids[rows])
