"""One child process of `thimble up`: started on a leash, its output in a log file, stopped within a bound.

Owns the process and its log. Knows nothing of what runs in it.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
TAIL_BYTES = 16384
DONE = "ended with status 0"  # of `Child.ended`


class Child:
    """Runs `command` in a session of its own, so that a terminal's Ctrl-C reaches only the launcher, which then stops
    its children in order. Must be made by the main thread: the leash holds for as long as the thread that starts it."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists():
            log.replace(log.with_suffix(log.suffix + ".previous"))
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_leash(),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str:
        """Empty while it runs, else how it ended, for people."""
        status = self._process.poll()
        if status is None:
            return ""
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-count:]

    def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL to all of its session after `grace_s`. False if it had to be killed."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(grace_s)
            in_time = True
        except subprocess.TimeoutExpired:
            in_time = False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # whoever it left behind; its session's group has its id
        self._process.wait()
        return in_time


def _leash() -> Callable[[], None] | None:
    """What the child runs before exec: ask the kernel to kill it when the launcher dies, however that happens."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    launcher = os.getpid()

    def leash() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # died between fork and prctl
            os._exit(1)

    return leash
