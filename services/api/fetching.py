"""Pictures from the web, where the owner of the server allows it. Owns what may be reached: public addresses only.

A name is resolved once, every address it has must be public, and the connection goes to one of those addresses: a name
that answers differently a moment later changes nothing. Each redirect is a new address and is checked like the first.
Size and time are limited; the body is never interpreted here. No cookie, no key and no referrer is sent.
"""

import http.client
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable
from urllib.parse import urljoin, urlsplit

from services.api.errors import InvalidRequest
from services.api.pictures import MOST_BYTES

MOST_REDIRECTS = 3
TIMEOUT_S = 10.0
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE_BYTES = 1 << 16

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether it belongs to the open internet, also if it only wraps an address that does not."""
    if isinstance(address, ipaddress.IPv6Address):
        wrapped = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if wrapped:
            return is_public(wrapped)
        if address in ipaddress.IPv6Network("64:ff9b::/96"):
            return is_public(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address.is_global and not address.is_multicast and not address.is_reserved


def fetch(url: str, allowed: Callable[[Address], bool] = is_public, timeout_s: float = TIMEOUT_S) -> bytes:
    """The body of a picture's URL. Blocks. Raises InvalidRequest, whatever goes wrong at the other end."""
    until = time.monotonic() + timeout_s
    for _ in range(MOST_REDIRECTS + 1):
        try:
            status, location, body = _get(url, allowed, until)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _failed(url, str(error) or type(error).__name__) from error
        if status == 200:
            return body
        if status not in _REDIRECTS or not location:
            raise _failed(url, f"the server answered {status}")
        url = urljoin(url, location)
    raise _failed(url, f"more than {MOST_REDIRECTS} redirects")


def _get(url: str, allowed: Callable[[Address], bool], until: float) -> tuple[int, str | None, bytes]:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _failed(url, "only http: and https: are fetched")
    if parts.username is not None or parts.password is not None:
        raise _failed(url, "a URL with a name or password is not fetched")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    connection = _Pinned(parts.scheme, parts.hostname, port, _address(url, parts.hostname, port, allowed), until)
    reply: http.client.HTTPResponse | None = None
    try:
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("GET", path, headers={"User-Agent": "thimble", "Accept": "image/*"})
        reply = connection.getresponse()
        body = bytearray()
        while reply.status == 200 and (piece := reply.read1(_PIECE_BYTES)):
            body += piece
            if len(body) > MOST_BYTES:
                raise _failed(url, f"it has more than {MOST_BYTES} bytes")
            connection.open.settimeout(_left(until))
        return reply.status, reply.getheader("Location"), bytes(body)
    finally:
        if reply is not None:
            reply.close()
        connection.close()


def _address(url: str, host: str, port: int, allowed: Callable[[Address], bool]) -> Address:
    found = [ipaddress.ip_address(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not found or not all(map(allowed, found)):
        raise _failed(url, "it is not an address of the open internet")
    return found[0]


class _Pinned(http.client.HTTPConnection):
    """Connects to one address, whatever the name resolves to by then; certificates are checked against the name."""

    def __init__(self, scheme: str, host: str, port: int, address: Address, until: float) -> None:
        super().__init__(host, port)
        self._scheme, self._address, self._until = scheme, address, until
        self.open: socket.socket  # `sock` is taken from us where the reply ends with the connection

    def connect(self) -> None:
        sock = socket.create_connection((str(self._address), self.port), _left(self._until))
        if self._scheme == "https":
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=self.host)
        sock.settimeout(_left(self._until))
        self.sock = self.open = sock


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def _failed(url: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"a picture could not be fetched from {url[:200]!r}: {why}", "messages")
