"""Ports for processes that are told theirs, and come back on them: nobody else gets one meanwhile.

A free port that is asked of the kernel and given back is soon somebody else's: it takes ports for every connection from
the same range. So these lie outside that range, if there are any, and each is kept by a name that a process of tests
holds to its end.
"""

import atexit
import itertools
import os
import random
import socket
from pathlib import Path

FIRST, END = 10_000, 65_536
_kept: list[socket.socket] = []


@atexit.register
def _give_back() -> None:
    while _kept:
        _kept.pop().close()


def free_ports(count: int) -> list[int]:
    """Of this machine alone (127.0.0.1)."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    return list(itertools.islice(filter(_is_ours, _candidates(low, high)), count))


def _candidates(low: int, high: int) -> list[int]:
    """Those that the kernel takes, from `low` to `high`, come last."""
    chance = random.Random(os.getpid())
    ports = sorted(range(FIRST, END), key=lambda port: chance.random())
    return sorted(ports, key=lambda port: low <= port <= high)


def _is_ours(port: int) -> bool:
    """Whether it is from now on."""
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0thimble-test-port-{port}")  # an abstract one: it goes with the process
        with socket.create_server(("127.0.0.1", port)):
            pass
    except OSError:
        name.close()
        return False
    _kept.append(name)
    return True
