"""Ports that tests give to processes are nobody else's: not the kernel's to give away, not another test process's."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ports
import pytest
from ports import free_ports

ASK = "from ports import free_ports; import sys; print(*free_ports(30), flush=True); sys.stdin.read()"


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    before = len(ports._kept)
    yield
    for name in ports._kept[before:]:
        name.close()
    del ports._kept[before:]


def test_the_kernel_gives_them_to_no_connection() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = free_ports(20)
    assert len(set(found)) == 20
    assert not any(low <= port <= high for port in found)
    with socket.create_server(("127.0.0.1", 0)) as asked:
        assert low <= asked.getsockname()[1] <= high, "the control"


def test_where_the_kernel_takes_all_of_them_there_are_some_too() -> None:
    assert len(set(ports._candidates(1024, 65_535))) == ports.END - ports.FIRST
    first = ports._candidates(20_000, 60_000)[:100]
    assert not any(20_000 <= port <= 60_000 for port in first)


def test_no_other_process_gets_them_as_long_as_this_one_lives() -> None:
    path = os.pathsep.join((str(Path(ports.__file__).parent), *sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = set(map(int, other.stdout.readline().split()))
        assert len(theirs) == 30
        assert not theirs & set(free_ports(30))
        assert not any(map(ports._is_ours, theirs)), "though nobody listens there"
        other.communicate("")
    assert any(map(ports._is_ours, theirs)), "the control"


def test_one_that_is_in_use_is_passed_over() -> None:
    [port] = free_ports(1)
    ports._kept.pop().close()
    with socket.create_server(("127.0.0.1", port)):
        assert not ports._is_ours(port)
    assert ports._is_ours(port), "the control"
