"""A local HTTP server that speaks what `thimble fetch` uses of a Hugging Face hub, and can misbehave on purpose.

Serves a folder as one model. Faults are by file name and count down: how many more times the connection breaks after
`break_after` bytes, the file comes short, or comes with a byte that is wrong.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE_BYTES = 10_000  # from here on files have a SHA-256, as files in LFS have


class Hub:
    def __init__(self, folder: Path, model: str = "owner/small") -> None:
        self.folder, self.model = folder, model
        self.breaks: Counter[str] = Counter()
        self.shorts: Counter[str] = Counter()
        self.corruptions: Counter[str] = Counter()
        self.break_after = 5000
        self.gated = False
        self.token: str | None = None  # what a gated model takes
        self.ranges = True  # whether Range is honoured
        self.requests: list[tuple[str, str | None]] = []  # path and Range
        self.sent_bytes, self._lock = 0, threading.Lock()  # each connection has its thread
        self.url = ""

    def count(self, sent_bytes: int) -> None:
        with self._lock:
            self.sent_bytes += sent_bytes

    def listing(self) -> dict[str, Any]:
        siblings = []
        for path in sorted(self.folder.rglob("*")):
            if path.is_file():
                data = path.read_bytes()
                blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
                entry: dict[str, Any] = {"rfilename": str(path.relative_to(self.folder)), "size": len(data)}
                entry["blobId"] = blob
                if len(data) >= LARGE_BYTES:
                    sums = hashlib.sha256(data).hexdigest()
                    entry["lfs"] = {"size": len(data), "sha256": sums, "pointerSize": 134}
                siblings.append(entry)
        return {"id": self.model, "modelId": self.model, "sha": COMMIT, "siblings": siblings}


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def refuse(self, status: int, code: str = "") -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self) -> None:
            path, wanted = self.path.partition("?")[0], self.headers.get("Range")
            hub.requests.append((path, wanted))
            listing = re.fullmatch(rf"/api/models/{hub.model}/revision/(\w+)", path)
            file = re.fullmatch(rf"/{hub.model}/resolve/{COMMIT}/(.+)", path)
            if not listing and not file:
                return self.refuse(404, "RepoNotFound")
            if listing and listing[1] not in ("main", COMMIT):
                return self.refuse(404, "RevisionNotFound")
            if hub.gated and file and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.refuse(403, "GatedRepo")
            if listing:
                return self.send(json.dumps(hub.listing()).encode(), 200, "")
            assert file
            if not (hub.folder / file[1]).exists():
                return self.refuse(404, "EntryNotFound")
            return self.send_file(file[1], wanted if hub.ranges else None)

        def send_file(self, name: str, wanted: str | None) -> None:
            data = (hub.folder / name).read_bytes()
            if hub.corruptions[name] > 0:
                hub.corruptions[name] -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            if hub.shorts[name] > 0:
                hub.shorts[name] -= 1
                data = data[: len(data) // 2]
            begin = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
            if begin >= len(data) > 0:
                return self.refuse(416)
            return self.send(data[begin:], 206 if wanted else 200, name)

        def send(self, data: bytes, status: int, name: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if hub.breaks[name] > 0 and len(data) > hub.break_after:
                hub.breaks[name] -= 1
                data = data[: hub.break_after]
                self.close_connection = True
            if name:
                hub.count(len(data))  # first: who has received all may look at once
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
