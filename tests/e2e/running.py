"""A stack as `make up` starts it, on free ports in a folder of its own, and what tests ask of it."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import openai
from prometheus_client.parser import text_string_to_metric_families

MARK = "THIMBLE_TEST_MARK"  # in the environment of everything that a stack starts
START_LIMIT_S = 100


UP = (sys.executable, "-m", "services.tools.cli", "up", "--port", "0", "--run-dir", "{run_dir}")


class Running:
    """`thimble up` as a process of its own. `lines` is what it has printed."""

    def __init__(self, run_dir: Path, command: Sequence[str] = UP, **environ: str) -> None:
        self.run_dir = run_dir
        self._client: openai.OpenAI | None = None
        self._temporary = run_dir / "tmp"
        self._temporary.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self._printed: queue.Queue[str] = queue.Queue()
        self.process = subprocess.Popen(
            [word.format(run_dir=run_dir) for word in command],
            env=os.environ | environ | {MARK: self.mark, "TMPDIR": str(self._temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._printed.put(line)
        self._printed.put("")

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first match in what it prints. Fails when it ends or takes too long."""
        deadline = time.monotonic() + START_LIMIT_S
        while not (found := re.search(pattern, self.output)):
            try:
                line = self._printed.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {pattern!r} after {START_LIMIT_S} s:\n{self.output}") from None
            assert line or re.search(pattern, self.output), f"it ended without {pattern!r}:\n{self.output}"
        return found

    def wait_until_ready(self) -> "Running":
        self.wait_for(r"Ctrl-C")
        self.url = self.wait_for(r"http://127\.0\.0\.1:\d+").group()
        self._client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)
        self.engine_metrics_url = self.wait_for(r"/metrics and (\S+/metrics)").group(1)
        return self

    @property
    def client(self) -> openai.OpenAI:
        assert self._client, "wait_until_ready first"
        return self._client

    def processes(self) -> list[int]:
        """Everything alive that this stack has started, itself included."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                mine = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                # Valkey writes its title over its environment, but works in a folder of ours.
                mine = mine or (folder / "cwd").readlink().is_relative_to(self._temporary)
                dead = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
            except OSError:
                continue
            if mine and not dead:
                found.append(int(folder.name))
        return found

    def child(self, module: str) -> int:
        """The process that runs this module."""
        found: list[int] = []

        def runs() -> bool:  # not at once: one that was just begun is for a moment a copy of its parent
            found.clear()
            for pid in self.processes():
                with contextlib.suppress(OSError):
                    if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                        found.append(pid)
            return len(found) == 1

        assert until(runs), self.output
        return found[0]

    def metrics(self) -> dict[str, float]:
        """Every sample of both services, `name{label="value",...}` without the model's name, labels in order."""
        found = {}
        for url in (self.engine_metrics_url, f"{self.url}/metrics"):
            with urllib.request.urlopen(url, timeout=10) as reply:
                for family in text_string_to_metric_families(reply.read().decode()):
                    for sample in family.samples:
                        labels = sorted((k, v) for k, v in sample.labels.items() if k != "model_name")
                        found[sample.name + "".join(f"{{{k}={v}}}" for k, v in labels)] = sample.value
        return found

    def stop(self) -> int:
        """Ctrl-C, as a terminal would send it to the launcher. The exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)

    def close(self) -> None:
        """End whatever is still there, however a test ended."""
        if self._client:
            self._client.close()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait(10)
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


def until(condition: Callable[[], bool], seconds: float = 15) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Reply:
    """A streamed answer, put together."""

    def __init__(self, client: openai.OpenAI, model: str, messages: list[Any], **options: Any) -> None:
        self.content = self.reasoning = self.finish_reason = ""
        self.chunks = 0
        wanted = {"temperature": 0, "max_tokens": 64} | options
        stream = client.chat.completions.create(
            model=model, messages=messages, stream=True, stream_options={"include_usage": True}, **wanted
        )
        for chunk in stream:
            self.chunks += 1
            if chunk.usage:
                self.prompt_tokens = chunk.usage.prompt_tokens
                self.completion_tokens = chunk.usage.completion_tokens
                assert chunk.usage.prompt_tokens_details is not None
                self.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0
            for choice in chunk.choices:
                self.content += choice.delta.content or ""
                self.reasoning += getattr(choice.delta, "reasoning_content", None) or ""
                self.finish_reason = choice.finish_reason or self.finish_reason


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
