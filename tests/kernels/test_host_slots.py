"""The slot table walked through all of its reachable states: what it promises holds in every one, and a broken table is
caught. The walk drives the shipped C++ itself, one call at a time, in every order that its callers could make."""

import ctypes
import subprocess
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import pytest

from kernels import build
from kernels.experts.host.slots import Lease, SlotTable, State, Why

SLOTS, KEYS, MOST_LEASES = 2, 3, 2


class Walk:
    """A table and what its callers hold: their leases (by key) and the loads that their readers still have to end."""

    def __init__(self, library: ctypes.CDLL | None) -> None:
        self.table = SlotTable(SLOTS, KEYS, "lru", library)
        self.held: list[tuple[int, Lease]] = []
        self.loading: dict[int, Lease] = {}
        self.ended: list[Lease] = []

    def moves(self) -> list[tuple[str, int]]:
        found = [("demand", key) for key in range(KEYS) if sum(k == key for k, _ in self.held) < MOST_LEASES]
        found += [("prefetch", key) for key in range(KEYS)]
        found += [(end, key) for key in sorted(self.loading) for end in ("arrived", "failed")]
        return found + [("release", at) for at, (key, _) in enumerate(self.held) if key not in self.loading]

    def make(self, move: str, at: int, check: bool) -> None:
        """`check` False: the walk has been here before, and seen that all was well."""
        before = [self.table.at(slot) for slot in range(SLOTS)]
        if move in ("demand", "prefetch"):
            self._ask(at, Why.DEMAND if move == "demand" else Why.PREFETCH)
        elif move in ("arrived", "failed"):
            lease = self.loading.pop(at)
            assert self.table.arrived(lease, move == "arrived")
            self.ended.append(lease)
            if move == "failed":  # a failed load ends its leases
                gone = [one for key, one in self.held if key == at]
                self.held = [(key, one) for key, one in self.held if key != at]
                assert not any(self.table.release(one) for one in gone)
        else:
            _, lease = self.held.pop(at)
            assert self.table.release(lease)
        if check:
            self._check(before)

    def _ask(self, key: int, why: Why) -> None:
        here = any(self.table.at(slot).key == key for slot in range(SLOTS))
        if here and why is Why.PREFETCH:
            assert self.table.load(key, why) is None, "a block must not be loaded twice"
            return
        lease = self.table.lease(key) if here else self.table.load(key, why)
        if lease is None:
            stuck = [self.table.at(slot) for slot in range(SLOTS)]
            assert all(one.leases or one.state is State.LOADING for one in stuck), "there was room"
            return
        if not here:
            self.loading[key] = lease
        if why is Why.DEMAND:
            self.held.append((key, lease))

    def _check(self, before: list) -> None:
        table = self.table
        assert table.sound()
        slots = [table.at(slot) for slot in range(SLOTS)]
        keys = [one.key for one in slots if one.state is not State.FREE]
        assert len(keys) == len(set(keys)), "a block is in two slots"
        assert {one.key for one in slots if one.state is State.LOADING} == set(self.loading)
        for key, lease in self.held:  # what is leased stays where it is, whatever else happens
            assert slots[lease.slot].key == key, "a leased block was evicted"
            assert slots[lease.slot].generation == lease.generation
        for slot, one in enumerate(slots):
            assert one.leases == sum(lease.slot == slot for _, lease in self.held)
            assert one.generation >= before[slot].generation
            if one.key != before[slot].key and one.key >= 0:
                assert one.generation > before[slot].generation, "a new life has a new generation"
        for lease in self.ended:  # a message that comes twice or late changes nothing
            if slots[lease.slot].generation != lease.generation or slots[lease.slot].state is not State.LOADING:
                assert not table.arrived(lease, False)
            if slots[lease.slot].generation != lease.generation:
                assert not table.release(lease)
        assert [table.at(slot) for slot in range(SLOTS)] == slots

    def state(self) -> tuple:
        """Everything that can matter later: generations only grow, so they are left out; the policy's order is kept."""
        slots = tuple((one.state, one.key, one.leases) for one in map(self.table.at, range(SLOTS)))
        return slots, tuple(sorted(key for key, _ in self.held)), tuple(sorted(self.loading)), self._order()

    def _order(self) -> tuple[int, ...]:
        return tuple(self.recency)

    recency: tuple[int, ...] = ()


def walk_all(library: ctypes.CDLL | None) -> int:
    """How many states there are, each visited: breadth first, a state is reached by its moves on a new table."""
    seen: set[tuple] = set()
    paths: deque[tuple[tuple[str, int], ...]] = deque([()])
    while paths:
        path = paths.popleft()
        walk = Walk(library)
        uses: list[int] = []
        for number, (move, at) in enumerate(path, 1):
            key = walk.held[at][0] if move == "release" else at
            walk.make(move, at, check=number == len(path))
            if move in ("demand", "prefetch"):  # LRU's order is that of uses; a key's last one counts
                uses = [k for k in uses if k != key] + [key]
        walk.recency = tuple(k for k in uses if any(walk.table.at(s).key == k for s in range(SLOTS)))
        if walk.state() in seen:
            continue
        seen.add(walk.state())
        paths.extend((*path, move) for move in walk.moves())
    return len(seen)


def test_every_reachable_state_keeps_the_promises() -> None:
    assert walk_all(None) > 200


def compiled(sources: Iterable[Path], folder: Path) -> list[Path]:
    """An object of each."""
    compiler, _ = build.compiler()
    subprocess.run([compiler, "-std=c++17", "-fPIC", f"-I{build.ROOT}", "-c", *sources], cwd=folder, check=True)
    return sorted(folder.glob("*.o"))


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """What is not broken, compiled once."""
    return compiled((build.ROOT / "kernels/experts/host").glob("policy*.cpp"), tmp_path_factory.mktemp("policies"))


@pytest.mark.parametrize(
    ("what", "right", "wrong"),
    [
        ("leases do not protect", "s.state == State::ready && s.leases == 0", "s.state == State::ready"),
        ("a generation is not counted", "s.generation++;", ""),
        ("a failed load keeps its leases", "s.leases = 0;", ""),
        ("a slot is not freed", "free_.push_back(lease.slot);", ""),
        ("an evicted key stays", "of_key_[size_t(s.key)] = -1;", ""),
        ("release of an old lease", "s.generation == lease.generation && ", ""),
    ],
)
def test_the_walk_catches_a_broken_table(
    what: str, right: str, wrong: str, policies: list[Path], tmp_path: Path
) -> None:
    host = build.ROOT / "kernels/experts/host"
    sources = {name: (host / name).read_text() for name in ("slots.h", "slots.cpp", "slots_abi.cpp")}
    assert sum(text.count(right) for text in sources.values()) == 1, what
    for name, text in sources.items():
        text = text.replace('"kernels/experts/host/slots.h"', f'"{tmp_path}/slots.h"')
        (tmp_path / name).write_text(text.replace(right, wrong))
    library = tmp_path / "broken.so"
    objects = compiled([tmp_path / name for name in sources if name.endswith(".cpp")], tmp_path)
    compiler, _ = build.compiler()
    subprocess.run([compiler, "-shared", *objects, *policies, "-o", library], check=True)
    with pytest.raises(AssertionError):
        walk_all(ctypes.CDLL(str(library)))


def test_the_least_recently_used_leaves_first() -> None:
    table = SlotTable(3, 10)
    for key in (1, 2, 3):
        lease = table.load(key, Why.DEMAND)
        assert lease
        assert table.arrived(lease, True)
        assert table.release(lease)
    lease = table.lease(1)
    assert lease
    assert table.release(lease)
    for key, evicted in ((4, 2), (5, 3), (6, 1)):
        before = {table.at(slot).key for slot in range(3)}
        lease = table.load(key, Why.DEMAND)
        assert lease
        table.arrived(lease, True)
        table.release(lease)
        assert before - {table.at(slot).key for slot in range(3)} == {evicted}
    assert table.counts().evictions == 3


def test_prefetches_are_judged() -> None:
    table = SlotTable(2, 10)
    for key in (1, 2):
        lease = table.load(key, Why.PREFETCH)
        assert lease
        table.arrived(lease, True)
    lease = table.lease(1)
    assert lease
    table.release(lease)
    lease = table.load(3, Why.PREFETCH)
    assert lease
    table.arrived(lease, False)
    counts = table.counts()
    assert (counts.prefetch_issued, counts.prefetch_useful, counts.prefetch_wasted) == (3, 1, 2)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="no cache policy 'magic'"):
        SlotTable(1, 1, "magic")
