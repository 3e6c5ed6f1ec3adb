"""Each cache policy against a few lines of Python that say what it is, and what all must do: find a victim whenever
there is one, lose none, and let go of what left. The optimum is at least as good as any."""

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from kernels.experts.host.replay import OPTIMUM, POLICIES, Clock, Routing, replay
from kernels.experts.host.slots import SlotTable, Why

LAYERS, EXPERTS, TOP_K, TOKENS = 3, 40, 4, 400


def routing(seed: int, chunk: int = 1, tokens: int = TOKENS) -> Routing:
    """A popular few in each layer; `chunk` tokens a step."""
    random = np.random.default_rng(seed)
    steps = tokens // chunk * LAYERS
    layer = np.tile(np.arange(LAYERS, dtype=np.int32), tokens // chunk)
    scores = np.log(np.arange(1, EXPERTS + 1)) * -0.9 + random.gumbel(size=(steps * chunk, EXPERTS))
    ids = np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)
    return Routing(LAYERS, EXPERTS, layer, np.arange(steps + 1, dtype=np.int64) * chunk, ids)


def hits_of(routing: Routing, policy: str, slots: int) -> int:
    [counts] = replay(routing, policy, [slots])
    assert counts.decode_lookups == routing.ids.size
    assert counts.decode_reads == counts.decode_lookups - counts.decode_hits
    assert counts.evictions == max(0, counts.decode_reads - slots)
    return counts.decode_hits


def lru(keys: list[list[int]], slots: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for step in keys:
        here = [key for key in step if key in cache]
        hits += len(here)
        for key in here:
            cache.move_to_end(key)
        for key in sorted(set(step) - set(here)):
            if len(cache) == slots:
                cache.popitem(last=False)
            cache[key] = None
    return hits


def sieve(keys: list[list[int]], slots: int) -> int:
    queue: list[int] = []  # oldest first
    used: set[int] = set()
    hand, hits = 0, 0
    for step in keys:
        here = [key for key in step if key in queue]
        hits += len(here)
        used |= set(here)
        leased = set(here)
        for key in sorted(set(step) - set(here)):
            if len(queue) == slots:
                while True:
                    hand %= len(queue)
                    if queue[hand] not in used and queue[hand] not in leased:
                        break
                    used.discard(queue[hand])
                    hand += 1
                queue.pop(hand)
            queue.append(key)
            leased.add(key)
    return hits


def s3fifo(keys: list[list[int]], slots: int) -> int:
    most_small = max(slots // 10, min(16, slots // 2))
    small: list[int] = []
    main: list[int] = []
    uses: dict[int, int] = {}
    ghosts: deque[int] = deque(maxlen=slots)
    hits = 0

    def of_small(leased: set[int]) -> bool:
        at = 0
        while at < len(small):
            if uses[small[at]]:
                main.append(small.pop(at))
                uses[main[-1]] = 0
            elif small[at] in leased:
                at += 1
            else:
                ghosts.append(small.pop(at))
                return True
        return False

    def of_main(leased: set[int]) -> bool:
        for _ in range(4 * len(main)):
            key = main.pop(0)
            if not uses[key] and key not in leased:
                return True
            uses[key] = max(0, uses[key] - 1)
            main.append(key)
        return False

    for step in keys:
        leased = {key for key in step if key in small or key in main}
        hits += len(leased)
        for key in leased:
            uses[key] = min(3, uses[key] + 1)
        for key in sorted(set(step) - leased):
            if len(small) + len(main) == slots:
                done = len(small) >= most_small and of_small(leased)
                assert done or of_main(leased) or of_small(leased)
            (main if key in ghosts else small).append(key)
            uses[key] = 0
            leased.add(key)
    return hits


def layered(keys: list[list[int]], slots: int) -> int:
    """Values as they are, halved at the begin of their layer's turn, instead of logarithms that stand still."""
    value: dict[int, float] = {}
    clock = [0] * LAYERS
    slot_of: dict[int, int] = {}
    lookups, hits = 0, 0

    def use(key: int) -> None:
        nonlocal lookups
        value[key] = value.get(key, 0.0) + 1
        lookups += 1

    for step in keys:
        layer = step[0] // EXPERTS
        passed, clock[layer] = lookups - clock[layer], lookups
        for key in [key for key in value if key // EXPERTS == layer]:
            value[key] *= 0.5 ** (passed / slots)
        here = [key for key in step if key in slot_of]
        hits += len(here)
        leased = set(here)
        for key in here:
            use(key)
        for key in sorted(set(step) - leased):
            slot = len(slot_of)
            if slot == slots:
                least = min(set(slot_of) - leased, key=lambda one: (round(value[one], 9), one // EXPERTS, slot_of[one]))
                slot = slot_of.pop(least)
            slot_of[key] = slot
            use(key)
            leased.add(key)
    return hits


@pytest.mark.parametrize("model", [lru, sieve, s3fifo, layered])
@pytest.mark.parametrize("slots", [TOP_K, 17, 60, 119, 500])
def test_a_policy_is_what_its_name_says(model: Callable[[list[list[int]], int], int], slots: int) -> None:
    for seed in (1, 2):
        made = routing(seed)
        keys = [
            [layer * EXPERTS + id_ for id_ in ids] for layer, ids in zip(made.layer, made.ids.tolist(), strict=True)
        ]
        differ = abs(hits_of(made, model.__name__, slots) - model(keys, slots))
        assert differ <= (
            3 if model is layered else 0
        )  # values that are equal are not, once they are rounded logarithms


def test_the_comparison_can_fail() -> None:
    made = routing(1)
    found = sorted(hits_of(made, policy, 17) for policy in POLICIES)
    assert all(more - less > 3 for less, more in pairwise(found)), "no two policies are alike"


@pytest.mark.parametrize("policy", POLICIES)
def test_none_beats_the_optimum(policy: str) -> None:
    for slots in (4, 30, 60):
        assert hits_of(routing(3), policy, slots) <= hits_of(routing(3), OPTIMUM, slots)


def test_counting_remembers_the_evicted_and_quotas_are_a_layers_own() -> None:
    """`lfu` keeps what is used most, whenever; `quota` gives a busy layer no more than its share."""
    table = SlotTable(2, 30, "lfu")
    for key in (1, 1, 1, 2, 2, 3, 1):
        use(table, key)
    assert residents(table) == {1, 2} or residents(table) == {1, 3}
    for key in (4, 5, 6):
        use(table, key)
    assert 1 in residents(table)
    table = SlotTable(4, 30, "quota", layers=2)
    for key in (1, 2, 16, 17, 3, 4, 5):
        use(table, key)
    assert residents(table) == {4, 5, 16, 17}


def use(table: SlotTable, key: int, why: Why = Why.DEMAND) -> None:
    lease = table.lease(key, why)
    if lease is None:
        lease = table.load(key, why)
        assert lease is not None
        assert table.arrived(lease, True)
    if why is not Why.PREFETCH:
        assert table.release(lease)


def residents(table: SlotTable) -> set[int]:
    return {table.at(slot).key for slot in range(table.slots)} - {-1}


def test_a_sweep_leaves_the_decode_set_alone() -> None:
    """Blocks that decode names again survive any number of blocks that a prompt names once; plain LRU's do not."""
    left = {}
    for policy in ("shipped", "lru"):
        table = SlotTable(100, 1000, policy)
        for _ in range(3):
            for key in range(60):
                use(table, key)
        for key in range(100, 900):
            use(table, key, Why.SWEEP)
        left[policy] = len(residents(table) & set(range(60)))
    assert left == {"shipped": 60, "lru": 0}


def test_a_sweep_waits_for_its_own_blocks() -> None:
    """All of a layer's missing blocks are asked for at once: those that do not fit the sweep's share have to wait."""
    table = SlotTable(100, 1000, "shipped")
    for _ in range(2):
        for key in range(100):
            use(table, key)
    leases = [table.load(key, Why.SWEEP) for key in range(100, 200)]
    taken = [lease for lease in leases if lease is not None]
    assert 0 < len(taken) < 30
    assert leases[: len(taken)] == taken
    demanded = table.load(500, Why.DEMAND)  # a demand never waits while anything may be had
    assert demanded is not None
    assert table.arrived(taken[-1], True)
    assert table.release(taken[-1])
    assert table.load(201, Why.SWEEP) is not None


@pytest.mark.parametrize("policy", [*POLICIES, "shipped"])
def test_whatever_happens_the_table_is_sound(policy: str) -> None:
    random = np.random.default_rng(4)
    table = SlotTable(12, 60, policy, layers=3)
    held, loading = [], []
    for _ in range(3000):
        key, why = int(random.integers(60)), Why(int(random.integers(3)))
        match int(random.integers(4)):
            case 0 | 1:
                lease = table.lease(key, why) if why is not Why.PREFETCH else None
                if lease is None and (lease := table.load(key, why)) is not None:
                    loading.append(lease)
                    if why is Why.PREFETCH:
                        continue
                if lease is not None:
                    held.append(lease)
                elif why is Why.DEMAND:
                    assert not [s for s in map(table.at, range(12)) if s.state == 2 and not s.leases], "there was room"
            case 2 if loading:
                table.arrived(loading.pop(int(random.integers(len(loading)))), bool(random.integers(5)))
            case 3 if held:
                table.release(held.pop(int(random.integers(len(held)))))
        assert table.sound()


def test_replay_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="no cache policy 'magic'"):
        replay(routing(1), "magic", [4])
    with pytest.raises(ValueError, match="at least one slot"):
        replay(routing(1), "lru", [0])
    with pytest.raises(ValueError, match="an expert that there is not"):
        Routing(1, 3, np.zeros(1, np.int32), np.array([0, 1]), np.array([[3]], np.int32))
    with pytest.raises(ValueError, match="does not divide"):
        Routing(1, 3, np.zeros(1, np.int32), np.array([0, 2]), np.array([[1]], np.int32))
    assert Clock().prefetch == "off"
