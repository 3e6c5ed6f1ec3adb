"""The leash: a child dies with its launcher however that dies, and is stopped within a bound."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from timing import in_time

from services.tools.child import Child

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
)
LAUNCHER = """
import os, sys, time
from pathlib import Path
from services.tools.child import Child
child = Child("sleeper", ["sleep", "60"], os.environ, Path(sys.argv[1]))
print(child.pid, flush=True)
time.sleep(60)
"""


def running(pid: int) -> bool:
    """Not merely in the process table: a zombie that nobody reaps is dead."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


def test_output_goes_to_the_log_and_the_last_run_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "echo.log"
    for word in ("first", "second"):
        child = Child("echo", ["sh", "-c", f"echo {word}; echo {word} wrong >&2; exit 3"], os.environ, log)
        assert in_time(lambda child=child: bool(child.ended()))
        assert child.ended() == "ended with status 3"
        assert child.last_lines(1) == [f"{word} wrong"]
    assert log.with_suffix(".log.previous").read_text() == "first\nfirst wrong\n"


def test_stop_is_gentle_first(tmp_path: Path) -> None:
    child = Child("sleep", ["sleep", "60"], os.environ, tmp_path / "log")
    assert child.ended() == ""
    assert child.stop(grace_s=10)
    assert child.ended() == "was killed by SIGTERM"


def test_stop_kills_who_will_not_listen_and_all_that_it_started(tmp_path: Path) -> None:
    shell = f'sleep 60 & echo $!; exec {sys.executable} -c "{STUBBORN}"'
    child = Child("deaf", ["sh", "-c", shell], os.environ, tmp_path / "log")
    assert in_time(lambda: "deaf" in child.last_lines(1))
    grandchild = int(child.last_lines(2)[0])
    assert running(grandchild)
    assert not child.stop(grace_s=0.1)
    assert child.ended() == "was killed by SIGKILL"
    assert in_time(lambda: not running(grandchild))


def test_a_killed_launcher_takes_its_child_along(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert running(pid)
        launcher.send_signal(signal.SIGKILL)
    assert in_time(lambda: not running(pid))


def test_without_the_leash_it_would_live_on(tmp_path: Path) -> None:
    """The control of the test above: an ordinary child survives its launcher."""
    unleashed = LAUNCHER.replace('["sleep", "60"]', '["sh", "-c", "setsid sleep 60 & echo $!; wait"]')
    with subprocess.Popen(
        [sys.executable, "-c", unleashed, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()
        assert in_time(lambda: (tmp_path / "log").read_text() != "")
        launcher.send_signal(signal.SIGKILL)
    survivor = int((tmp_path / "log").read_text())
    time.sleep(0.3)
    try:
        assert running(survivor)
    finally:
        os.kill(survivor, signal.SIGKILL)
