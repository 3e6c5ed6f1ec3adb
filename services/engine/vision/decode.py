"""Encoded pictures to pixels: which formats, which limits, and what counts as the picture. A program of its own.

Decoders of picture formats are where hostile bytes do harm, so the engine never decodes: it runs this file in a process
with limits of memory and time (decoder.py) and takes what comes out. It imports nothing of ours, to start quickly.

    python -I decode.py sizes|pixels MEMORY_BYTES CPU_SECONDS
    stdin   for each picture its size as 8 bytes, little-endian, and its bytes
    stdout  a line of JSON for each, {"width", "height"} as it is shown or {"refused"}; for pixels, behind it width *
            height * 3 bytes, red, green and blue, row by row

What is seen: EXIF orientation applied, transparency on white, the high byte of 16 bits, the first frame, CMYK as a
plain conversion. Colour profiles are ignored.
"""

import io
import json
import resource
import sys
import warnings
from typing import BinaryIO

from PIL import Image, ImageChops

MOST_BYTES = 32 << 20
MOST_PIXELS = 64_000_000
MOST_SIDE = 16384
MOST_ASPECT = 1000
FORMATS = "PNG, JPEG, WebP or GIF"
_STRIP_PIXELS = 1 << 20
_READ = ((b"\x89PNG\r\n\x1a\n", "PNG"), (b"\xff\xd8\xff", "JPEG"), (b"GIF87a", "GIF"), (b"GIF89a", "GIF"))
_KNOWN = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"\0\0\1\0", "an icon"),
    (b"8BPS", "Photoshop"),
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"PK\3\4", "a ZIP archive"),
    (b"\x1f\x8b", "gzip"),
    (b"<?xml", "XML or SVG"),
    (b"<svg", "SVG"),
    (b"<", "HTML or XML"),
    (b"{", "JSON"),
)
_BRANDS = {b"heic": "HEIC", b"heix": "HEIC", b"hevc": "HEIC", b"mif1": "HEIF", b"avif": "AVIF", b"avis": "AVIF"}
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
Image.MAX_IMAGE_PIXELS = MOST_PIXELS  # where only Pillow gets to know how many there are: a warning, here an error


class Refused(Exception):
    """This is no picture that is read here. The message says why, for the client."""


def sniff(data: bytes) -> str:
    """The format by its first bytes, whatever anybody said it is. Raises Refused that names what was found."""
    for magic, name in _READ:
        if data.startswith(magic):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    if not data:
        raise Refused("it is empty")
    found = next((name for magic, name in _KNOWN if data.lstrip()[:16].startswith(magic)), None)
    if data[4:8] == b"ftyp":
        found = _BRANDS.get(data[8:12], "a video or another kind of MP4")
    if data[:4] == b"RIFF":
        found = "a RIFF file, but not WebP"
    raise Refused(f"it is {found or f'of an unknown kind, beginning with {data[:8].hex()}'}: send {FORMATS}")


def opened(data: bytes) -> Image.Image:
    """The picture, its header read and its sizes checked, nothing decoded. Raises Refused."""
    if len(data) > MOST_BYTES:
        raise Refused(f"it has {len(data)} bytes: at most {MOST_BYTES} are taken")
    kind = sniff(data)
    if kind == "WEBP":
        _check_size(*_webp_size(data))  # Pillow makes room for the whole picture as soon as it opens one
    if kind == "GIF" and len(data) >= 10:
        _check_size(*(int.from_bytes(data[at : at + 2], "little") for at in (6, 8)))
    try:
        image = Image.open(io.BytesIO(data), formats=[kind])
    except Exception as error:
        raise _damaged(kind, error) from error
    _check_size(*image.size)
    return image


def shown_size(image: Image.Image) -> tuple[int, int]:
    width, height = image.size
    return (height, width) if _orientation(image) >= 5 else (width, height)


def upright(image: Image.Image) -> Image.Image:
    """Decoded, and turned as it is shown; transparency and depth as they were. Raises Refused."""
    orientation = _orientation(image)
    try:
        image.load()
    except Exception as error:
        raise _damaged(image.format or "picture", error) from error
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def flat(image: Image.Image) -> Image.Image:
    """In RGB, on white."""
    clear = image.info.get("transparency")
    if image.mode.startswith("I"):
        return _high_bytes(image, clear).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or clear is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def _high_bytes(image: Image.Image, clear: object) -> Image.Image:
    """16 bits of grey: the upper eight, which is what other programs show."""
    if image.mode not in ("I;16", "I;16L", "I;16B", "I;16N"):
        image = image.convert("I;16")
    values = image.tobytes()
    big = image.mode == "I;16B" or (image.mode == "I;16N" and sys.byteorder == "big")
    high, low = (Image.frombytes("L", image.size, values[part::2]) for part in ((0, 1) if big else (1, 0)))
    if not isinstance(clear, int):
        return high
    parts = ((high, clear >> 8), (low, clear & 255))
    same = [ImageChops.difference(part, Image.new("L", part.size, value)) for part, value in parts]
    differs = ImageChops.lighter(*same).point([0] + [255] * 255)
    return Image.composite(high, Image.new("L", high.size, 255), differs)


def _check_size(width: int, height: int) -> None:
    if min(width, height) < 1:
        raise Refused(f"it has {width} x {height} pixels: there is nothing to see")
    if max(width, height) > MOST_SIDE or width * height > MOST_PIXELS:
        raise Refused(
            f"it has {width} x {height} pixels: at most {MOST_SIDE} a side and {MOST_PIXELS // 1_000_000} million in "
            "all are taken, make it smaller"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise Refused(f"it has {width} x {height} pixels: one side may be at most {MOST_ASPECT} times the other")


def _webp_size(data: bytes) -> tuple[int, int]:
    kind, body = data[12:16], data[20:]
    if kind == b"VP8X" and len(body) >= 10:
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and len(body) >= 5:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and len(body) >= 10:
        return tuple(int.from_bytes(body[at : at + 2], "little") & 0x3FFF for at in (6, 8))  # type: ignore[return-value]
    raise Refused("it is a damaged WebP file: send it again")


def _orientation(image: Image.Image) -> int:
    """1 where nothing sensible is said: a broken note is no reason to refuse a picture."""
    try:
        said = image.getexif().get(_ORIENTATION, 1)
    except Exception:
        return 1
    return said if said in _TURNS else 1


def _damaged(kind: str, error: Exception) -> Refused:
    if isinstance(error, Image.DecompressionBombError | Image.DecompressionBombWarning):
        return Refused(f"it is a {kind} file of more than {MOST_PIXELS // 1_000_000} million pixels: make it smaller")
    if isinstance(error, MemoryError):
        return Refused(f"it is a {kind} file that takes more memory than a picture may")
    return Refused(f"it is a damaged or incomplete {kind} file ({str(error)[:200] or type(error).__name__})")


def _answer(data: bytes, wanted: str, out: BinaryIO) -> None:
    try:
        image = opened(data)
        if wanted == "pixels":
            image = upright(image)
            width, height = image.size
        else:
            width, height = shown_size(image)
    except Refused as refusal:
        out.write(json.dumps({"refused": str(refusal)}).encode() + b"\n")
        return
    out.write(json.dumps({"width": width, "height": height}).encode() + b"\n")
    if wanted == "pixels":
        rows = max(1, _STRIP_PIXELS // width)
        for top in range(0, height, rows):  # a strip at a time: whole copies of a large picture would be many
            strip = image.crop((0, top, width, min(height, top + rows)))
            strip.info = image.info
            out.write(flat(strip).tobytes())


def main() -> int:
    wanted, memory_bytes, cpu_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (limit, limit))
    warnings.simplefilter("error")
    source, out = sys.stdin.buffer, sys.stdout.buffer
    while size := source.read(8):
        _answer(source.read(int.from_bytes(size, "little")), wanted, out)
    out.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
