"""A wall clock that jumps, a disk that is slow or full, for processes that are told so in their environment. Owns the
file through which they hear of it while they run; trouble.cpp does it."""

import mmap
import struct
import subprocess
from pathlib import Path

from kernels.build import compiler

SOURCE = Path(__file__).with_name("trouble.cpp")


class Trouble:
    """`environ` is for those that shall have it. Nothing is the matter until a method says so."""

    def __init__(self, folder: Path) -> None:
        library, told = folder / "trouble.so", folder / "trouble"
        path, _ = compiler()
        command = [path, "-std=c++17", "-O1", "-fPIC", "-shared", "-o", str(library), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        told.write_bytes(bytes(mmap.PAGESIZE))
        with told.open("r+b") as file:
            self._told = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.environ = {"LD_PRELOAD": str(library), "TROUBLE_FILE": str(told)}

    def clock_ahead(self, seconds: int) -> None:
        """From now on the wall clock is so far ahead of the true one; negative: behind."""
        self._told[0:8] = struct.pack("=q", seconds)

    def slow_disk(self, read_us: int) -> None:
        """From now on every read at an offset of a file takes so much longer."""
        self._told[8:16] = struct.pack("=q", read_us)

    def full_disk(self, full: bool, after_bytes: int = 0) -> None:
        """From now on no file takes a byte more, or all do again. `after_bytes`: once a process has written so many."""
        self._told[16:24] = struct.pack("=q", full and max(1, after_bytes))
