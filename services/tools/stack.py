"""Which processes make the stack, at which ports, with which environment. Starts nothing.

The owner's THIMBLE_ENGINE_* and THIMBLE_API_* win over what is chosen here.
"""

import contextlib
import errno
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.api.config import ApiConfig
from services.api.config import read_config as read_api_config
from services.engine.config import EngineConfig
from services.engine.config import read_config as read_engine_config

MEMORY = Path("/dev/shm")  # a folder here costs no disk


class StackError(Exception):
    """The stack cannot be started, or has broken. The message is for people."""

    code = "stack"


@dataclass(frozen=True)
class Stack:
    """What will run: the environment both services get, and their settings as they will read them."""

    environ: Mapping[str, str]
    engine: EngineConfig
    api: ApiConfig

    @property
    def engine_address(self) -> str:
        return f"{_reachable(self.engine.host)}:{self.engine.port}"

    @property
    def metrics_url(self) -> str:
        return f"http://{_reachable(self.engine.metrics_host)}:{self.engine.metrics_port}/metrics"

    @property
    def url(self) -> str:
        return f"http://{_reachable(self.api.host)}:{self.api.port}"


def plan_stack(environ: Mapping[str, str], store: Path, port: int | None) -> Stack:
    """Fill in what the owner left open. Raises StackError for a port that cannot be had, SettingError for bad settings.

    Ports are held only while this runs: whoever takes one before its service does makes that service say so.
    """
    chosen = dict(environ)
    chosen["THIMBLE_ENGINE_STORE"] = str(store)
    chosen.setdefault("THIMBLE_API_MODEL_DIR", str(store))
    chosen.setdefault("THIMBLE_API_REDIS_URL", "embedded")
    if os.access(MEMORY, os.W_OK):
        for variable in ("THIMBLE_ENGINE_EXCHANGE_DIR", "THIMBLE_API_EXCHANGE_DIR"):
            chosen.setdefault(variable, str(MEMORY / f"thimble-{os.getuid()}"))
    if port is not None:
        chosen["THIMBLE_API_PORT"] = str(port)
    api, engine = read_api_config(chosen), read_engine_config(chosen)
    api.read_api_key()  # a file that cannot be read is told before anything is started
    with contextlib.ExitStack() as held:
        for variable, host, wish in (
            ("THIMBLE_API_PORT", api.host, api.port),
            ("THIMBLE_ENGINE_PORT", engine.host, engine.port),
            ("THIMBLE_ENGINE_METRICS_PORT", engine.metrics_host, engine.metrics_port),
        ):
            # Two stacks on one machine are fine: only a port that somebody asked for, or the api's, must be that one.
            movable = variable not in chosen and variable != "THIMBLE_API_PORT"
            listener = held.enter_context(_listen(host, wish, variable, movable))
            chosen[variable] = str(listener.getsockname()[1])
    engine = read_engine_config(chosen)
    chosen.setdefault("THIMBLE_API_ENGINES", f"{_reachable(engine.host)}:{engine.port}")
    return Stack(chosen, engine, read_api_config(chosen))


def _listen(host: str, port: int, variable: str, movable: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        if movable and port:
            return _listen(host, 0, variable, movable)
        if not isinstance(error, OSError) or _is_the_host_s(error):
            raise StackError(
                f"{variable.replace('PORT', 'HOST')}={host}: this machine has no such address; "
                f"give one of its own, 127.0.0.1 for this machine only"
            ) from error
        other = "--port N" if variable == "THIMBLE_API_PORT" else f"{variable}=N"
        raise StackError(
            f"port {port} on {host} ({variable}) cannot be used: {error.strerror}; "
            f"stop what listens there, or choose another with {other}"
        ) from error


def _is_the_host_s(error: OSError) -> bool:
    """Whether no port of that host could be had: its name leads nowhere (negative numbers), or not to this machine."""
    return (error.errno or 0) < 0 or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _reachable(host: str) -> str:
    """How this machine reaches what listens on `host`, as it stands in an address before the port."""
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1" if host == "0.0.0.0" else "[::1]"
    return f"[{host}]" if ":" in host else host
