"""What processes take, watched from /proc while a drill runs: memory, file handles, threads. Owns the sampling thread.

A leak is a slope. Memory that is filled once (caches, pools of malloc) is not one, so only the last half counts.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 1.0
LEAST_SAMPLES = 4


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss_bytes: int
    handles: int
    threads: int


class Vitals:
    """A context manager. `pids` by name; a process that ends is no longer watched."""

    def __init__(self, pids: Mapping[str, int], every_s: float = EVERY_S) -> None:
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}
        self._pids, self._every_s = dict(pids), every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Vitals":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(self._every_s):
            for name, pid in self._pids.items():
                sample = look(pid)
                if sample is not None:
                    self.samples[name].append(sample)

    def growth(self, name: str) -> "Growth":
        return growth(self.samples[name])


def look(pid: int) -> Sample | None:
    """None if there is no such process."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        handles = len(list((folder / "fd").iterdir()))
        return Sample(time.monotonic(), int(status["VmRSS"].split()[0]) * 1024, handles, int(status["Threads"]))
    except (OSError, KeyError):
        return None


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken, all its threads together; 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Growth:
    """Memory's slope over the last half; how many more handles and threads the last half had at its most than the
    first half at its most."""

    rss_percent_a_minute: float
    rss_mb: float  # at the end
    handles: int
    threads: int

    def __str__(self) -> str:
        memory = f"{self.rss_mb:.0f} MB {self.rss_percent_a_minute:+.2f} %/min"
        return f"{memory}, handles {self.handles:+d}, threads {self.threads:+d}"


def growth(samples: list[Sample]) -> Growth:
    assert len(samples) >= LEAST_SAMPLES, "watched for too short a time"
    first, last = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    mean_at = sum(s.at_s for s in last) / len(last)
    mean_rss = sum(s.rss_bytes for s in last) / len(last)
    spread = sum((s.at_s - mean_at) ** 2 for s in last)
    slope = sum((s.at_s - mean_at) * (s.rss_bytes - mean_rss) for s in last) / spread
    return Growth(
        rss_percent_a_minute=100 * 60 * slope / mean_rss,
        rss_mb=samples[-1].rss_bytes / 1e6,
        handles=max(s.handles for s in last) - max(s.handles for s in first),
        threads=max(s.threads for s in last) - max(s.threads for s in first),
    )
