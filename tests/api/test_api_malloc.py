"""Freed pieces of snapshots go back to the system, wherever small blocks lie between them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIECES, PIECE_BYTES = 64, 1 << 20
PROGRAM = f"""
import ctypes, sys
from services.api import malloc

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

libc.mallinfo2.restype = Info
if sys.argv[1] == "told":
    malloc.give_back()
libc.free(libc.malloc(2 * {PIECE_BYTES}))
pieces = []
for _ in range({PIECES}):
    pieces.append(libc.malloc({PIECE_BYTES}))
    libc.malloc(50_000)  # stays
for piece in pieces:
    libc.free(piece)
print(libc.mallinfo2().fordblks)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another C library")
def test_nothing_is_kept_of_what_was_freed() -> None:
    def kept_bytes(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        return int(run.stdout)

    assert kept_bytes("told") < 2 * PIECE_BYTES
    assert kept_bytes("untold") > PIECES * PIECE_BYTES // 2, "it would not have been needed"
