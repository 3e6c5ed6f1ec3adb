"""Redis or Valkey as a place for records and payloads. Owns names, chunks, timeouts, and the rule that a store which is
dead, slow, full or full of rubbish costs a chat nothing but its snapshots. Knows no dialog and no engine.

The own part of a payload is one hash with a field for each chunk, as the engine cut it, and a field `size` that is
written last: a hash with a hole (evicted while it was written, or by half a crash) has too few fields and counts as
absent; a writer that finds one in what it wrote removes it. Evicting a hash frees it as a whole. A KV block is a
string, named by its content: the states of a dialog share them. A state counts as there only with all of its blocks;
using it counts as using them.

After a failure the store is left alone: calls return at once with nothing, a task knocks every second until it gets an
answer in time. So a request pays for at most one timeout each time the store goes away.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from services.api.bulk import Bulk, bulk, can_read
from services.api.keys import USED, block_name, payload_name, record_name
from services.api.records import Head, Record, head_from_field, record_from_fields, to_fields

log = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20  # as engines cut own parts
MEMORY_SHARE = 1.35  # of the bytes to come, with some room
WINDOW_CHUNKS = 4  # in memory at a time on the way to or from the store, about 1 MiB each
READ_TIMEOUT = 8  # times the timeout of a look-up: chunks are big, and other clients' chunks are too
WRITE_TIMEOUT_S = 15.0  # nobody waits for it
KNOCK_S = 1.0
Command = tuple[str | bytes | int, ...]


@dataclass(frozen=True)
class Stored:
    """A record as found, and whether its payload is there to be sent."""

    record: Record
    sendable: bool


@dataclass(frozen=True)
class Usage:
    """As the server says; `limit_bytes` 0: it has none."""

    used_bytes: int
    limit_bytes: int
    evicted_keys: int  # since it started


def _reading(record: Record, blocks: Sequence[int]) -> list[tuple[str, ...]]:
    """The command for each chunk of the own part and for each of these blocks."""
    name = payload_name(record.head.state_id)
    own = [("HGET", name, str(index)) for index in range(record.head.chunks)]
    return own + [("GET", block_name(record.blocks[number])) for number in blocks]


class StoreRefused(Exception):
    """The store answered, but did not take the data: it is full, read-only, or holds something else at this key."""


class Store:
    """One for the process. All methods but `write` return quickly and never raise for the store's troubles."""

    def __init__(self, url: str, timeout_s: float, ttl_s: int, reader_url: str = "") -> None:
        """`reader_url`: for those who read payloads themselves."""
        self._reader_url = reader_url or url
        self._lookup_s = timeout_s
        self._room = asyncio.Lock()
        self._coming_bytes = 0  # of own parts under way
        self.removed = 0  # own parts that made room for others
        self._read_s = timeout_s * READ_TIMEOUT

        def client(timeout: float) -> "redis.Redis":
            return redis.Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # Once, at once: a connection that the server closed while it lay idle says nothing about the server.
                retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
                decode_responses=False,
            )

        self._ttl_s = ttl_s
        self._lookups = client(timeout_s)
        self._transfers = client(WRITE_TIMEOUT_S)  # a connection of their own: nothing waits behind them
        self._knocking: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        return self._knocking is None

    async def find(self, keys: Mapping[int, bytes]) -> dict[int, Head]:
        """Which boundaries (offset -> key) have a record: one round trip, however many there are."""
        answers = await self._ask([("HGET", record_name(key), "head") for key in keys.values()])
        heads = {offset: head_from_field(answer) for offset, answer in zip(keys, answers, strict=False)}
        return {offset: head for offset, head in heads.items() if head is not None}

    async def fetch(self, wanted: Sequence[tuple[bytes, Head, Record | None]]) -> list[Stored | None]:
        """Ids and block names (unless known: the third of a triple) and the payload's presence, for (key, head, known
        record). What is read counts as used: it lives on for the whole TTL."""
        commands: list[Command] = []
        for key, head, _ in wanted:
            record, payload = record_name(key), payload_name(head.state_id)
            commands += [("HMGET", record, "ids", "blocks"), ("HLEN", payload), ("HGET", payload, "size")]
            commands += [("EXPIRE", record, self._ttl_s), ("EXPIRE", payload, self._ttl_s)]
        answers = await self._ask(commands)
        found: list[Stored | None] = []
        for place, (_, head, known) in enumerate(wanted):
            fields, count, size, *_ = answers[5 * place : 5 * place + 5] or (None, None, None)
            ids, blocks = fields if isinstance(fields, list) and len(fields) == 2 else (None, None)
            record_read = known or record_from_fields(head, ids, blocks)
            own_part = bool(head.chunks) and count == head.chunks + 1 and size == str(head.size_bytes).encode()
            found.append(Stored(record_read, own_part) if record_read else None)
        complete = [stored.record for stored in found if stored and stored.sendable]
        holes = await self._holes(complete)
        await self._ask([use for record in complete for use in self._used(payload_name(record.head.state_id))])
        return [
            replace(stored, sendable=not holes[stored.record.head.state_id]) if stored and stored.sendable else stored
            for stored in found
        ]

    async def there(self, heads: Sequence[Head]) -> set[bytes]:
        """Ids of the states whose own part is there. Looking does not count as using it."""
        stored = [head for head in heads if head.chunks]
        answers = await self._ask([("OBJECT", "IDLETIME", payload_name(head.state_id)) for head in stored])
        return {head.state_id for head, idle in zip(stored, answers, strict=False) if isinstance(idle, int)}

    async def lacks(self, record: Record) -> tuple[bool, list[int]]:
        """Whether the own part is not there, and the numbers of the blocks that are not; what is there counts as used.
        Without an answer all of it is."""
        head, name = record.head, payload_name(record.head.state_id)
        answers = await self._ask([("HLEN", name), ("HGET", name, "size"), ("EXPIRE", name, self._ttl_s)])
        own_part = answers[:2] == [head.chunks + 1, str(head.size_bytes).encode()]
        return not own_part, (await self._holes([record]))[head.state_id]

    async def read(self, record: Record, blocks: Sequence[int]) -> AsyncIterator[bytes]:
        """The chunks of the own part and these blocks, in order. Ends early if one is missing or the store fails."""
        commands = _reading(record, blocks)
        left_bytes = record.head.size_bytes + len(blocks) * record.head.block_bytes
        for first in range(0, len(commands), WINDOW_CHUNKS):
            window = commands[first : first + WINDOW_CHUNKS]
            answers = await self._ask(window, self._transfers, self._read_s)
            for place, answer in enumerate(answers, first):
                if not isinstance(answer, bytes):
                    return
                left_bytes -= len(answer)
                if left_bytes < 0 or (left_bytes and place + 1 == len(commands)):
                    return  # not the sizes that were stored
                yield answer
            if len(answers) < len(window):
                return

    def bulk(self, record: Record, blocks: Sequence[int]) -> Bulk | None:
        """The same chunks for somebody who receives them himself; None if that is not possible."""
        head = record.head
        if not (self.available and can_read(self._reader_url)):
            return None
        sizes = [CHUNK_BYTES] * (head.chunks - 1)
        sizes += [head.size_bytes - sum(sizes), *[head.block_bytes] * len(blocks)]
        if not all(0 < size <= CHUNK_BYTES for size in sizes):
            return None
        return bulk(self._reader_url, _reading(record, blocks), sizes, self._read_s)

    async def write(self, record: Record, own_part: bool, blocks: Sequence[int], chunks: AsyncIterator[bytes]) -> None:
        """Store the own part, if it is among `chunks`, and the blocks that follow it. Raises StoreRefused if the store
        does not take it or is away, or if the own part is not as long as announced; part of it is removed again."""
        head, name = record.head, payload_name(record.head.state_id)
        coming_bytes = 0
        try:
            if own_part:
                await self._tell([("UNLINK", name)])  # rubbish or an incomplete one
                async with self._room:
                    await self._make_room(head.size_bytes + self._coming_bytes)
                    self._coming_bytes += head.size_bytes
                    coming_bytes = head.size_bytes
            window: list[Command] = []
            own_chunks = own_part * head.chunks
            size_bytes = place = 0
            async for chunk in chunks:
                if place < own_chunks:
                    # A first expiry at once: a writer that dies leaves nothing for ever.
                    window += [("HSET", name, str(place), chunk), ("EXPIRE", name, self._ttl_s)]
                    size_bytes += len(chunk)
                else:
                    block = block_name(record.blocks[blocks[place - own_chunks]])
                    window.append(("SET", block, chunk, "EX", self._ttl_s))
                place += 1
                if place % WINDOW_CHUNKS == 0:
                    await self._tell(window)
                    window = []
            if own_part:
                if size_bytes != head.size_bytes:
                    raise StoreRefused(f"{size_bytes} bytes came for a payload of {head.size_bytes}")
                window += [("HSET", name, "size", str(size_bytes)), ("EXPIRE", name, self._ttl_s)]
            await self._tell(window)
            if own_part:
                count, *_ = await self._ask([("HLEN", name), *self._used(name)]) or (None,)
                if isinstance(count, int) and count != head.chunks + 1:
                    raise StoreRefused("it evicted a part of this payload while the rest was written")
        except BaseException:
            if own_part:
                await asyncio.shield(self._ask([("UNLINK", name)]))
            raise
        finally:
            self._coming_bytes -= coming_bytes

    def _used(self, name: str) -> list[Command]:
        return [("ZADD", USED, str(time.time()), name), ("EXPIRE", USED, self._ttl_s)]

    async def _make_room(self, size_bytes: int) -> None:
        """Remove the longest unused own parts until so much fits. A store's own eviction picks among few large keys
        almost at random: it remembers how old they were when it last looked."""
        answers = await self._ask([("INFO", "memory"), ("ZRANGE", USED, "0", "-1")], self._transfers, WRITE_TIMEOUT_S)
        memory, names = answers if len(answers) == 2 else (None, None)
        if not isinstance(memory, dict) or not isinstance(names, list) or not memory.get("maxmemory"):
            return
        # A chunk of 1 MiB takes 1.25 MiB of the server's memory: its header makes it fall into the next size.
        excess = int(memory["used_memory"]) + int(MEMORY_SHARE * size_bytes) - int(memory["maxmemory"])
        for name in names:
            if excess <= 0:
                return
            size, *_ = await self._ask([("HGET", name, "size"), ("DEL", name), ("ZREM", USED, name)]) or (None,)
            self.removed += isinstance(size, bytes)
            excess -= int(size) * 5 // 4 if isinstance(size, bytes) and size.isdigit() else 0

    async def write_record(self, key: bytes, record: Record) -> None:
        """Raises StoreRefused."""
        name = record_name(key)
        fields = [part for pair in to_fields(record).items() for part in pair]
        await self._tell([("UNLINK", name), ("HSET", name, *fields), ("EXPIRE", name, self._ttl_s)])

    async def forget(
        self, keys: Iterable[bytes], state_ids: Iterable[bytes] = (), blocks: Iterable[bytes] = ()
    ) -> None:
        """Remove records, own parts of payloads, and blocks."""
        names = [*map(record_name, keys), *map(payload_name, state_ids), *map(block_name, blocks)]
        await self._ask([("UNLINK", name) for name in names])

    async def _holes(self, records: Sequence[Record]) -> dict[bytes, list[int]]:
        """State id -> numbers of the blocks that are not there; those that are count as used."""
        names = [block_name(block) for record in records for block in record.blocks]
        commands: list[Command] = [("STRLEN", name) for name in names]
        answers = await self._ask([*commands, *(("EXPIRE", name, self._ttl_s) for name in names)])
        sizes = iter(answers or [None] * len(names))
        return {
            record.head.state_id: [
                number for number in range(len(record.blocks)) if next(sizes) != record.head.block_bytes
            ]
            for record in records
        }

    async def usage(self) -> Usage | None:
        """None while the store is away, or does not say."""
        asked: list[Command] = [("INFO", "memory"), ("INFO", "stats")]
        memory, stats = await self._ask(asked, self._transfers, self._read_s) or (None, None)
        if not isinstance(memory, dict) or not isinstance(stats, dict):
            return None
        found = (memory.get("used_memory"), memory.get("maxmemory"), stats.get("evicted_keys"))
        return Usage(*(number if isinstance(number, int) else 0 for number in found))

    async def close(self) -> None:
        if self._knocking:
            self._knocking.cancel()
            await asyncio.gather(self._knocking, return_exceptions=True)
        await self._lookups.aclose()
        await self._transfers.aclose()

    async def _ask(
        self,
        commands: Sequence[Command],
        client: "redis.Redis | None" = None,
        within_s: float = 0,
    ) -> list[object]:
        """The answers; a command that failed by itself gives an exception as its answer; no answers while away."""
        if not self.available or not commands:
            return []
        # The client's own timeouts hold for each answer; this one for all of them.
        try:
            async with asyncio.timeout(within_s or self._lookup_s):
                async with (client or self._lookups).pipeline(transaction=False) as pipe:
                    for command in commands:
                        pipe.execute_command(*command)
                    return list(await pipe.execute(raise_on_error=False))
        except Exception as error:  # whatever the client's library raises for a connection that is lost under it
            self._leave_alone(error)
            return []

    async def _tell(self, commands: Sequence[Command]) -> None:
        answers = await self._ask(commands, self._transfers, WRITE_TIMEOUT_S)
        if len(answers) < len(commands):
            raise StoreRefused("the store is away")
        for answer in answers:
            if isinstance(answer, Exception):
                raise StoreRefused(str(answer)) from answer

    def _leave_alone(self, error: BaseException) -> None:
        if self._knocking is None:
            log.warning("the snapshot store is left alone for now: %s", error or type(error).__name__)
            self._knocking = asyncio.create_task(self._knock())

    async def _knock(self) -> None:
        while True:
            await asyncio.sleep(KNOCK_S)
            try:
                for client in (self._lookups, self._transfers):
                    # Those in use are their users' to close, whose time runs out: the library takes a connection that
                    # is closed under it for an error of its own.
                    await client.connection_pool.disconnect(inuse_connections=False)
                    await client.ping()
            except Exception:
                continue
            log.info("the snapshot store is back")
            self._knocking = None
            return
