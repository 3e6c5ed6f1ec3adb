"""The api as a program: serve until SIGINT or SIGTERM. Owns the process: settings, store, socket, signals."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn
import uvloop
from fastapi import FastAPI

from services import garbage
from services.api import logs, malloc
from services.api.app import build_app
from services.api.config import EMBEDDED, SECRET, ApiConfig, read_config
from services.api.connections import connection_options
from services.api.embedded import EmbeddedStore, EmbeddedStoreError
from services.api.errors import ModelFolderError
from services.settings import SettingError, describe

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Without uvicorn's signal handlers, which end the process before it has cleaned up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> int:
    """The exit status: 0 stopped, 1 could not start, 2 a setting is wrong."""
    malloc.give_back()
    try:
        config = read_config(os.environ)
        logs.set_up(config.log_level)
        log.info("settings:\n%s", describe(config, SECRET))
        with contextlib.ExitStack() as stack:
            redis_url, reader_url = config.redis_url, config.redis_reader_url
            if redis_url == EMBEDDED:
                embedded = stack.enter_context(EmbeddedStore(config.embedded_memory_mb))
                redis_url, reader_url = embedded.url, embedded.reader_url
            app = build_app(config, redis_url, reader_url)
            uvloop.run(serve(config, app, stack.enter_context(listen(config))))
    except SettingError as error:
        print(f"thimble api: {error}", file=sys.stderr)
        return 2
    except (ModelFolderError, EmbeddedStoreError) as error:
        print(f"thimble api: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"thimble api: {error}", file=sys.stderr)
        return 1
    return 0


def listen(config: ApiConfig) -> socket.socket:
    """The bound socket. Raises OSError, which says what is wrong with the address."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        return socket.create_server((config.host, config.port), family=family, backlog=512)
    except (OSError, UnicodeError) as error:  # the latter of a name that cannot be one
        why = getattr(error, "strerror", None) or error
        raise OSError(f"cannot listen on {config.host} port {config.port}: {why}") from error


async def serve(config: ApiConfig, app: FastAPI, listening: socket.socket) -> None:
    server = Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(config.stop_timeout_s)),
            **connection_options(),
        )
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    garbage.keep_what_is_there()
    host, port = listening.getsockname()[:2]
    print(f"listening on http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
    await server.serve(sockets=[listening])
