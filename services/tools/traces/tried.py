"""What the published engine's author tried and found not to pay, tried again by replay. Owns the five experiments and
says of each what a replay cannot see."""

from dataclasses import replace

import numpy as np

from kernels.experts.host.replay import SHIPPED, Clock, Counts, Routing, replay
from services.tools.predict import GB, Method, Rates, Shape, layer_of
from services.tools.traces.sources import Source

SHARE = 0.24
VRAM_GB = 0.5  # that an 8 GB card may have left


def run(answers: Source, dialogs: Source, rates: Rates) -> None:
    """`answers` is decode alone, `dialogs` has prompts."""
    slots = int(SHARE * answers.shape.blocks)
    layer = layer_of(answers.shape, rates, Method.CPU)
    clock = Clock(layer.gap_ns, layer.expert_ns, layer.read_ns, layer.overlapped, late_ns=layer.late_ns)
    print(f"{SHARE:.0%} of the experts in RAM; traces {answers.name} and {dialogs.name}; the routing is made up\n")
    prompts(dialogs, slots, clock)
    guesses(answers, slots, clock)
    on_the_gpu(answers, rates)
    early_copies(answers.shape, rates)
    neurons(answers.shape, rates)


def prompts(dialogs: Source, slots: int, clock: Clock) -> None:
    print("1. prompt experts into the cache: decode hits with the prompts replayed, and with them left out")
    alone = without_prompts(dialogs.routing)
    for policy in ("lru", SHIPPED):
        [seen], [unseen] = replay(dialogs.routing, policy, [slots], clock), replay(alone, policy, [slots], clock)
        gain = 100 * (seen.hit_rate - unseen.hit_rate)
        print(f"   {policy:<8} {seen.hit_rate:.2%} with, {unseen.hit_rate:.2%} without: {gain:+.2f} points")
    print("   The trace lets a prompt share its subject with its answer; how much real ones do is not known.\n")


def guesses(answers: Source, slots: int, clock: Clock) -> None:
    print("2. more guesses: so many of a token's first ones for the next layer, and for the one after it")
    [off] = replay(answers.routing, SHIPPED, [slots], clock)
    print(f"   none              {_ms(off, answers):7.2f} ms a token")
    for ranks, ahead in ((4, 1), (6, 1), (8, 1), (11, 1), (22, 1), (4, 2), (8, 2)):
        [on] = replay(answers.routing, SHIPPED, [slots], replace(clock, prefetch="on", ranks=ranks, ahead=ahead))
        useful = on.prefetch_useful / max(1, on.prefetch_issued)
        says = f"{useful:.0%} of {on.prefetch_issued:,} reads useful"
        print(f"   {ranks:>2}, {ahead} ahead       {_ms(on, answers):7.2f} ms a token, {says}")
    print("   How right each rank is was taken from the demo's routers; the mean, 72 %, is the published one.\n")


def on_the_gpu(answers: Source, rates: Rates) -> None:
    places = int(VRAM_GB * GB / answers.shape.block_bytes)
    half = len(answers.routing.layer) // 2
    keys = np.repeat(answers.routing.layer, answers.routing.rows_of_step)[:, None] * answers.shape.experts
    keys = (keys + answers.routing.ids).astype(np.int64)
    cut = int(answers.routing.first[half])
    hottest = np.argsort(-np.bincount(keys[:cut].ravel(), minlength=answers.shape.blocks))[:places]
    share = float(np.isin(keys[cut:], hottest).mean())
    layer = layer_of(answers.shape, rates, Method.CPU)
    most_ms = share * answers.shape.experts_per_token * layer.expert_ns * answers.shape.moe_layers / 1e6
    print(f"3. experts kept on the GPU: {places} blocks in {VRAM_GB} GB, {places / answers.shape.blocks:.1%} of all")
    print(f"   the hottest of the trace's first half are {share:.2%} of the second half's lookups")
    print(
        f"   at most {most_ms:.2f} ms a token, if they cost nothing there; the same memory holds two dialogs' states\n"
    )


def early_copies(shape: Shape, rates: Rates) -> None:
    gap_ns = shape.dense_bytes / shape.moe_layers / rates.vram_gb_s
    copied = min(gap_ns * rates.pcie_gb_s, shape.experts_per_token * (shape.values_bytes + shape.scales_bytes))
    best_ms = 0.72 * copied / rates.pcie_gb_s * shape.moe_layers / 1e6
    print("4. early copies of guessed experts over PCIe, while the GPU computes the dense part")
    print(
        f"   room for {copied / 1e6:.1f} MB a layer; with 72 % right, at most {best_ms:.1f} ms of a token that copies."
    )
    print("   What they cost (staging memory, order of streams, reads of RAM that the disk's DMA shares) no")
    print("   replay sees. Computed where the bytes lie, nothing is copied, so there is nothing to be early with.\n")


def neurons(shape: Shape, rates: Rates) -> None:
    print("5. alive neurons instead of alive groups of 16")
    for method in (Method.GROUPS, Method.CPU):
        megabytes = method.expert_bytes(shape) * shape.experts_per_token * shape.moe_layers / 1e6
        print(f"   {method.value:<8}{megabytes:8.0f} MB a token, {megabytes / rates.pcie_gb_s:6.1f} ms over PCIe")
    print("   Bytes only: a replay cannot see what pieces of 512 bytes cost over PCIe. That is a measurement on a card")
    print("   (thimble bench experts); by the processor, from RAM, a row of 512 bytes is read as fast as any.")


def without_prompts(routing: Routing) -> Routing:
    single = routing.rows_of_step == 1
    rows = np.repeat(single, routing.rows_of_step)
    first = np.arange(single.sum() + 1, dtype=np.int64)
    return Routing(routing.layers, routing.experts, routing.layer[single], first, routing.ids[rows])


def _ms(count: Counts, trace: Source) -> float:
    return count.decode_ns / trace.decoded_tokens / 1e6
