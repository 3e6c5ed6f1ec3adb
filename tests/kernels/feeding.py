"""Sweeps that are fed to nobody: their blocks are compared, byte for byte, as long as they are out."""

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
from expert_store import BlocksOnDisk

from kernels.experts.host.binding import Host
from kernels.experts.host.feed import Block, Feed

LAYERS, EXPERTS, TOKENS = 2, 24, 100
ALL = range(EXPERTS)


def naming(experts: Sequence[int], times: int = 1, of: int = EXPERTS) -> np.ndarray:
    counts = np.zeros(of, np.int32)
    counts[list(experts)] = times
    return counts


def is_whole(blocks: BlocksOnDisk, layer: int, block: Block) -> bool:
    expected = blocks.packed[layer * blocks.experts + block.expert].block.tobytes()
    return ctypes.string_at(block.address, len(expected)) == expected


def drain(
    feed: Feed,
    blocks: BlocksOnDisk,
    layer: int,
    most: int = 4,
    hold: int = 0,
    between: Callable[[], None] | None = None,
) -> list[int]:
    """All that is left, in order. Up to `hold` blocks stay out while more are asked for; each is whole to the last."""
    order: list[int] = []
    out: list[Block] = []

    def give_back(keep: int) -> None:
        while len(out) > keep:
            block = out.pop(0)
            assert is_whole(blocks, layer, block), f"expert {block.expert} was overwritten while it was out"
            feed.release(block.number)

    while (taken := feed.take(most)) is not None:
        order += [block.expert for block in taken]
        out += taken
        if between:
            between()
        give_back(hold if taken else max(0, len(out) - 1))
    give_back(0)
    return order


def swept(host: Host, blocks: BlocksOnDisk, layer: int, experts: Sequence[int] = ALL, times: int = 1) -> list[int]:
    feed = Feed(host)
    feed.begin(layer, naming(experts, times), TOKENS)
    order = drain(feed, blocks, layer)
    feed.end()
    return order


def changed(host: Host, before: dict[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in host.counters().items()}


def resident(host: Host, layer: int) -> set[int]:
    return {int(key) % EXPERTS for key in host.resident() if key // EXPERTS == layer}
