"""Blocks on their way to a device through a ring: each named one once, whole when it is given out, and how its lookups
are computed. Here the device is the host's memory; on a GPU the sweep's own tests see to the rest."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from expert_store import BlocksOnDisk, write_blocks
from feeding import ALL, EXPERTS, LAYERS, TOKENS, changed, naming

from kernels.experts.device.ring import Group, Ring
from kernels.experts.host.binding import Host
from kernels.experts.host.feed import Feed
from kernels.workers.pool import Workers

GROUPS, GROUP, LAYER = 3, 4, 1


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), LAYERS, EXPERTS)


@pytest.fixture(params=[EXPERTS * LAYERS, 6], ids=["all in RAM", "few slots"])
def host(request: pytest.FixtureRequest, blocks: BlocksOnDisk) -> Iterator[Host]:
    workers = Workers(1, spin_us=0)
    opened = Host(blocks.catalog(), workers, slots=request.param, readers=2, poison=True)
    ids = torch.arange(EXPERTS, dtype=torch.int32)[None, : request.param]
    opened.step(LAYER, ids, torch.ones(ids.shape), torch.ones(1, blocks.layout.latent))
    yield opened
    opened.check()
    opened.close()
    workers.close()


class Reader:
    """A ring, and what was given out: of each group the experts, all whole in the ring."""

    def __init__(self, host: Host, blocks: BlocksOnDisk, most_rows: int = TOKENS) -> None:
        self.host, self.blocks, self.feed = host, blocks, Feed(host)
        places = torch.full((GROUPS * GROUP, blocks.layout.block_bytes), 0xFF, dtype=torch.uint8)
        self.places, self.ring = places, Ring(host, places, GROUPS, most_rows)

    def items(self, group: Group) -> list[list[list[int]]]:
        """Of each pass: expert, place, row of h, first lookup, lookups."""
        return [self.ring.tables[first : first + items].tolist() for first, items, _ in group.passes]

    def experts(self, group: Group) -> list[int]:
        for expert, place, *_ in (item for items in self.items(group) for item in items):
            expected = self.blocks.packed[LAYER * EXPERTS + expert].block
            assert self.places[place].numpy().tobytes()[: len(expected)] == expected.tobytes()
        return [expert for items in self.items(group) for expert, *_ in items]

    def layer(self, counts: np.ndarray) -> list[int]:
        self.feed.begin(LAYER, counts, TOKENS)
        found: list[int] = []
        self.copied = 0
        while (group := self.ring.next(counts, 0)) is not None:
            assert len(self.experts(group)) == group.blocks
            found += self.experts(group)
            self.copied += group.copied
            self.ring.used(0)
        self.ring.drain()
        self.feed.end()
        return found


def test_each_named_block_comes_once(host: Host, blocks: BlocksOnDisk) -> None:
    reader = Reader(host, blocks)
    for named in (ALL, [3, 5], [7]):
        assert sorted(reader.layer(naming(named))) == list(named)
        assert reader.copied == len(named)
    assert reader.layer(naming([])) == []


def test_what_came_ahead_does_not_come_again(host: Host, blocks: BlocksOnDisk) -> None:
    reader = Reader(host, blocks)
    for named in (ALL, range(1, EXPERTS, 2), [EXPERTS - 1]):
        before = host.counters()
        reader.feed.guess(LAYER)
        copied = reader.ring.ahead()
        assert 0 < copied <= GROUPS * GROUP
        counted = changed(host, before)
        assert (counted["hits"], counted["misses"], counted["sweep_blocks"]) == (0, 0, 0), "nothing was named yet"
        assert sorted(reader.layer(naming(named))) == list(named), "others are in no table"
        assert len(named) <= copied + reader.copied <= len(named) + (copied if named != ALL else 0)
        counted = changed(host, before)
        assert counted["hits"] + counted["misses"] == counted["sweep_blocks"] == len(named)


def test_a_guess_that_nothing_follows_keeps_nothing(host: Host, blocks: BlocksOnDisk) -> None:
    reader = Reader(host, blocks)
    reader.feed.guess(LAYER)
    assert reader.ring.ahead() > 0
    reader.ring.drain()
    reader.feed.end()
    assert sorted(reader.layer(naming(ALL))) == list(ALL)
    assert reader.copied == EXPERTS, "what came ahead of another layer is not taken for this one's"


def test_a_guess_is_of_the_layer_that_follows(host: Host, blocks: BlocksOnDisk) -> None:
    feed = Feed(host)
    feed.guess(LAYER)
    with pytest.raises(AssertionError, match="has not ended"):
        feed.begin(0, naming(ALL), TOKENS)
    feed.end()
    with pytest.raises(ValueError, match="layer 7"):
        feed.guess(7)


def test_a_group_with_many_lookups_is_computed_in_passes(host: Host, blocks: BlocksOnDisk) -> None:
    reader, counts = Reader(host, blocks, most_rows=4), naming(ALL, 0)
    counts[[2, 3, 5]] = 3, 10, 1
    reader.feed.begin(LAYER, counts, TOKENS)
    found: dict[int, tuple[int, int]] = {}  # place and lookups so far
    while (group := reader.ring.next(counts, 0)) is not None:
        for items, (_, _, most_rows) in zip(reader.items(group), group.passes, strict=True):
            assert sum(lookups for *_, lookups in items) <= 4
            assert most_rows == max(lookups for *_, lookups in items)
            row = 0
            for expert, place, h_row, first, lookups in items:
                assert (place, h_row, first) == (found.get(expert, (place,))[0], row, found.get(expert, (0, 0))[1])
                found[expert], row = (place, first + lookups), row + lookups
    reader.ring.drain()
    reader.feed.end()
    assert {expert: lookups for expert, (_, lookups) in found.items()} == {2: 3, 3: 10, 5: 1}


def test_all_blocks_of_a_group_in_one_pass_if_there_is_room(host: Host, blocks: BlocksOnDisk) -> None:
    reader, counts = Reader(host, blocks), naming([0, 1], 5)
    reader.feed.begin(LAYER, counts, TOKENS)
    groups = []
    while (group := reader.ring.next(counts, 0)) is not None:
        groups.append(group)
    reader.ring.drain()
    reader.feed.end()
    assert sum(group.blocks for group in groups) == 2
    assert all(len(group.passes) == 1 for group in groups)
