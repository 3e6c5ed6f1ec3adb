"""Redis or Valkey as a place for records and payloads. Owns names, chunks, timeouts, and the rule that a store which is
dead, slow, full or full of rubbish costs a chat nothing but its snapshots. Knows no dialog and no engine.

A payload is one hash with a field for each chunk, as the engine cut it, and a field `size` that is written last: a hash
with a hole (evicted while it was written, or by half a crash) has too few fields and counts as absent. Evicting a hash
frees a payload as a whole.

After a failure the store is left alone: calls return at once with nothing, a task knocks every second until it gets an
answer in time. So a request pays for at most one timeout each time the store goes away.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, RedisError

from services.api.keys import payload_name, record_name
from services.api.records import Head, Record, head_from_field, record_from_field, to_fields

log = logging.getLogger(__name__)

WINDOW_CHUNKS = 4  # in memory at a time on the way to or from the store, about 1 MiB each
READ_TIMEOUT = 8  # times the timeout of a look-up: chunks are big, and other clients' chunks are too
WRITE_TIMEOUT_S = 15.0  # nobody waits for it
KNOCK_S = 1.0
TROUBLES = (RedisError, OSError, asyncio.TimeoutError)


@dataclass(frozen=True)
class Stored:
    """A record as found, and whether its payload is there to be sent."""

    record: Record
    sendable: bool


class StoreRefused(Exception):
    """The store answered, but did not take the data: it is full, read-only, or holds something else at this key."""


class Store:
    """One for the process. All methods but `write` return quickly and never raise for the store's troubles."""

    def __init__(self, url: str, timeout_s: float, ttl_s: int) -> None:
        self._lookup_s = timeout_s
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
        """Ids (unless known: the third of a triple) and the payload's presence, for (key, head, known record). What is
        read counts as used: it lives on for the whole TTL."""
        commands: list[tuple[str | bytes | int, ...]] = []
        for key, head, _ in wanted:
            record, payload = record_name(key), payload_name(head.state_id)
            commands += [("HGET", record, "ids"), ("HLEN", payload), ("HGET", payload, "size")]
            commands += [("EXPIRE", record, self._ttl_s), ("EXPIRE", payload, self._ttl_s)]
        answers = await self._ask(commands)
        found: list[Stored | None] = []
        for place, (_, head, known) in enumerate(wanted):
            ids, fields, size, *_ = answers[5 * place : 5 * place + 5] or (None, None, None)
            record_read = known or record_from_field(head, ids)
            complete = bool(head.chunks) and fields == head.chunks + 1 and size == str(head.size_bytes).encode()
            found.append(Stored(record_read, complete) if record_read else None)
        return found

    async def has_payload(self, head: Head) -> bool:
        name = payload_name(head.state_id)
        answers = await self._ask([("HLEN", name), ("HGET", name, "size"), ("EXPIRE", name, self._ttl_s)])
        return answers[:2] == [head.chunks + 1, str(head.size_bytes).encode()]

    async def read(self, head: Head) -> AsyncIterator[bytes]:
        """The payload's chunks in order. Ends early if one is missing or the store fails."""
        name = payload_name(head.state_id)
        for first in range(0, head.chunks, WINDOW_CHUNKS):
            window = range(first, min(first + WINDOW_CHUNKS, head.chunks))
            answers = await self._ask([("HGET", name, str(i)) for i in window], self._transfers, self._read_s)
            for answer in answers:
                if not isinstance(answer, bytes):
                    return
                yield answer
            if len(answers) < len(window):
                return

    async def write(self, head: Head, chunks: AsyncIterator[bytes]) -> None:
        """Raises StoreRefused if the store does not take it or is away, or if the payload is not as long as announced;
        part of a payload is removed again."""
        name = payload_name(head.state_id)
        count = size_bytes = 0
        try:
            await self._tell([("UNLINK", name)])  # rubbish or an incomplete one
            window: list[tuple[str | bytes | int, ...]] = []
            async for chunk in chunks:
                window.append(("HSET", name, str(count), chunk))
                count += 1
                size_bytes += len(chunk)
                if len(window) == WINDOW_CHUNKS:
                    # A first expiry at once: a writer that dies leaves nothing for ever.
                    await self._tell([*window, ("EXPIRE", name, self._ttl_s)])
                    window = []
            if size_bytes != head.size_bytes:
                raise StoreRefused(f"{size_bytes} bytes came for a payload of {head.size_bytes}")
            await self._tell([*window, ("HSET", name, "size", str(size_bytes)), ("EXPIRE", name, self._ttl_s)])
        except BaseException:
            await asyncio.shield(self._ask([("UNLINK", name)]))
            raise

    async def write_record(self, key: bytes, record: Record) -> None:
        """Raises StoreRefused."""
        name = record_name(key)
        fields = [part for pair in to_fields(record).items() for part in pair]
        await self._tell([("UNLINK", name), ("HSET", name, *fields), ("EXPIRE", name, self._ttl_s)])

    async def forget(self, keys: Iterable[bytes], state_id: bytes | None = None) -> None:
        """Remove records, and a payload, that turned out wrong."""
        names = [record_name(key) for key in keys] + ([payload_name(state_id)] if state_id else [])
        await self._ask([("UNLINK", name) for name in names])

    async def close(self) -> None:
        if self._knocking:
            self._knocking.cancel()
            await asyncio.gather(self._knocking, return_exceptions=True)
        await self._lookups.aclose()
        await self._transfers.aclose()

    async def _ask(
        self,
        commands: Sequence[tuple[str | bytes | int, ...]],
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
        except TROUBLES as error:
            self._leave_alone(error)
            return []

    async def _tell(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> None:
        answers = await self._ask(commands, self._transfers, WRITE_TIMEOUT_S)
        if not answers:
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
                    await client.connection_pool.disconnect()  # what was under way there has no meaning any more
                    await client.ping()
            except TROUBLES:
                continue
            log.info("the snapshot store is back")
            self._knocking = None
            return
