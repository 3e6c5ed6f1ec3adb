"""What is taken for a picture, and what of it is seen: formats, orientation, transparency, depth, and the limits."""

import io
import struct
import zlib

import pytest
from drawn import BLUE, GREEN, RED, WHITE, corners, encoded, with_orientation
from PIL import Image

from services.engine.vision import decode
from services.engine.vision.decode import Refused


def seen(data: bytes) -> Image.Image:
    """As the language model's side gets it."""
    image = decode.upright(decode.opened(data))
    info, image = image.info, image
    image.info = info
    return decode.flat(image)


def close(found: tuple[int, ...], wanted: tuple[int, ...], within: int = 8) -> bool:
    return len(found) == len(wanted) and all(abs(a - b) <= within for a, b in zip(found, wanted, strict=True))


def shows_corners(image: Image.Image, within: int = 8) -> bool:
    width, height = image.size
    places = ((4, 4, RED), (width - 5, 4, GREEN), (4, height - 5, BLUE), (width - 5, height - 5, WHITE))
    return all(close(image.getpixel((x, y)), colour, within) for x, y, colour in places)


@pytest.mark.parametrize(
    "data",
    [
        encoded(corners()),
        encoded(corners(), "PNG", interlace=1),
        encoded(corners(), "JPEG", quality=95, subsampling=0),
        encoded(corners(), "JPEG", quality=95, subsampling=0, progressive=True),
        encoded(corners(), "WEBP", lossless=True),
        encoded(corners(), "WEBP", quality=95),
        encoded(corners(), "GIF"),
        encoded(corners().quantize(4), "PNG"),
    ],
    ids=["png", "interlaced", "jpeg", "progressive", "webp", "lossy-webp", "gif", "palette"],
)
def test_formats(data: bytes) -> None:
    image = seen(data)
    assert image.mode == "RGB"
    assert image.size == (64, 32)
    assert shows_corners(image, 24)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_applied(orientation: int, kind: str) -> None:
    data = with_orientation(orientation, kind, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    stored = Image.open(io.BytesIO(data))
    assert decode.shown_size(decode.opened(data)) == (64, 32)
    assert stored.size == ((32, 64) if orientation >= 5 else (64, 32))
    assert shows_corners(seen(data), 40)
    assert shows_corners(stored.convert("RGB"), 40) == (orientation == 1), "the control"


def test_an_orientation_that_is_none_is_left_out_of_account() -> None:
    exif = Image.Exif()
    exif[0x0112] = 77
    assert shows_corners(seen(encoded(corners(), "PNG", exif=exif)))


def test_transparency_is_white() -> None:
    for mode, clear in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0))):
        assert seen(encoded(Image.new(mode, (8, 8), clear))).getpixel((4, 4)) == (255, 255, 255)
    half = seen(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 128)))).getpixel((4, 4))
    assert close(half, (127, 127, 127), 1)
    for kind in ("WEBP", "GIF"):
        assert close(seen(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)), kind)).getpixel((4, 4)), WHITE)


def test_a_colour_that_stands_for_transparent_is_white() -> None:
    palette = corners().quantize(4)
    red = palette.getpixel((4, 4))
    image = seen(encoded(palette, "PNG", transparency=red))
    assert image.getpixel((4, 4)) == WHITE
    assert image.getpixel((4, 28)) == BLUE
    grey = Image.new("L", (8, 8), 7)
    assert seen(encoded(grey, "PNG", transparency=7)).getpixel((0, 0)) == WHITE
    assert seen(encoded(grey, "PNG", transparency=8)).getpixel((0, 0)) == (7, 7, 7)
    assert seen(encoded(corners(), "PNG", transparency=RED)).getpixel((4, 4)) == WHITE


def test_sixteen_bits_of_grey_are_not_clipped() -> None:
    grey = Image.new("I;16", (8, 8), 0x4080)
    assert seen(encoded(grey)).getpixel((0, 0)) == (0x40, 0x40, 0x40)
    assert grey.convert("RGB").getpixel((0, 0)) != (0x40, 0x40, 0x40), "the control: Pillow's own conversion"


def _png(width: int, height: int, depth: int, colour: int, rows: bytes, *chunks: tuple[bytes, bytes]) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *chunks, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )


def test_sixteen_bits_of_colour_and_of_grey_with_a_transparent_value() -> None:
    colour = _png(1, 1, 16, 2, b"\0" + struct.pack(">HHH", 0x40FF, 0x80FF, 0xC0FF))
    assert seen(colour).getpixel((0, 0)) == (0x40, 0x80, 0xC0)
    grey = _png(2, 1, 16, 0, b"\0" + struct.pack(">HH", 0x4080, 0x4081), (b"tRNS", struct.pack(">H", 0x4080)))
    assert [seen(grey).getpixel((x, 0)) for x in (0, 1)] == [WHITE, (0x40, 0x40, 0x40)]


def test_cmyk() -> None:
    """As Adobe's programs write it, inverted: what else is read as green would come out otherwise."""
    image = seen(encoded(corners().convert("CMYK"), "JPEG", quality=95))
    assert shows_corners(image, 40)


def test_the_first_frame_is_seen() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in (RED, GREEN, BLUE)]
    for kind, options in (("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {})):
        data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], duration=50, **options)
        assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
        assert close(seen(data).getpixel((8, 8)), RED)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "empty"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIC"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "MP4"),
        (encoded(corners(), "TIFF"), "TIFF"),
        (encoded(corners(), "BMP"), "BMP"),
        (b"%PDF-1.7", "PDF"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"  <?xml version='1.0'?><svg/>", "SVG"),
        (b"<!DOCTYPE html>", "HTML"),
        (b"RIFF\x10\0\0\0WAVEfmt ", "RIFF file, but not WebP"),
        (b"\xff\x0a1234", "JPEG XL"),
        (b"hello, I am text", "beginning with 68656c6c6f2c2049"),
    ],
)
def test_everything_else_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(Refused, match=named):
        decode.opened(data)


def test_a_wrong_extension_does_not_matter() -> None:
    """The bytes decide: what a client says of them is not even asked."""
    assert decode.sniff(encoded(corners(), "WEBP")) == "WEBP"
    assert decode.sniff(encoded(corners(), "JPEG")) == "JPEG"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.95])
def test_an_incomplete_file_is_refused(kind: str, share: float) -> None:
    noise = Image.effect_noise((200, 200), 90).convert("RGB")
    data = encoded(noise, kind)
    with pytest.raises(Refused, match=rf"damaged|incomplete|empty|{kind}"):
        decode.flat(decode.upright(decode.opened(data[: int(len(data) * share)])))


def _header_only(width: int, height: int) -> dict[str, bytes]:
    """Files that say they are of that size and hold next to nothing."""
    jpeg = bytearray(encoded(Image.new("RGB", (16, 16)), "JPEG"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", min(height, 65535), min(width, 65535))
    gif = b"GIF89a" + struct.pack("<HH", min(width, 65535), min(height, 65535)) + b"\0\0\0;"
    webp = b"VP8X" + struct.pack("<I", 10) + b"\0\0\0\0" + (width - 1).to_bytes(3, "little")
    webp += (height - 1).to_bytes(3, "little")
    return {
        "PNG": _png(width, height, 8, 2, b"\0"),
        "JPEG": bytes(jpeg),
        "GIF": gif,
        "WEBP": b"RIFF" + struct.pack("<I", 4 + len(webp)) + b"WEBP" + webp,
    }


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP"])
def test_sizes_are_checked_before_anything_is_decoded(kind: str) -> None:
    for size, message in (
        ((12000, 12000), "million"),
        ((16385, 20), "16384"),
        ((1, 1001), "1000 times"),
    ):
        with pytest.raises(Refused, match=message):
            decode.opened(_header_only(*size)[kind])
    with pytest.raises(Refused, match="at most 33554432"):
        decode.opened(_header_only(10, 10)[kind] + bytes(decode.MOST_BYTES))


def test_extreme_sizes_that_are_allowed() -> None:
    for size in ((1, 1), (1, 1000), (10000, 10), (3, 2)):
        assert decode.opened(encoded(Image.new("RGB", size))).size == size
        assert seen(encoded(Image.new("RGB", size, RED))).size == size
