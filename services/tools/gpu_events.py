"""What a GPU did during a piece of work: kernels and copies with their times, by torch's profiler.

Owns recording and the events; kernels inside a CUDA graph are events like others. Recording costs time between kernels,
hardly within them: durations are to be trusted, gaps are not.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerActivity, profile

Kind = Literal["kernel", "copy"]

KINDS: dict[str, Kind] = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}  # by the trace's categories


@dataclass(frozen=True)
class Event:
    """Times by the GPU's clock, in microseconds from the first event."""

    name: str
    kind: Kind
    start_us: float
    duration_us: float
    stream: int

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


def record(work: Callable[[], object]) -> list[Event]:
    """The events of `work`, in the order of their beginnings; none if the machine lets nobody profile its GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text(encoding="utf-8")))


def parse(trace: Mapping[str, Any]) -> list[Event]:
    """The GPU's events of a Chrome trace as torch writes it."""
    found = [
        Event(
            str(entry["name"]),
            KINDS[entry["cat"]],
            float(entry["ts"]),
            float(entry["dur"]),
            int(entry.get("args", {}).get("stream", 0)),
        )
        for entry in trace["traceEvents"]
        if entry.get("ph") == "X" and entry.get("cat") in KINDS
    ]
    found.sort(key=lambda event: event.start_us)
    first = found[0].start_us if found else 0.0
    return [Event(e.name, e.kind, e.start_us - first, e.duration_us, e.stream) for e in found]
