"""Pictures in rendered text: each place becomes the tokens that the model knows for it. Owns that form; the numbers
come from the engine, the places from pictures.py or from the checkpoint's template.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.api.errors import TemplateRefused, Unsupported
from services.api.pictures import PLACE
from services.api.tokens import AddedToken
from services.rpc import engine_pb2 as pb

BEGIN, TOKEN, END = "<img>", "<image>", "</img>"
# A template may write the token itself where it is given a picture, with or without its tags.
_PLACE = re.compile(f"(?:{BEGIN})?(?:{PLACE}|{TOKEN})(?:{END})?")


@dataclass(frozen=True)
class Shown:
    """A picture as the engine knows it: the name of its embeddings, and how many tokens it takes."""

    handle: bytes
    tokens: int


def expand(text: str, pictures: Sequence[Shown]) -> str:
    """Marked text with the tokens of each picture in its place.

    Raises TemplateRefused if the template shows more or fewer pictures than there are.
    """
    if not pictures and PLACE not in text:
        return text
    places = list(_PLACE.finditer(text))
    if len(places) != len(pictures):
        raise TemplateRefused(
            f"the model's chat template shows {len(places)} pictures where the messages have {len(pictures)}: put "
            "pictures into users' messages",
            "messages",
        )
    left = iter(pictures)
    return _PLACE.sub(lambda _: f"{BEGIN}{TOKEN * next(left).tokens}{END}", text)


def named_places(text: str, pictures: Sequence[Shown]) -> list[tuple[int, bytes]]:
    """Where each picture begins in expanded text, and its name; nobody else's text can have these tokens."""
    begins = re.finditer(BEGIN + TOKEN, text)
    return [(begin.start(), picture.handle) for begin, picture in zip(begins, pictures, strict=False)]


def parts(content: str, protected: Any) -> list[dict[str, str]]:
    """A content with pictures as the list of parts that templates take; `protected` is applied to each text.

    Parts stand a line apart in a content: that line break was ours and goes again.
    """
    found: list[dict[str, str]] = []
    pieces = content.split(PLACE)
    for number, piece in enumerate(pieces):
        if number:
            found.append({"type": "image"})
            piece = piece.removeprefix("\n")
        if number < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece:
            found.append({"type": "text", "text": protected(piece)})
    return found


def positions(ids: Sequence[int], token_id: int, pictures: Sequence[Shown]) -> list[int]:
    """Where each picture's rows begin in a prompt's ids: nothing but a picture has that id."""
    found: list[int] = []
    start = 0
    for picture in pictures:
        at = ids.index(token_id, start)
        start = at + picture.tokens
        assert all(id_ == token_id for id_ in ids[at:start]), "a picture's tokens follow each other"
        found.append(at)
    return found


def picture_refs(ids: Sequence[int], added: Mapping[str, AddedToken], pictures: Sequence[Shown]) -> list[pb.PictureRef]:
    """What the engine is told of a prompt's pictures."""
    if not pictures:
        return []
    return [
        pb.PictureRef(handle=picture.handle, position=position, tokens=picture.tokens)
        for position, picture in zip(positions(ids, added[TOKEN].id, pictures), pictures, strict=True)
    ]


def require_tokens(added: Any) -> None:
    """Raises Unsupported if the tokenizer lacks what pictures are written with."""
    lacking = [literal for literal in (BEGIN, TOKEN, END) if literal not in added]
    if lacking:
        raise Unsupported(
            f"this model's tokenizer has no {' or '.join(lacking)}: it cannot be shown pictures", "messages"
        )
