"""A record says which state a boundary's text leads to, and the ids that were really fed. Owns its form in the store
and the records that this process remembers; payloads are elsewhere.

The ids may be longer than the state has consumed: the last sampled token of an answer is text, but was not fed.
"""

import struct
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

MOST_TOKENS = 10_000_000
BLOCK_NAME_BYTES = 16
_FIXED = struct.Struct("<IIQIII")  # as in Head


@dataclass(frozen=True)
class Head:
    """A record without its ids and block names."""

    state_id: bytes
    ids: int  # how many
    tokens: int  # of them consumed by the state
    size_bytes: int  # of the payload's own part; 0: it is nowhere but in an engine
    chunks: int  # of that
    blocks: int = 0  # how many KV blocks belong to it
    block_bytes: int = 0  # size of each

    def __post_init__(self) -> None:
        sound = 0 < len(self.state_id) <= 64 and 0 < self.tokens <= self.ids <= MOST_TOKENS
        if not sound or bool(self.size_bytes) != bool(self.chunks) or self.blocks > self.tokens:
            raise ValueError("numbers that do not fit together")


@dataclass(frozen=True)
class Record:
    head: Head
    ids: "array[int]"  # 4 bytes each: a long dialog has many
    blocks: tuple[bytes, ...] = ()  # their names, in order


def to_fields(record: Record) -> dict[str, bytes]:
    """The fields of a record's hash in the store."""
    head = record.head
    fixed = _FIXED.pack(head.ids, head.tokens, head.size_bytes, head.chunks, head.blocks, head.block_bytes)
    return {"head": fixed + head.state_id, "ids": record.ids.tobytes(), "blocks": b"".join(record.blocks)}


def head_from_field(field: object) -> Head | None:
    """None for anything that `to_fields` would not have written."""
    if not isinstance(field, bytes) or len(field) < _FIXED.size:
        return None
    try:
        return Head(field[_FIXED.size :], *_FIXED.unpack_from(field))
    except ValueError:
        return None


def record_from_fields(head: Head, ids: object, blocks: object) -> Record | None:
    """None for anything that does not fit the head."""
    if not isinstance(ids, bytes) or len(ids) != 4 * head.ids:
        return None
    if not isinstance(blocks, bytes) or len(blocks) != BLOCK_NAME_BYTES * head.blocks:
        return None
    names = tuple(blocks[at : at + BLOCK_NAME_BYTES] for at in range(0, len(blocks), BLOCK_NAME_BYTES))
    return Record(head, array("I", ids), names)


class RecordMemory:
    """The newest records of this process, bounded by count and by ids. A state may be hot in the engine although no
    store has it; without this memory nobody would know."""

    def __init__(self, most_records: int = 2048, most_ids: int = 8_000_000) -> None:
        self._records: OrderedDict[bytes, Record] = OrderedDict()
        self._most_records = most_records
        self._most_ids = most_ids
        self._ids = 0

    def put(self, key: bytes, record: Record) -> None:
        self.forget(key)
        self._records[key] = record
        self._ids += len(record.ids)
        while len(self._records) > self._most_records or self._ids > self._most_ids:
            _, old = self._records.popitem(last=False)
            self._ids -= len(old.ids)

    def find(self, keys: Mapping[int, bytes]) -> dict[int, Record]:
        """By offset; what is found counts as used."""
        found = {offset: self._records[key] for offset, key in keys.items() if key in self._records}
        for offset in found:
            self._records.move_to_end(keys[offset])
        return found

    def forget(self, key: bytes) -> None:
        old = self._records.pop(key, None)
        if old is not None:
            self._ids -= len(old.ids)

    def forget_hot(self, key: bytes) -> None:
        """The same, if its state is nowhere but in an engine."""
        old = self._records.get(key)
        if old is not None and not old.head.chunks:
            self.forget(key)

    def __len__(self) -> int:
        return len(self._records)
