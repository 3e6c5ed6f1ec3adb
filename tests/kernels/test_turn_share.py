"""How many of a layer's experts the GPU takes, found from who waits for whom: a GPU that is played here."""

import ctypes
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch

from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers
from tests.kernels.test_vram_slots import EXPERTS, LAYERS, TOP_K, Played, blocks  # noqa: F401

TURNS, WAITED_NS = 40, 10**9  # a second: much longer than the host took


@pytest.fixture
def host(blocks) -> Iterator[Host]:  # type: ignore[no-untyped-def]  # noqa: F811
    opened = Host(blocks.catalog(), Workers(1), slots=TOP_K, readers=2)
    yield opened
    opened.check()
    opened.close()


def share_after(host: Host, initial: float, names: Sequence[torch.Tensor], waited_ns: int) -> float:
    """Of turns that name these experts of the first layer, one after the other, after each of which the GPU waited."""
    played = Played(host, 1, None)
    played.lib.thimble_turns_share(played.handle, ctypes.c_int(-1), ctypes.c_double(initial))
    message = ctypes.create_string_buffer(500)
    served: list[int] = []

    def serve() -> None:
        timeout_us = ctypes.c_int64(10_000_000)
        served.append(played.lib.thimble_turns_serve(played.handle, len(names), timeout_us, message, 500))

    thread = threading.Thread(target=serve)
    thread.start()
    for turn, ids in enumerate(names, 1):
        played.ids[:TOP_K], played.ids[-1] = ids, 0
        played.ids[TOP_K:-1] = -1  # no guesses
        played.waited[0] = waited_ns
        played.flags[0, 0] = turn
        until = time.monotonic() + 10
        while played.flags[2, 0] != turn and time.monotonic() < until:
            time.sleep(0)
    thread.join()
    assert served == [len(names)], message.value
    words = played.lib.thimble_turns_time_names
    words.restype = ctypes.c_char_p
    fields = words().decode().split()
    values = (ctypes.c_int64 * len(fields))()
    played.lib.thimble_turns_times(played.handle, values)
    played.retire()
    played.close()
    return values[fields.index("share_thousandths")] / 1000


def same(turns: int) -> list[torch.Tensor]:
    return [torch.arange(TOP_K, dtype=torch.int32)] * turns


def others(turns: int) -> list[torch.Tensor]:
    """Experts that the few slots no longer hold when they are named again."""
    return [(torch.arange(TOP_K, dtype=torch.int32) + TOP_K * turn) % EXPERTS for turn in range(turns)]


def test_a_gpu_that_waits_is_given_more(host: Host) -> None:
    share_after(host, 0, same(1), 0)  # in RAM from now on
    assert share_after(host, 1, same(TURNS), WAITED_NS) > 1.5


def test_a_gpu_that_took_all_gives_some_back(host: Host) -> None:
    """After a start with an empty cache it once kept all for ever, and a token took nearly twice as long."""
    share_after(host, 0, same(1), 0)
    assert share_after(host, TOP_K, same(TURNS), 0) < TOP_K - 1


def test_a_wait_for_the_disk_says_nothing(host: Host) -> None:
    before = host.counters()["misses"]
    assert share_after(host, 1, others(TURNS), WAITED_NS) == 1
    assert host.counters()["misses"] - before >= TURNS
