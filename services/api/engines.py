"""Which engine a dialog goes to. Any engine can go on with any dialog, but the one that had it last holds its states
and the experts that it needs: so each dialog has an order of preference among the engines, the same in every api
process (rendezvous hashing: an engine more or less moves only its own dialogs). Owns names and addresses; client.py
owns the calls.
"""

import asyncio
import hashlib
import ipaddress
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from services.api.client import INFO_AGE_S, Engine
from services.api.errors import ApiError, EngineLost
from services.rpc import engine_pb2 as pb

log = logging.getLogger(__name__)

RESOLVE_S = 5.0  # how old the answer of the name service may be


class Engines:
    """A name stands for all engines that the name service knows by it, as in `docker compose up --scale engine=2`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)
        self._engines: dict[str, Engine] = {}
        self._resolved: tuple[str, ...] = ()
        self._resolved_at = float("-inf")

    async def answering(
        self, owner: bytes = b"", age_s: float = INFO_AGE_S
    ) -> AsyncIterator[tuple[Engine, pb.InfoResponse]]:
        """All that answer, the one that `owner` prefers first. Raises the last one's error if none does."""
        trouble: ApiError = EngineLost("no engine is known by the configured names")
        found = False
        for engine in self._ranked(await self._endpoints(), owner):
            try:
                info = await engine.info(age_s)
            except ApiError as error:
                trouble = error if isinstance(error, EngineLost) else EngineLost(f"the engine does not answer: {error}")
                continue
            found = True
            yield engine, info
        if not found:
            raise trouble

    async def pick(self, owner: bytes = b"", age_s: float = INFO_AGE_S) -> tuple[Engine, pb.InfoResponse]:
        """The first of them."""
        async for answer in self.answering(owner, age_s):
            return answer
        raise AssertionError("answering raises if it yields nothing")

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))

    def _ranked(self, endpoints: Sequence[str], owner: bytes) -> list[Engine]:
        """Those that failed a moment ago last, so that not every request waits for one that is gone."""

        def place(address: str) -> tuple[bool, bytes]:
            mark = hashlib.blake2b(address.encode(), key=owner[:64]).digest() if owner else b""
            return self._engine(address).failed_lately, mark

        return [self._engine(address) for address in sorted(endpoints, key=place)]

    def _engine(self, address: str) -> Engine:
        if address not in self._engines:
            self._engines[address] = Engine(address)
        return self._engines[address]

    async def _endpoints(self) -> tuple[str, ...]:
        if time.monotonic() - self._resolved_at > RESOLVE_S:
            found = await asyncio.gather(*map(_resolve, self._addresses))
            endpoints = tuple(dict.fromkeys(endpoint for some in found for endpoint in some))
            if self._resolved and set(endpoints) != set(self._resolved):
                log.info("engines: %s", ", ".join(endpoints))
            self._resolved, self._resolved_at = endpoints, time.monotonic()
        return self._resolved


def owner_of(first: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> bytes:
    """What a dialog is known by from its first question to its end: its tools and its messages up to the `first` of the
    user's. The system prompt alone would send every dialog that has the same one to the same engine."""
    text = json.dumps([list(tools), list(first)], sort_keys=True)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


async def _resolve(address: str) -> list[str]:
    """The addresses behind a name, of one family: both may lead to the same engine. A name that cannot be resolved is
    left as it is, for gRPC to say so."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or address.startswith("unix:") or _is_literal(host):
        return [address]
    try:
        answers = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except OSError:
        return [address]
    by_family: dict[int, list[str]] = {}
    for family, _, _, _, place in answers:
        text = f"[{place[0]}]:{port}" if family == socket.AF_INET6 else f"{place[0]}:{port}"
        by_family.setdefault(family, []).append(text)
    chosen = by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or [address]
    return sorted(set(chosen))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return True
