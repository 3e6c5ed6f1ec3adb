"""Text to ids and back, with the checkpoint's tokenizer.json. Owns the difference between a special token and text that
merely looks like one; knows no template and no dialog.

Marked text. A tokenizer turns the letters `<|im_end|>` into the token that ends a turn, whoever wrote them. So before
rendering, every added-token literal inside a client's string is replaced by one surrogate code point (`protect`), which
no valid text contains and every template passes through untouched. What still reads as an added token in rendered text
was written by the template; `encode` gives it its id and reads the surrogates as the letters they stand for. Stretches
between the template's tokens are tokenised whole, so text without such literals gets exactly the ids it always had.
"""

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from services.api.errors import InvalidRequest, ModelFolderError
from services.api.pictures import OPEN, PLACE
from services.vocabulary import is_panic, try_out

FIRST_MARK = 0xD800
MOST_MARKS = ord(OPEN) - FIRST_MARK  # the last two stand for pictures
TOKEN_BYTE = b"\xff"  # begins an added token in canonical bytes; never part of UTF-8
UNKNOWN_BYTE = b"\xfe"  # stands there for an id outside the vocabulary: no text gives it
NOT_BYTE_LEVEL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")  # if they are set
WHOLE_TEXTS = {"truncation": None, "padding": None, "post_processor": None}  # nothing cut off, nothing added


@dataclass(frozen=True)
class AddedToken:
    id: int
    literal: str
    special: bool  # control tokens: never shown to the client
    mark: str


class TextTokenizer:
    """Encodes marked text; turns ids into bytes. Safe to use from several threads."""

    def __init__(self, data: dict[str, Any]) -> None:
        entries = data["added_tokens"]
        if len(entries) > MOST_MARKS:
            raise ModelFolderError(
                f"tokenizer.json has {len(entries)} added tokens; at most {MOST_MARKS} are supported"
            )
        if not all(e["content"] for e in entries):
            raise ModelFolderError("tokenizer.json: an added token has no letters")
        odd = [e["content"] for e in entries if e["lstrip"] or e["rstrip"] or e["single_word"]]
        if odd:
            raise ModelFolderError(f"tokenizer.json: added tokens that eat spaces are not supported: {odd[:3]}")
        decoders = data["decoder"].get("decoders", [data["decoder"]])
        if [decoder["type"] for decoder in decoders] != ["ByteLevel"]:
            raise ModelFolderError("tokenizer.json: only byte-level vocabularies are supported (decoder ByteLevel)")
        odd = [name for name in NOT_BYTE_LEVEL if data["model"].get(name)]
        if data["model"].get("type", "BPE") != "BPE" or odd:
            what = f"{odd[0]} is set" if odd else f"the model is {data['model']['type']!r}"
            raise ModelFolderError(f"tokenizer.json: only byte-level BPE vocabularies are supported, {what}")
        self.added = {
            e["content"]: AddedToken(e["id"], e["content"], e["special"], chr(FIRST_MARK + i))
            for i, e in enumerate(entries)
        }
        by_length = sorted(self.added, key=len, reverse=True)
        self._literal = re.compile("|".join(map(re.escape, by_length)))
        self._restore = {ord(token.mark): token.literal for token in self.added.values()}
        # Added tokens out of the vocabulary too: then no run of plain text can become one.
        model = {**data["model"], "vocab": {k: v for k, v in data["model"]["vocab"].items() if k not in self.added}}
        plain = json.dumps({**data, "model": model, "added_tokens": [], **WHOLE_TEXTS})
        try:
            try_out(plain, "tokenizers")
            self._plain = Tokenizer.from_str(plain)
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise ModelFolderError(f"tokenizer.json cannot be used: {error}") from error
        letters = _byte_letters()
        self._bytes: dict[int, bytes] = {}
        for piece, token_id in model["vocab"].items():
            self._bytes[token_id] = bytes(letters[letter] for letter in piece)
        self._added_by_id = {token.id: token for token in self.added.values()}

    def protect(self, text: str) -> str:
        """A client's string as marked text; a picture's place stays. Raises InvalidRequest on what is not text."""
        try:
            text.replace(PLACE, "").encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest("a string holds half of a surrogate pair, which is not text") from error
        return self._literal.sub(lambda match: self.added[match[0]].mark, text)

    def restore(self, marked: str) -> str:
        """Marked text as people read it: every mark as the letters it stands for."""
        return marked.translate(self._restore)

    def encode(self, marked: str) -> list[int]:
        ids: list[int] = []
        start = 0
        for match in self._literal.finditer(marked):
            ids += self._encode_stretch(marked[start : match.start()])
            ids.append(self.added[match[0]].id)
            start = match.end()
        return ids + self._encode_stretch(marked[start:])

    def _encode_stretch(self, marked: str) -> list[int]:
        if not marked:
            return []
        try:
            return list(self._plain.encode(self.restore(marked), add_special_tokens=False).ids)
        except BaseException as error:
            if not is_panic(error):
                raise
            raise InvalidRequest("a text that the tokenizer cannot split: is it endless white space?") from error

    def knows(self, token_id: int) -> bool:
        """Whether an id is in the vocabulary."""
        return token_id in self._bytes or token_id in self._added_by_id

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes an id adds to the text; an added token's literal. Ids outside the vocabulary add nothing."""
        added = self._added_by_id.get(token_id)
        return added.literal.encode() if added else self._bytes.get(token_id, b"")

    def shown_bytes(self, token_id: int) -> bytes:
        """The same, as far as a client may see it: nothing for control tokens."""
        added = self._added_by_id.get(token_id)
        return b"" if added and added.special else self.token_bytes(token_id)

    def canonical_ids(self, ids: Iterable[int]) -> bytes:
        """Bytes that are equal for ids and for marked text which mean the same up to white space."""
        out = bytearray()
        for token_id in ids:
            added = self._added_by_id.get(token_id)
            out += TOKEN_BYTE + added.literal.encode() if added else self._bytes.get(token_id, UNKNOWN_BYTE)
        return b"".join(bytes(out).split())

    def canonical_text(self, marked: str) -> bytes:
        out = bytearray()
        start = 0
        for match in self._literal.finditer(marked):
            out += self.restore(marked[start : match.start()]).encode() + TOKEN_BYTE + match[0].encode()
            start = match.end()
        out += self.restore(marked[start:]).encode()
        return b"".join(bytes(out).split())


class Detokenizer:
    """Ids to text, one at a time; a character comes out when its last byte is in. Invalid bytes become U+FFFD."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.shown_bytes(token_id))

    def pending_bytes(self) -> int:
        """Bytes of a character that is not complete: at the end of an answer they are dropped."""
        return len(self._decoder.getstate()[0])


def load_tokenizer(path: Path) -> TextTokenizer:
    """Raises ModelFolderError if the file is missing or not a byte-level BPE tokenizer."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return TextTokenizer(data)
    except OSError as error:
        raise ModelFolderError(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelFolderError(f"{path} is not a tokenizer.json this api understands: {error!r}") from error


def _byte_letters() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow from U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
