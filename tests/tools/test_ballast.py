"""Ballast, as a real process, on a driver of a few lines of C++ that counts as the real one does."""

import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path
from queue import Queue

import pytest
from timing import in_time

from services.tools import ballast
from services.tools.ballast import MIB, Ballast, BallastError

DRIVER = r"""
#include <cstdint>
#include <cstdio>
#include <cstdlib>
// Free memory: what a file says, less what this process took. Pieces above CARD_LARGEST are refused.
static uint64_t taken;
static uint64_t number(const char* name) { return strtoull(getenv(name), nullptr, 10); }
static uint64_t in_file() {
  FILE* file = fopen(getenv("CARD_FREE"), "r");
  unsigned long long bytes = 0;
  if (!file || fscanf(file, "%llu", &bytes) != 1) abort();
  fclose(file);
  return bytes;
}
// Before anything is looked up: a byte for each time that somebody asks what is free.
static void note_call() {
  FILE* file = fopen(getenv("CARD_CALLS"), "a");
  if (!file || fputc('.', file) == EOF || fclose(file)) abort();
}
extern "C" {
int cuInit(unsigned) { return getenv("CARD_BROKEN") ? 100 : 0; }
int cuDeviceGet(int* device, int) { *device = 0; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int) { *context = &taken; return 0; }
int cuCtxSetCurrent(void* context) { return context == &taken ? 0 : 201; }
int cuMemGetInfo_v2(size_t* free, size_t* total) {
  note_call();
  *free = in_file() - taken;
  *total = in_file();
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  if (bytes > number("CARD_LARGEST") || bytes > in_file() - taken) return 2;
  taken += bytes;
  *address = 4096;
  return 0;
}
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.cpp").write_text(DRIVER)
    command = ["g++", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.cpp")]
    subprocess.run(command, check=True)
    return folder


@pytest.fixture
def card(driver: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that says how much is free on a card of 143,000 MiB."""
    free = tmp_path / "free"
    free.write_text(str(143_000 * MIB))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(driver))
    monkeypatch.setenv("CARD_FREE", str(free))
    monkeypatch.setenv("CARD_CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("CARD_LARGEST", str(1 << 60))
    return free


def use(card: Path, mib: int) -> None:
    """As if another process held so much now."""
    part = card.with_suffix(".part")
    part.write_text(str((143_000 - mib) * MIB))
    part.replace(card)


def sampled(card: Path) -> bool:
    """Whether what is used now is in the ballast's samples. It takes one after the other: the one under way may have
    looked before, the next one has not, and when a third begins that one is noted."""
    calls = card.with_name("calls")
    before = calls.stat().st_size
    return in_time(lambda: calls.stat().st_size >= before + 2)


@pytest.mark.parametrize("largest_mib", [1 << 40, 50_000, 777])
def test_so_much_is_left_free(card: Path, monkeypatch: pytest.MonkeyPatch, largest_mib: int) -> None:
    """Also where the driver gives large pieces only in parts."""
    monkeypatch.setenv("CARD_LARGEST", str(largest_mib * MIB))
    with Ballast(8151) as held:
        assert abs(held.free_bytes - 8151 * MIB) <= ballast.PAGE_BYTES


def test_the_peak_is_seen_from_outside(card: Path) -> None:
    with Ballast(8151) as held:
        assert held.peak_bytes() == 0
        use(card, 7000)
        assert sampled(card)
        use(card, 100)
        assert held.peak_bytes() == 7000 * MIB
        assert held.peak_bytes() == 100 * MIB, "each answer begins anew"


class Held:
    """A driver whose first look at 700 MiB that are used is held up on its way to the sampling thread."""

    def __init__(self) -> None:
        self.used = self.sampling = 0
        self.looked, self.go_on = threading.Event(), threading.Event()

    def enter(self) -> None:
        self.sampling = threading.get_ident()

    def free_bytes(self) -> int:
        free = 1000 * MIB - self.used
        if self.used and threading.get_ident() == self.sampling and not self.looked.is_set():
            self.looked.set()
            assert self.go_on.wait(20)
        return free


def test_a_sample_that_was_held_up_does_not_count_twice() -> None:
    driver, commands, answers = Held(), Queue[str](), StringIO()
    arguments = (driver, 1000 * MIB, iter(commands.get, "end"), answers)
    serving = threading.Thread(target=ballast.serve, args=arguments, daemon=True)
    serving.start()
    assert in_time(lambda: "ready" in answers.getvalue())
    driver.used = 700 * MIB
    assert driver.looked.wait(20)
    driver.used = 100 * MIB
    commands.put("peak")
    in_time(lambda: "peak" in answers.getvalue(), 0.3)  # it may wait for the sample, or answer without it
    driver.go_on.set()
    assert in_time(lambda: "peak" in answers.getvalue())
    commands.put("peak")
    commands.put("end")
    serving.join()
    assert answers.getvalue().splitlines()[1:] == [f"peak {700 * MIB}", f"peak {100 * MIB}"]


def test_more_than_there_is(card: Path) -> None:
    with pytest.raises(BallastError, match="143000 MiB are free on this card, fewer than the 150000 asked for"):
        Ballast(150_000)


def test_a_device_that_does_not_work(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARD_BROKEN", "1")
    with pytest.raises(BallastError, match="cuInit failed with CUDA error 100"):
        Ballast(8151)


def test_memory_that_cannot_be_had_in_whole(card: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARD_LARGEST", str(MIB))  # below the driver's page: nothing can be held
    with pytest.raises(BallastError, match="143000 MiB are free instead of 8151"):
        Ballast(8151)


def test_a_ballast_that_died(card: Path) -> None:
    with Ballast(8151) as held:
        held._process.kill()
        held._process.wait()
        with pytest.raises(BallastError):
            held.peak_bytes()


def test_it_ends_with_its_input(card: Path) -> None:
    held = Ballast(8151)
    held.close()
    assert held._process.returncode == 0
    held.close()


def test_a_machine_without_a_driver(tmp_path: Path) -> None:
    """In a process of its own, since a library once loaded stays."""
    code = "from services.tools.cli import main; import sys; sys.exit(main(['ballast', '--free-mib', '1']))"
    environment = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ballast.ROOT, env=environment, capture_output=True, text=True
    )
    if "libcuda" not in done.stderr:
        pytest.skip("this machine has a driver")
    assert done.returncode == 1
    assert "needs a CUDA driver: libcuda.so.1 was not found" in done.stderr
