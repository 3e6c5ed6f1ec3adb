"""A proxy that passes everything on and notes what was asked: one JSON object a line, `path` and `body`. Stands between
a client and a running api, so that real requests can be looked at and kept."""

import http.client
import json
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

KEPT = ("content-type", "authorization", "accept", "x-api-key", "anthropic-version", "anthropic-beta", "user-agent")


def make_server(target: str, log: Path, port: int = 0) -> ThreadingHTTPServer:
    """On this machine, at a free port unless told; the caller serves and closes it."""
    address = urllib.parse.urlsplit(target).netloc

    class Recorder(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name: self.headers[name] for name in KEPT if name in self.headers}
            connection = http.client.HTTPConnection(address, timeout=600)
            connection.request(self.command, self.path, body or None, headers)
            reply = connection.getresponse()
            with log.open("a") as file:
                entry = {"method": self.command, "path": self.path, "status": reply.status, "headers": headers}
                file.write(json.dumps(entry | {"body": json.loads(body) if body else None}) + "\n")
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() in ("content-type", "content-length", "x-request-id"):
                    self.send_header(name, value)
            self.end_headers()
            while piece := reply.read1():
                self.wfile.write(piece)
                self.wfile.flush()
            connection.close()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Recorder)


if __name__ == "__main__":
    server = make_server(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
