"""The decoder as a process: the same pixels, and whatever is sent, an answer within its limits."""

import asyncio
import struct
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from drawn import corners, encoded, with_orientation
from PIL import Image
from test_decode import _header_only, seen

from services.engine.errors import PictureError
from services.engine.vision import decoder
from services.engine.vision.decoder import Decoder


def pixels(data: bytes, **limits: float) -> tuple[int, int, bytes]:
    async def ask() -> tuple[int, int, bytes]:
        width, height, found = await Decoder(**limits).pixels(data)  # type: ignore[arg-type]
        return width, height, bytes(found)

    return asyncio.run(ask())


def sizes(*pictures: bytes) -> Sequence[tuple[int, int]]:
    async def ask() -> Sequence[tuple[int, int]]:
        return await Decoder().sizes(pictures)

    return asyncio.run(ask())


def test_pixels_and_sizes() -> None:
    turned = with_orientation(6)
    assert sizes(encoded(corners()), turned) == [(64, 32), (64, 32)]
    width, height, found = pixels(turned)
    assert (width, height) == (64, 32)
    assert found == seen(turned).tobytes()


def test_a_picture_of_many_strips() -> None:
    image = Image.effect_noise((3000, 1100), 80).convert("RGB")
    assert pixels(encoded(image, "PNG", compress_level=1)) == (3000, 1100, image.tobytes())


def test_what_is_refused_says_why() -> None:
    with pytest.raises(PictureError, match=r"it is a damaged or incomplete JPEG file"):
        pixels(encoded(corners(), "JPEG")[:200])
    with pytest.raises(PictureError, match="HEIC"):
        sizes(encoded(corners()), b"\0\0\0\x18ftypheic")
    with pytest.raises(PictureError, match="million"):
        sizes(_header_only(9000, 9000)["WEBP"])


def _bomb(width: int, height: int, exif: bytes = b"", level: int = 9) -> bytes:
    """A small file whose picture is large: a megabyte of zeros is a kilobyte."""
    squeezer = zlib.compressobj(level)
    data = b"".join(squeezer.compress(bytes(1 + 4 * width)) for _ in range(height)) + squeezer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    parts = ((b"IHDR", head), (b"eXIf", exif), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def test_too_much_memory_and_too_much_time_end_in_a_refusal() -> None:
    bomb = _bomb(4000, 4000)
    assert len(bomb) < 100_000
    with pytest.raises(PictureError, match="memory"):
        pixels(bomb, memory_bytes=60 << 20)
    with pytest.raises(PictureError, match="time"):
        pixels(bomb, wall_s=0.001)
    assert pixels(bomb)[:2] == (4000, 4000), "the control: within its limits it is decoded"


def test_a_decoder_that_spins_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "spin.py"
    program.write_text(
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[3]),) * 2)\nwhile True: pass\n"
    )
    monkeypatch.setattr(decoder, "PROGRAM", program)
    began = time.monotonic()
    with pytest.raises(PictureError, match="time"):
        pixels(b"x", cpu_s=1)
    assert time.monotonic() - began < 20


def test_the_largest_picture_fits_the_limits() -> None:
    """64 million pixels with transparency, turned on their side."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = _bomb(8000, 7999, exif.tobytes().removeprefix(b"Exif\0\0"), level=1)
    assert pixels(data)[:2] == (7999, 8000)
