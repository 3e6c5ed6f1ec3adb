"""`thimble up`: a store, an engine and an api on this machine, started, watched and stopped together.

Owns the processes and what the terminal shows. Which ports and settings they get is in stack.py.
"""

import argparse
import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from services.settings import SettingError
from services.tools import demo
from services.tools.amounts import amount, count
from services.tools.child import DONE, Child
from services.tools.completions import Server
from services.tools.stack import Stack, StackError, plan_stack

WATCH_S = 0.2
NEWS_S = 5.0  # between two lines about a service that is still starting
TAIL_LINES = 20
QUICK_S = 1.0  # a preparation that takes longer is told about
KILL_AFTER_S = 10.0  # beyond a service's own stop_timeout_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, help="a store that `thimble repack` wrote (default: the demo's)")
    parser.add_argument("--port", type=count, help="port of the api; 0: any free one (default: 8000)")
    parser.add_argument("--run-dir", type=Path, default=demo.ROOT / ".run", help="folder for logs and the demo's store")
    parser.add_argument("--start-limit-s", type=amount, default=900.0, help="longest wait for a service to be ready")


def run(args: argparse.Namespace) -> int:
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    run_dir: Path = args.run_dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    given = args.store or (Path(os.environ["THIMBLE_ENGINE_STORE"]) if "THIMBLE_ENGINE_STORE" in os.environ else None)
    store = given.resolve() if given else run_dir / "store"
    if given and not (store / "manifest.json").exists():
        raise StackError(f"{store} holds no store: make one with `thimble repack CHECKPOINT {store}`")
    with _lock(run_dir):
        try:
            stack = plan_stack(os.environ, store, args.port)
        except SettingError as error:
            raise StackError(str(error)) from error
        launcher = Launcher(run_dir / "logs", args.start_limit_s, stop)
        try:
            launcher.compile_kernels()
            if not given and not demo.is_fresh(store):
                launcher.make_demo(store)
            launcher.start(stack)
            if not stop.is_set():
                print(_greeting(stack, launcher.logs), flush=True)
            launcher.watch()
        finally:
            launcher.stop_all()
    return 0


def _lock(run_dir: Path) -> IO[str]:
    """Two launchers must not write the same logs and store; the kernel releases the lock however we end."""
    file = (run_dir / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise StackError(
            f"another `thimble up` runs in {run_dir}: stop it, or give this one another --run-dir"
        ) from error
    return file


class Launcher:
    """The children, in the order they were started. `stop` is set by a signal and ends every wait."""

    def __init__(self, logs: Path, start_limit_s: float, stop: threading.Event) -> None:
        self.logs = logs
        self._limit_s = start_limit_s
        self._stop = stop
        self._begun = time.monotonic()
        self._children: list[tuple[Child, float]] = []

    def compile_kernels(self) -> None:
        """Ahead of the engine, which would do it silently. Without a compiler the engine runs, slowly."""
        builder = self._run_to_end("kernels", ["-m", "kernels.build"], "compiling the C++ kernels (first start only)")
        if builder and builder.ended() != DONE:
            self.say(f"the kernels are not compiled: {' '.join(builder.last_lines(1))}")

    def make_demo(self, store: Path) -> None:
        words = ["-m", "services.tools.cli", "demo", str(store)]
        maker = self._run_to_end("demo", words, "making the demo's store (first start only)")
        if maker and not demo.is_fresh(store):
            raise StackError(f"the demo's store could not be made: it {maker.ended()}\n{_tail(maker)}")

    def start(self, stack: Stack) -> None:
        """Engine and api at once, since each takes seconds to import; returns when both are ready or `stop` is set."""
        from services.tools.health import api_trouble, engine_trouble  # grpc's threads must not be there at a fork

        if self._stop.is_set():
            return
        self.say(f"engine and api are starting, store {stack.engine.store}")
        engine = self._spawn(
            "engine", [sys.executable, "-m", "services.engine"], stack.environ, stack.engine.stop_timeout_s
        )
        api = self._spawn("api", [sys.executable, "-m", "services.api"], stack.environ, stack.api.stop_timeout_s)
        if self._wait(engine, lambda: engine_trouble(stack.engine_address)):
            self._wait(api, lambda: api_trouble(f"{stack.url}/ready"))

    def watch(self) -> None:
        """Returns when `stop` is set; raises StackError when a child ends by itself."""
        while not self._stop.wait(WATCH_S):
            self._check()

    def stop_all(self) -> None:
        """Last started, first stopped: the api takes no request whose engine has gone."""
        for child, stop_timeout_s in reversed(self._children):
            if not child.ended() and not child.stop(stop_timeout_s + KILL_AFTER_S):
                self.say(f"{child.name} did not stop and was killed")
        if self._children:
            self.say("stopped")

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._begun:6.1f} s] {text}", flush=True)

    def _run_to_end(self, name: str, words: list[str], news: str) -> Child | None:
        """A preparation, told about if it takes a while. None if it has not ended when `stop` is set."""
        if self._stop.is_set():
            return None
        child = self._spawn(name, [sys.executable, *words], os.environ, 0.0)
        begun = time.monotonic()
        told = False
        while not child.ended():
            if not told and time.monotonic() - begun > QUICK_S:
                self.say(news)
                told = True
            if self._stop.wait(WATCH_S):
                return None
        self._children.clear()
        return child

    def _spawn(self, name: str, command: list[str], environ: Mapping[str, str], stop_timeout_s: float) -> Child:
        child = Child(name, command, environ, self.logs / f"{name}.log")
        self._children.append((child, stop_timeout_s))
        return child

    def _wait(self, child: Child, trouble: Callable[[], str]) -> bool:
        """True when `trouble` has gone, False when `stop` is set. Raises StackError if that takes too long."""
        started = news = time.monotonic()
        while what := trouble():
            self._check()
            now = time.monotonic()
            if now - started > self._limit_s:
                raise StackError(f"{child.name} was not ready after {self._limit_s:.0f} s: {what}\n{_tail(child)}")
            if now - news > NEWS_S:
                news = now
                self.say(f"{child.name} is still starting: {' '.join(child.last_lines(1)) or what}")
            if self._stop.wait(WATCH_S):
                return False
        self.say(f"{child.name} is ready")
        return True

    def _check(self) -> None:
        for child, _ in self._children:
            if end := child.ended():
                raise StackError(f"{child.name} {end}\n{_tail(child)}")


def _tail(child: Child) -> str:
    lines = child.last_lines(TAIL_LINES) or ["(empty)"]
    return "\n".join([f"the end of {child.log}:", *(f"  | {line}" for line in lines)])


def _plan(log: str) -> str:
    """The engine's ledger of threads and memory, as it wrote it into its log at start."""
    found = re.search(r"\d+ workers,.*?available$", log, re.MULTILINE | re.DOTALL)
    return found.group() if found else "(the engine wrote no plan)"


def _command() -> str:
    """How to call `thimble` from the folder that this was called from."""
    command = Path(sys.executable).parent / "thimble"
    return str(command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command)


def _greeting(stack: Stack, logs: Path) -> str:
    plain, think = Server(stack.url, stack.api.read_api_key()).models()[:2]
    key = ' -H "Authorization: Bearer $KEY"' if stack.api.read_api_key() else ""
    body = json.dumps({"model": plain, "stream": True, "messages": [{"role": "user", "content": "What is 20 + 22?"}]})
    return f"""
Plan of the engine: {_plan((logs / "engine.log").read_text(errors="replace"))}

Ready. Chat in another terminal:
  {_command()} chat --url {stack.url}
or with curl:
  curl -N {stack.url}/v1/chat/completions -H "Content-Type: application/json"{key} \\
    -d '{body}'
or with any OpenAI client: base_url={stack.url}/v1, model={plain} (or {think}, which reasons first)
Metrics: {stack.url}/metrics and {stack.metrics_url}. Logs: {logs}
Ctrl-C stops everything.
"""
