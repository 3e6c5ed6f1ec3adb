"""The invoice test: can a model read lines 21 to 30 of a page with 60 lines in a 15-pixel font?

    .venv/bin/python tests/vision/invoice.py URL MODEL [--invoices 4] [--seed 0] [--detail high] [--save FOLDER]

Runs against any server with OpenAI's chat completions (URL is what ends in /v1; OPENAI_API_KEY is sent if it is set).
Invoices are drawn from a seed, in four layouts, with their content as data; each line is asked for by itself, and each
of its three fields counts by itself.
"""

import argparse
import base64
import http.client
import io
import json
import os
import random
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal, get_args

from PIL import Image, ImageDraw, ImageFont

LINES, FIRST, LAST = 60, 21, 30
FONT_PIXELS, PITCH = 15, 23
PAGE = (1240, 1754)  # A4 at 150 dots an inch
FIELDS = ("article", "quantity", "amount")
Layout = Literal["plain", "ruled", "striped", "boxed"]
_WORDS = (
    "Bolt",
    "Hinge",
    "Valve",
    "Gasket",
    "Bracket",
    "Cable",
    "Switch",
    "Filter",
    "Bearing",
    "Washer",
    "Clamp",
    "Fuse",
)
_KINDS = ("steel", "brass", "large", "small", "coated", "spare", "long", "short", "heavy", "flat")
Ask = Callable[[bytes, str], str]  # a PNG and a question -> what the model says


@dataclass(frozen=True)
class Line:
    """`amount` is quantity times price, in cents."""

    number: int
    article: str
    description: str
    quantity: int
    price_cents: int

    @property
    def amount_cents(self) -> int:
        return self.quantity * self.price_cents


@dataclass(frozen=True)
class Invoice:
    layout: Layout
    number: str
    lines: tuple[Line, ...]


@dataclass
class Score:
    """Right answers by field; of `asked` lines."""

    asked: int
    right: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{name} {self.right[name]}/{self.asked}" for name in FIELDS)


def invoice(seed: int) -> Invoice:
    """Always the same for a seed. No two lines have an article or an amount in common."""
    choice = random.Random(seed)
    articles = choice.sample(range(10_000, 100_000), LINES)
    lines: list[Line] = []
    amounts: set[int] = set()
    while len(lines) < LINES:
        description = f"{choice.choice(_WORDS)} {choice.choice(_KINDS)} {choice.randrange(2, 60)} mm"
        letter = choice.choice("ABCDEFGHKLMNPRSTUWXYZ")
        number = len(lines) + 1
        line = Line(
            number,
            f"{letter}-{articles[number - 1]}",
            description,
            choice.randrange(1, 400),
            choice.randrange(15, 9000),
        )
        if line.amount_cents not in amounts:
            amounts.add(line.amount_cents)
            lines.append(line)
    return Invoice(get_args(Layout)[seed % 4], f"{2026}-{choice.randrange(10_000, 100_000)}", tuple(lines))


def money(cents: int) -> str:
    return f"{cents // 100:,}.{cents % 100:02d}"


def draw(page: Invoice) -> bytes:
    """A PNG in grey."""
    image = Image.new("L", PAGE, 255)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_PIXELS)
    pen.text((80, 60), "Northgate Fittings Ltd.", fill=0, font=ImageFont.load_default(28))
    pen.text((80, 110), f"Invoice {page.number}", fill=0, font=font)
    pen.text((80, 135), "12 Harbour Road, 4th floor", fill=0, font=font)
    # Where each column begins; numbers end there.
    columns = {"plain": (80, 140, 260, 760, 900, 1080), "ruled": (80, 130, 300, 720, 880, 1120)}.get(
        page.layout, (90, 150, 270, 780, 930, 1130)
    )
    top = 200
    heads = ("No.", "Article", "Description", "Quantity", "Price", "Amount")
    _row(pen, font, columns, top, heads)
    pen.line((70, top + PITCH - 3, PAGE[0] - 70, top + PITCH - 3), fill=0, width=2)
    for index, line in enumerate(page.lines):
        y = top + PITCH * (index + 1) + 4
        if page.layout == "striped" and index % 2:
            pen.rectangle((70, y - 3, PAGE[0] - 70, y + PITCH - 4), fill=228)
        texts = (
            line.number,
            line.article,
            line.description,
            line.quantity,
            money(line.price_cents),
            money(line.amount_cents),
        )
        _row(pen, font, columns, y, [str(text) for text in texts])
        if page.layout in ("ruled", "boxed"):
            pen.line((70, y + PITCH - 4, PAGE[0] - 70, y + PITCH - 4), fill=150)
    bottom = top + PITCH * (LINES + 1) + 4
    if page.layout == "boxed":
        for x in (70, 135, 255, 690, 800, 960, PAGE[0] - 70):
            pen.line((x, top - 4, x, bottom), fill=150)
    total = money(sum(line.amount_cents for line in page.lines))
    _row(pen, font, columns, bottom + 10, ("", "", "Total", "", "", total))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _row(
    pen: ImageDraw.ImageDraw,
    font: ImageFont.FreeTypeFont | ImageFont.ImageFont,
    columns: Sequence[int],
    y: int,
    texts: Sequence[str],
) -> None:
    for index, (x, text) in enumerate(zip(columns, texts, strict=True)):
        pen.text((x, y), text, fill=0, font=font, anchor="ra" if index >= 3 else "la")


def question(number: int) -> str:
    return (
        f"This is an invoice. Look at the line with the number {number} in the column No. Answer with one JSON object "
        'and nothing else: {"article": "...", "quantity": ..., "amount": "..."}, where amount is that line\'s own.'
    )


def answer_of(line: Line) -> str:
    """What a perfect reader says."""
    return json.dumps({"article": line.article, "quantity": line.quantity, "amount": money(line.amount_cents)})


def right_fields(line: Line, said: str) -> set[str]:
    """The fields that an answer has right; spelling of numbers does not count, digits do."""
    objects = re.findall(r"\{[^{}]*\}", said)
    try:
        told = json.loads(objects[-1]) if objects else {}
    except ValueError:
        return set()
    right = set()
    if str(told.get("article", "")).replace(" ", "").upper() == line.article:
        right.add("article")
    if _number(told.get("quantity")) == line.quantity:
        right.add("quantity")
    if _number(told.get("amount")) == Decimal(line.amount_cents) / 100:
        right.add("amount")
    return right


def _number(said: object) -> Decimal | None:
    try:
        return Decimal(re.sub(r"[^0-9.]", "", str(said)))
    except InvalidOperation:
        return None


def score(pages: Sequence[Invoice], ask: Ask, say: Callable[[str], None] = lambda text: None) -> Score:
    found = Score(0, dict.fromkeys(FIELDS, 0))
    for page in pages:
        picture = draw(page)
        before = dict(found.right)
        for line in page.lines[FIRST - 1 : LAST]:
            found.asked += 1
            for name in right_fields(line, ask(picture, question(line.number))):
                found.right[name] += 1
        own = ", ".join(f"{name} {found.right[name] - before[name]}/{LAST - FIRST + 1}" for name in FIELDS)
        say(f"invoice {page.number} ({page.layout}): {own}")
    return found


def server(url: str, model: str, detail: str) -> Ask:
    """Asks a server with OpenAI's chat completions."""

    def ask(picture: bytes, text: str) -> str:
        image = {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}", "detail": detail}
        content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": text}]
        body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 400}
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
        }
        try:
            request = urllib.request.Request(f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), headers)
            with urllib.request.urlopen(request, timeout=1800) as reply:
                return str(json.load(reply)["choices"][0]["message"]["content"] or "")
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            raise SystemExit(f"invoice.py: {url} answered with status {error.code}: {said}") from error
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise SystemExit(f"invoice.py: {url}: no answer: {error}; give a server's address, with /v1") from error

    return ask


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--invoices", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--detail", default="high", choices=("low", "auto", "high"))
    parser.add_argument("--save", type=Path, help="also write the pictures and what is on them there")
    args = parser.parse_args()
    pages = [invoice(args.seed + number) for number in range(args.invoices)]
    for page in pages if args.save else ():
        args.save.mkdir(parents=True, exist_ok=True)
        (args.save / f"{page.number}.png").write_bytes(draw(page))
        lines = [{"number": line.number, **json.loads(answer_of(line))} for line in page.lines]
        (args.save / f"{page.number}.json").write_text(json.dumps(lines, indent=1))
    print(f"{args.model}: {score(pages, server(args.url, args.model, args.detail), print)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
