"""Pictures for tests, encoded: a field of four colours, so that it shows which way it is turned."""

import io
from typing import Any

from PIL import Image

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def corners(width: int = 64, height: int = 32) -> Image.Image:
    """Red, green above; blue, white below."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(GREEN, (width // 2, 0, width, height // 2))
    image.paste(BLUE, (0, height // 2, width // 2, height))
    image.paste(WHITE, (width // 2, height // 2, width, height))
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_orientation(orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    """The corners, stored so that a viewer who heeds the note shows them upright."""
    back = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # the transpose that undoes what the note asks for
    image = corners()
    if orientation in back:
        image = image.transpose(Image.Transpose(back[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image, kind, exif=exif, **options)
