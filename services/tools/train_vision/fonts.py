"""Fonts that are there: Pillow's own always, matplotlib's if it is installed, a system's DejaVu and Liberation.

None is shipped. Those held out are never taught with; where only Pillow's is, it is in both.
"""

import importlib.util
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

OWN = ""  # Pillow's
_TAUGHT = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSerif",
    "DejaVuSans-Oblique",
    "DejaVuSansMono-Bold",
)
_HELD_OUT = ("STIXGeneral", "DejaVuSerif-Bold", "LiberationSans-Regular", "LiberationMono-Regular")
_SYSTEM = (Path("/usr/share/fonts/truetype/liberation"), Path("/usr/share/fonts/truetype/dejavu"))

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache
def names(held_out: bool) -> tuple[str, ...]:
    """Paths of the fonts there are, and OWN."""
    spec = importlib.util.find_spec("matplotlib")
    folders = [*_SYSTEM]
    if spec is not None and spec.origin:
        folders.insert(0, Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf")
    wanted = _HELD_OUT if held_out else _TAUGHT
    found = {name: str(f / f"{name}.ttf") for f in reversed(folders) for name in wanted if (f / f"{name}.ttf").exists()}
    own = () if held_out and found else (OWN,) * (1 if held_out else 2)
    return (*own, *(found[name] for name in wanted if name in found))


@lru_cache(maxsize=1024)
def font(name: str, size: int) -> Font:
    return ImageFont.truetype(name, size) if name else ImageFont.load_default(size)
