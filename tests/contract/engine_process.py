"""An engine as a process of its own, started as an operator does, and what it prints."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass
class EngineProcess:
    process: "subprocess.Popen[str]"
    printed: list[str]

    @property
    def address(self) -> str:
        return self._found(r"^ready: gRPC on (\S+),")

    @property
    def metrics_url(self) -> str:
        return self._found(r"metrics on (\S+)$")

    def _found(self, pattern: str) -> str:
        (value,) = re.findall(pattern, self.printed[-1])
        return str(value)


TESTED_DEVICE = os.environ.get("TESTED_DEVICE", "cpu")


def start_engine(
    store: Path, log: Path, python: Sequence[str] = ("-m", "services.engine"), **settings: str
) -> EngineProcess:
    """Until it says ready. Ports are free ones; the CPU computes unless TESTED_DEVICE=cuda is set."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("THIMBLE_")}
    environ |= {f"THIMBLE_ENGINE_{key.upper()}": value for key, value in settings.items()}
    environ |= {"THIMBLE_ENGINE_STORE": str(store)}
    environ.setdefault("THIMBLE_ENGINE_DEVICE", TESTED_DEVICE)
    environ.setdefault("THIMBLE_ENGINE_READERS", "2")  # else what is fastest is measured at each start, for 0.6 s
    for port in ("PORT", "METRICS_PORT"):
        environ.setdefault(f"THIMBLE_ENGINE_{port}", "0")
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *python], env=environ, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert process.stdout is not None
    engine = EngineProcess(process, [])
    for line in process.stdout:
        engine.printed.append(line.rstrip())
        if line.startswith("ready:"):
            return engine
    process.stdout.close()
    raise AssertionError(f"the engine ended with {process.wait()}: {log.read_text()}")


def stop_engine(engine: EngineProcess) -> int:
    with engine.process as process:
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=30)
