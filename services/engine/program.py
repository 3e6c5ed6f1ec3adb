"""The engine as a program: settings, load, serve, stop. Owns the process: signals, exit status, what is printed.

Both ports are taken at once; health says NOT_SERVING while the model loads. Exit status: 0 after a stop signal, 2 if
a setting, the store or the machine is not fit, 1 if the engine failed. After a failure of the GPU, which only a new
process recovers from, this one replaces itself by one, a few times in a row at most.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from services import garbage
from services.engine.config import EngineConfig, read_config
from services.engine.engine import Engine
from services.engine.errors import DeviceError, EngineError
from services.engine.load import RESTARTS, load
from services.engine.metrics import MetricsServer
from services.engine.server import Server
from services.settings import SettingError, describe

T = TypeVar("T")

LOADER = "load"  # the thread that loads the model
FAILED = 1
DEVICE_FAILED = 3
MOST_RESTARTS = 3  # in a row
STEADY_S = 600.0  # an engine that has run so long has not failed in a row


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = read_config(os.environ)
        say(f"settings\n{describe(config)}")
        begun = time.monotonic()
        status = asyncio.run(run(config))
    except DeviceError as error:
        print(f"thimble engine: {error}", file=sys.stderr)
        return start_again(0.0) if RESTARTS in os.environ else 2
    except (SettingError, EngineError) as error:
        print(f"thimble engine: {error}", file=sys.stderr)
        return 2
    if status == DEVICE_FAILED:
        return start_again(time.monotonic() - begun)
    if any(thread.name == LOADER for thread in threading.enumerate()):
        # Stopped while loading. Python would end that thread in the middle of torch's C++, which aborts the process.
        sys.stdout.flush()
        os._exit(status)
    return status


def start_again(ran_s: float) -> int:
    """Replace this process, unless that has been tried too often. The new one has the same ports and settings."""
    restarts = 0 if ran_s > STEADY_S else int(os.environ.get(RESTARTS, "0"))
    if restarts < MOST_RESTARTS:
        say("starting again")
        os.environ[RESTARTS] = str(restarts + 1)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    print(f"thimble engine: the GPU failed {restarts + 1} times in a row: look at it (nvidia-smi)", file=sys.stderr)
    return FAILED


def say(text: str) -> None:
    print(text, flush=True)


async def run(config: EngineConfig) -> int:
    """Until a stop signal or the engine's failure; returns the exit status. Raises SettingError and EngineError."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    registry = CollectorRegistry()
    metrics_server = MetricsServer(registry, config.metrics_host, config.metrics_port)
    try:
        server = Server(config.host, config.port, config.snapshot_timeout_s)
        await server.start()
        try:
            say(f"listening on {config.host}:{server.port}, loading {config.store}")
            loading = asyncio.wrap_future(_in_background(lambda: load(config, registry, say)))
            if await _stopped_before(loading, stop):
                return 0
            parts = loading.result()
            engine = Engine(parts.info, parts.scheduler, parts.experts, parts.grammars, parts.sight, parts.exchange_dir)
            garbage.keep_what_is_there()
            await server.serve(engine)
            say(
                f"ready: gRPC on {config.host}:{server.port}, "
                f"metrics on http://{config.metrics_host}:{metrics_server.port}/metrics"
            )
            ended = asyncio.wrap_future(engine.ended)
            if not await _stopped_before(ended, stop):
                failure = ended.exception()  # nothing else ends one that nobody has closed
                say(f"the engine has failed: {failure!r}")
                return DEVICE_FAILED if isinstance(failure, DeviceError) else FAILED
            say("stopping")
            return 0
        finally:
            await server.stop(config.stop_timeout_s)
    finally:
        metrics_server.close()


async def _stopped_before(work: "asyncio.Future[Any]", stop: asyncio.Event) -> bool:
    """Wait for the stop signal or the end of `work`; True if it is the signal that came."""
    stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.wait())
    await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    return not work.done()


def _in_background(work: Callable[[], T]) -> "Future[T]":
    """Not in the loop's executor, which is waited for at the end: a stop signal must not wait for a model to load."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=LOADER, daemon=True).start()
    return future
