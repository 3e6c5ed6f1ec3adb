"""Runs decode.py in a process for each picture, and ends it when it takes too much. Owns limits, not formats.

The engine's own process never runs a decoder of pictures. One decoder runs at a time; what it may use of memory and
time is fixed, whatever the picture says of itself.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from services.engine.errors import PictureError

PROGRAM = Path(__file__).with_name("decode.py")
MEMORY_BYTES = 1200 << 20  # the largest picture takes 600 MB, beside 200 MB of address space for Python
CPU_S = 30
WALL_S = 60.0


class Decoder:
    """For one event loop. Limits are arguments so that tests can reach them."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, cpu_s: int = CPU_S, wall_s: float = WALL_S) -> None:
        self._limits = (str(memory_bytes), str(cpu_s))
        self._wall_s = wall_s
        self._turn = asyncio.Semaphore(1)

    async def sizes(self, pictures: Sequence[bytes]) -> list[tuple[int, int]]:
        """Width and height as they are shown; nothing is decoded. Raises PictureError for the first that is refused."""
        out = await self._run("sizes", pictures)
        lines = out.splitlines()
        if len(lines) != len(pictures):
            raise PictureError("a picture could not be looked at: its decoder ended without an answer")
        return [_size(line) for line in lines]

    async def pixels(self, picture: bytes) -> tuple[int, int, memoryview]:
        """Width, height and RGB bytes, row by row. Raises PictureError."""
        out = memoryview(await self._run("pixels", [picture]))
        end = bytes(out[:4096]).find(b"\n")
        width, height = _size(bytes(out[: max(end, 0)]))
        pixels = out[end + 1 :]
        if len(pixels) != 3 * width * height:
            raise PictureError("a picture could not be decoded: it takes more memory or time than a picture may")
        return width, height, pixels

    async def _run(self, wanted: str, pictures: Sequence[bytes]) -> bytes:
        async with self._turn:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", str(PROGRAM), wanted, *self._limits),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env={},
            )
            data = b"".join(part for picture in pictures for part in (len(picture).to_bytes(8, "little"), picture))
            try:
                async with asyncio.timeout(self._wall_s):
                    out, _ = await process.communicate(data)
            except TimeoutError:
                raise PictureError("a picture could not be decoded: it takes more time than a picture may") from None
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            return out


def _size(line: bytes) -> tuple[int, int]:
    try:
        said = json.loads(line)
        if "refused" not in said:
            return int(said["width"]), int(said["height"])
    except (ValueError, KeyError, TypeError) as error:
        message = "a picture could not be decoded: it takes more memory or time than a picture may"
        raise PictureError(message) from error
    raise PictureError(f"a picture cannot be read: {said['refused']}")
