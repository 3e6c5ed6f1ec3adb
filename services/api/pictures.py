"""Pictures in a dialog as clients write them: the parts of a message, and the bytes behind them. Owns how a picture is
carried inside a message's text until it is rendered; what a picture may be is decided by the engine.

A content is one string everywhere in the api. A picture's part becomes a note in it, between two code points that no
client's text can hold: half of a surrogate pair is refused before anything else looks at a request. `take` turns the
notes into pictures and leaves one such code point in the place of each. So a picture keeps its place among the words
through everything that is done with contents, and nothing that a client writes can pass for one.
"""

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import unquote

from pydantic_core import PydanticCustomError

from services.api.errors import InvalidRequest, Unsupported

OPEN, PLACE = "\udffe", "\udfff"
KINDS = ("image_url", "input_image", "image")
MOST_BYTES = 32 << 20
DETAILS: dict[Any, str] = {None: "auto", "auto": "auto", "low": "low", "high": "high", "original": "high"}

_NOTE = re.compile(f"{OPEN}([a-z]+):([^{OPEN}{PLACE}]*){PLACE}")
_NOT_BASE64 = re.compile(rb"[^A-Za-z0-9+/]")

Detail = Literal["auto", "low", "high"]


@dataclass(frozen=True)
class Picture:
    """`url` is what the client wrote: data: with the bytes, or http: and https:."""

    url: str
    detail: Detail


def note(part: Mapping[str, Any]) -> str:
    """The part of a content that is a picture, as a note in its text. Raises PydanticCustomError if it is not whole.

    OpenAI's two ways and Anthropic's; a bare string for `image_url` too.
    """
    source = part.get("image_url") if part.get("type") != "image" else part.get("source")
    detail = part.get("detail")
    if isinstance(source, dict) and part["type"] == "image":
        url = _anthropic_url(source)
    elif isinstance(source, dict):
        url, detail = source.get("url"), source.get("detail", detail)
    else:
        url = source
    if not isinstance(url, str) or not url:
        raise PydanticCustomError("picture", "a picture needs a URL: data:image/...;base64,... with its bytes")
    if not isinstance(detail, str | None) or detail not in DETAILS:
        raise PydanticCustomError(
            "picture", "detail must be auto, low or high, not {detail}", {"detail": repr(detail)[:40]}
        )
    return f"{OPEN}{DETAILS[detail]}:{url}{PLACE}"


def take(content: str) -> tuple[str, list[Picture]]:
    """The text with a place for each picture, and the pictures in their order."""
    pictures: list[Picture] = []

    def place(match: re.Match[str]) -> str:
        pictures.append(Picture(match[2], match[1]))  # type: ignore[arg-type]  # `note` wrote it
        return PLACE

    return _NOTE.sub(place, content), pictures


def decoded(url: str) -> bytes:
    """The bytes of a data: URL. Raises InvalidRequest.

    What it says of its type is not asked. Base64 is read with or without padding, with white space, percent signs and
    the letters of URLs: encoders differ, and it never means anything else.
    """
    head, comma, body = url.partition(",")
    if not comma or not head.lower().replace(" ", "").endswith(";base64"):
        raise InvalidRequest("a picture's data: URL must be base64: data:image/png;base64,...", "messages")
    if len(body) > 2 * MOST_BYTES:
        raise InvalidRequest(f"a picture has more than {MOST_BYTES} bytes: make it smaller", "messages")
    text = unquote(body) if "%" in body else body
    raw = b"".join(text.encode("ascii", "replace").split()).rstrip(b"=").replace(b"-", b"+").replace(b"_", b"/")
    wrong = _NOT_BASE64.search(raw)
    if wrong or len(raw) % 4 == 1:
        what = f"{wrong[0].decode()!r} at letter {wrong.start()}" if wrong else "it ends in the middle of a byte"
        raise InvalidRequest(f"a picture's base64 cannot be read: {what}", "messages")
    try:
        data = base64.b64decode(raw + b"=" * (-len(raw) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"a picture's base64 cannot be read: {error}", "messages") from error
    if not data:
        raise InvalidRequest("a picture is empty", "messages")
    return data


def scheme_of(picture: Picture) -> Literal["data", "http"]:
    """Raises InvalidRequest for anything else, files of this machine among it."""
    scheme = picture.url[:6].lower()
    if scheme.startswith("data:"):
        return "data"
    if scheme in ("http:/", "https:"):
        return "http"
    raise InvalidRequest(
        f"a picture's URL begins with {picture.url[:12]!r}: send its bytes, as data:image/...;base64,...", "messages"
    )


def _anthropic_url(source: Mapping[str, Any]) -> Any:
    if source.get("type") == "url":
        return source.get("url")
    data = source.get("data")
    if source.get("type") != "base64" or not isinstance(data, str):
        raise PydanticCustomError(
            "unsupported",
            "a picture's source must be base64 or url, not {kind}",
            {"kind": repr(source.get("type"))[:40]},
        )
    return data if data[:5].lower() == "data:" else f"data:;base64,{data}"


def refuse_elsewhere(role: str, content: str) -> None:
    """Only users and tools show pictures. Raises Unsupported."""
    if OPEN in content and role not in ("user", "tool"):
        raise Unsupported(f"a {role} message cannot hold pictures: put them into a user's", "messages")
