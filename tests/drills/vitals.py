"""What processes take, watched while a drill runs: memory, what of it is locked, a GPU's, file handles, threads.

Owns the sampling thread. All is read from /proc, but for a GPU's memory, which an engine tells as its driver does. A
leak is a slope. Memory that is filled once (caches, pools of malloc) is not one, so only the last half counts.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import httpx
from prometheus_client.parser import text_string_to_metric_families

EVERY_S = 1.0
LEAST_SAMPLES = 4
DRIVER_FILES = "/dev/nvidia"  # what CUDA allocates page-locked is mapped from one of these, and counted nowhere else


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss_bytes: int
    handles: int
    threads: int
    locked_bytes: int = 0
    vram_bytes: int = 0


class Vitals:
    """A context manager. `pids` by name; a process that ends is no longer watched. `metrics`: the addresses of those
    who have some."""

    def __init__(
        self, pids: Mapping[str, int], every_s: float = EVERY_S, metrics: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.samples: dict[str, list[Sample]] = {name: [] for name in pids}
        self._pids, self._every_s, self._metrics = dict(pids), every_s, dict(metrics)
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
                vram_bytes = vram(self._metrics[name]) if name in self._metrics else 0
                if sample is not None and vram_bytes is not None:
                    self.samples[name].append(replace(sample, vram_bytes=vram_bytes))

    def growth(self, name: str) -> "Growth":
        return growth(self.samples[name])


def look(pid: int) -> Sample | None:
    """None if there is no such process."""
    folder = Path(f"/proc/{pid}")
    try:
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        handles = len(list((folder / "fd").iterdir()))
        rss_bytes, *locked = (int(status[name].split()[0]) * 1024 for name in ("VmRSS", "VmLck", "VmPin"))
        locked_bytes = sum(locked) + driver_bytes((folder / "maps").read_text())
        return Sample(time.monotonic(), rss_bytes, handles, int(status["Threads"]), locked_bytes)
    except (OSError, KeyError):
        return None


def driver_bytes(maps: str) -> int:
    """What is mapped of a GPU's driver."""
    total = 0
    for line in maps.splitlines():
        addresses, *_, name = line.split(maxsplit=5)
        if name.startswith(DRIVER_FILES):
            start, stop = (int(address, 16) for address in addresses.split("-"))
            total += stop - start
    return total


def vram(url: str) -> int | None:
    """A GPU's memory in use, by all; None without an answer."""
    try:
        text = httpx.get(url, timeout=10).raise_for_status().text
    except httpx.HTTPError:
        return None
    series = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return int(series["thimble_memory_used_bytes", "vram"])


def cpu_s(pid: int) -> float:
    """Processor time that a process has taken, all its threads together; 0 if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Growth:
    """Memory's slope over the last half; of the rest, how much more the last half had at its most than the first half
    at its most. Of handles also how many more there were in the last quarter at the least than in the first half at the
    least: those that stayed, and were not in passing."""

    rss_percent_a_minute: float
    rss_mb: float  # at the end
    handles: int
    threads: int
    locked_bytes: int = 0
    vram_bytes: int = 0
    most_locked_mb: float = 0.0
    most_vram_mb: float = 0.0
    handles_kept: int = 0

    def __str__(self) -> str:
        said = [f"{self.rss_mb:.0f} MB {self.rss_percent_a_minute:+.2f} %/min"]
        if self.most_locked_mb:
            said.append(f"{self.most_locked_mb:.1f} MB locked {self.locked_bytes:+d} bytes")
        if self.most_vram_mb:
            said.append(f"{self.most_vram_mb:.0f} MB of the GPU {self.vram_bytes:+d} bytes")
        return ", ".join([*said, f"handles {self.handles:+d} (kept {self.handles_kept:+d}), threads {self.threads:+d}"])


def growth(samples: list[Sample]) -> Growth:
    assert len(samples) >= LEAST_SAMPLES, "watched for too short a time"
    first, last = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    mean_at = sum(s.at_s for s in last) / len(last)
    mean_rss = sum(s.rss_bytes for s in last) / len(last)
    spread = sum((s.at_s - mean_at) ** 2 for s in last)
    slope = sum((s.at_s - mean_at) * (s.rss_bytes - mean_rss) for s in last) / spread

    def more(of: Callable[[Sample], int]) -> int:
        return max(map(of, last)) - max(map(of, first))

    return Growth(
        rss_percent_a_minute=100 * 60 * slope / mean_rss,
        rss_mb=samples[-1].rss_bytes / 1e6,
        handles=more(lambda one: one.handles),
        threads=more(lambda one: one.threads),
        locked_bytes=more(lambda one: one.locked_bytes),
        vram_bytes=more(lambda one: one.vram_bytes),
        most_locked_mb=max(one.locked_bytes for one in samples) / 1e6,
        most_vram_mb=max(one.vram_bytes for one in samples) / 1e6,
        handles_kept=min(one.handles for one in last[len(last) // 2 :]) - min(one.handles for one in first),
    )
