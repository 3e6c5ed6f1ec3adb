"""`thimble ballast --free-mib N`: a process that holds a card's memory, so that only N MiB are free for another one.

An H200 with ballast is, for memory, a small card: the other process's CUDA context, kernels and graphs come out of the
N MiB as they would there. Meanwhile this process samples what is free, by the driver's own count, so that a peak is
seen from outside. `Ballast` is the other end, for benchmarks: start it before the first use of CUDA.

Through stdin and stdout: "ready FREE_BYTES" when all is held; a line "peak" is answered "peak BYTES", the most that was
taken of those free bytes since the last such line; end of input ends it. Needs the driver, neither torch nor a toolkit.
"""

import argparse
import ctypes
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, TextIO

from services.tools.amounts import count

MIB = 1 << 20
PAGE_BYTES = 2 * MIB  # what drivers allocate by
CLOSE_ENOUGH_BYTES = 8 * MIB
SAMPLE_S = 0.005
START_S = 60.0
ROOT = Path(__file__).parents[2]


class BallastError(RuntimeError):
    """The memory cannot be held, or the process that should hold it is gone. The message says why."""

    code: ClassVar[str] = "ballast"


class Driver:
    """The first visible device, in a context of this process, through libcuda."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BallastError("ballast needs a CUDA driver: libcuda.so.1 was not found") from error
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._context = context

    def enter(self) -> None:
        """In another thread, before its first call."""
        self._call("cuCtxSetCurrent", self._context)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def take(self, size_bytes: int) -> bool:
        """Until this process ends; False if the driver has no such piece."""
        address = ctypes.c_uint64()
        return not self._cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size_bytes))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            raise BallastError(f"{name} failed with CUDA error {status}: is there a device, and is it free?")


def fill(driver: Driver, free_bytes: int) -> int:
    """Hold all but `free_bytes`; what is then free, at most CLOSE_ENOUGH_BYTES away. Raises BallastError."""
    piece = driver.free_bytes()
    if piece < free_bytes:
        raise BallastError(
            f"{piece / MIB:.0f} MiB are free on this card, fewer than the {free_bytes / MIB:.0f} asked for"
        )
    while (left := driver.free_bytes() - free_bytes) >= PAGE_BYTES and piece >= PAGE_BYTES:
        piece = min(piece, left) // PAGE_BYTES * PAGE_BYTES
        if not driver.take(piece):
            piece //= 2
    found = driver.free_bytes()
    if abs(found - free_bytes) > CLOSE_ENOUGH_BYTES:
        raise BallastError(
            f"{found / MIB:.0f} MiB are free instead of {free_bytes / MIB:.0f}: other processes use the card"
        )
    return found


def serve(driver: Driver, free_bytes: int, commands: TextIO, answers: TextIO) -> None:
    """Fill, say so, then sample and answer until `commands` ends."""
    free = fill(driver, free_bytes)
    lowest = [free]
    done, lock = threading.Event(), threading.Lock()

    def sample() -> None:
        driver.enter()
        while not done.wait(SAMPLE_S):
            with lock:  # from the look on: a look of before an answer must not count for the next one
                lowest[0] = min(lowest[0], driver.free_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    print(f"ready {free}", file=answers, flush=True)
    for line in commands:
        if line.strip() == "peak":
            with lock:
                now = driver.free_bytes()
                peak = free - min(lowest[0], now)
                lowest[0] = now
            print(f"peak {peak}", file=answers, flush=True)
    done.set()
    thread.join()


class Ballast:
    """The process that holds, from here: a context manager. `free_bytes`: what was left, our context not yet taken."""

    def __init__(self, free_mib: int) -> None:
        command = [sys.executable, "-m", "services.tools.cli", "ballast", "--free-mib", str(free_mib)]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            self.free_bytes = self._number("ready")
        except BaseException:
            self.close()
            raise

    def peak_bytes(self) -> int:
        """The most that was taken since the last call, by everyone but the ballast."""
        assert self._process.stdin
        try:
            self._process.stdin.write("peak\n")
            self._process.stdin.flush()
        except OSError as error:
            raise BallastError(f"the ballast is gone: status {self._process.poll()}") from error
        return self._number("peak")

    def close(self) -> None:
        """Gives the memory back; a second call does nothing."""
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream:
                with suppress(OSError):  # of a process that died before it read all
                    stream.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "Ballast":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _number(self, word: str) -> int:
        assert self._process.stdout
        assert self._process.stderr
        line = self._process.stdout.readline()
        if not line.startswith(word):
            raise BallastError(f"the ballast did not answer: {line or self._process.stderr.read().strip()}")
        return int(line.split()[1])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--free-mib", type=count, required=True, help="what is left free, in MiB (8 GB card: 8151)")


def run(args: argparse.Namespace) -> int:
    serve(Driver(), args.free_mib * MIB, sys.stdin, sys.stdout)
    return 0
