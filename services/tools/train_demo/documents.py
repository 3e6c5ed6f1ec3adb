"""Documents as token ids, grouped by source, and the rows that they are packed into. Owns order and packing, no text.

Which documents a batch has depends on the seed and on how many were taken before, nothing else: a position is a handful
of numbers, and a run that goes on from it gets the very same batches.
"""

import lzma
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
NOT_SCORED = -100


@dataclass(frozen=True)
class Source:
    """`ids` uint16 of all documents one after another, `ends` where each ends, `scored` which ids are to be learnt.

    Texts may be cut where a row ends, chats (`whole`) never are.
    """

    name: str
    whole: bool
    ids: npt.NDArray[np.uint16]
    scored: npt.NDArray[np.bool_]
    ends: Ints

    @staticmethod
    def of(name: str, whole: bool, documents: Iterable[tuple[list[int], list[bool]]]) -> "Source":
        kept = [(np.array(i, np.uint16), np.array(s, np.bool_)) for i, s in documents if len(i) > 1]
        return Source(
            name,
            whole,
            np.concatenate([ids for ids, _ in kept] or [np.zeros(0, np.uint16)]),
            np.concatenate([scored for _, scored in kept] or [np.zeros(0, np.bool_)]),
            np.cumsum([len(ids) for ids, _ in kept], dtype=np.int64),
        )


# Ids are 16 bits wide, which the coder is told; rows are carried to where they are trained on.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1}]


def save(folder: Path, source: Source) -> None:
    """As `folder`/NAME.xz, at once."""
    folder.mkdir(exist_ok=True)
    part = folder / f"{source.name}.part"
    with lzma.open(part, "wb", filters=_FILTERS) as file:
        np.save(file, np.array([source.whole]))
        for array in (source.ids, np.packbits(source.scored), np.diff(source.ends, prepend=0).astype(np.uint32)):
            np.save(file, array)
    part.replace(folder / f"{source.name}.xz")


def load(folder: Path) -> dict[str, Source]:
    return {path.stem: _read(path) for path in sorted(folder.glob("*.xz"))}


def _read(path: Path) -> Source:
    with lzma.open(path, "rb") as file:
        whole, ids, bits, lengths = (np.load(file) for _ in range(4))
    scored = np.unpackbits(bits, count=len(ids)).astype(np.bool_)
    return Source(path.stem, bool(whole[0]), ids, scored, np.cumsum(lengths, dtype=np.int64))


@dataclass
class Position:
    """How far the rows have come: batches made, and of each source the documents taken and ids of the next one."""

    batches: int = 0
    taken: dict[str, int] = field(default_factory=dict)
    inside: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """[rows, tokens] int64. targets[i] is the id after ids[i] if that is to be learnt, else NOT_SCORED; `documents`
    tells a row's documents apart, padding is -1."""

    ids: Ints
    targets: Ints
    documents: Ints


class Rows:
    """Batches without end: each row is of one source, drawn by `shares`."""

    def __init__(self, sources: Mapping[str, Source], shares: Mapping[str, float], tokens: int, rows: int, seed: int):
        unknown = shares.keys() - sources.keys()
        if unknown:
            raise KeyError(f"no documents of {', '.join(sorted(unknown))}")
        self._sources = [sources[name] for name in shares]
        total = sum(shares.values())
        self._shares = [share / total for share in shares.values()]
        self._tokens, self._rows, self._seed = tokens, rows, seed
        self._order: dict[tuple[str, int], Ints] = {}

    def batch(self, position: Position) -> Batch:
        """The batch at `position`, which moves on."""
        random = np.random.default_rng((self._seed, position.batches))
        chosen = random.choice(len(self._sources), self._rows, p=self._shares)
        shape = (self._rows, self._tokens)
        ids, targets, documents = np.zeros(shape, np.int64), np.full(shape, NOT_SCORED), np.full(shape, -1)
        for row, number in enumerate(chosen):
            self._fill(self._sources[number], position, ids[row], targets[row], documents[row])
        position.batches += 1
        return Batch(ids, targets, documents)

    def _fill(self, source: Source, position: Position, ids: Ints, targets: Ints, documents: Ints) -> None:
        at = number = 0
        while at < self._tokens - 1:
            taken, inside = position.taken.get(source.name, 0), position.inside.get(source.name, 0)
            document = self._document(source, taken)
            begin = int(source.ends[document - 1]) if document else 0
            begin, end = begin + inside, int(source.ends[document])
            room = self._tokens - at
            if end - begin > room and source.whole and at:
                return  # it begins the next row
            length = min(end - begin, room)
            part = source.ids[begin : begin + length].astype(np.int64)
            ids[at : at + length] = part
            scored = source.scored[begin + 1 : begin + length]
            targets[at : at + length - 1] = np.where(scored, part[1:], NOT_SCORED)
            documents[at : at + length] = number
            at, number = at + length, number + 1
            if begin + length < end and not source.whole:
                position.inside[source.name] = inside + length
                return
            position.taken[source.name], position.inside[source.name] = taken + 1, 0

    def _document(self, source: Source, taken: int) -> int:
        """Every document once, in an order of that time's own, then all over again."""
        time, index = divmod(taken, len(source.ends))
        if (source.name, time) not in self._order:
            name = [int(letter) for letter in source.name.encode()]
            self._order = {key: order for key, order in self._order.items() if key[0] != source.name}
            self._order[source.name, time] = np.random.default_rng((self._seed, time, *name)).permutation(
                len(source.ends)
            )
        return int(self._order[source.name, time][index])
