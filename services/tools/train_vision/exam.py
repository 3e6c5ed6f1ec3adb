"""`thimble see`: pictures that were never trained on, shown to a running server, and how many it answers right.

plain    small shapes and four digits on light paper, always in the same words
drawn    as it is taught, but of other seeds, words, fonts and ways of asking
painted  as a person would paint them, drawn by other code
"""

import argparse
import base64
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from services.tools import figures
from services.tools.amounts import count, whole
from services.tools.complaints import UsageError
from services.tools.completions import Server
from services.tools.train_vision import plain
from services.tools.train_vision.answers import is_right
from services.tools.train_vision.drawings import HELD_OUT, drawing
from services.tools.train_vision.painted import painting
from services.tools.train_vision.scenes import TOPICS, Asked

Shown = tuple[Image.Image, Asked]
FIRST = 10_000_000


def _drawn(number: int) -> Shown:
    found = drawing(HELD_OUT + number)
    return found.image, found.asked


def _painted(number: int) -> Shown:
    image, _, asked = painting(number)
    return image, asked


SETS: dict[str, Callable[[int], Shown]] = {
    "plain": lambda number: plain.drawing(HELD_OUT + number),
    "drawn": _drawn,
    "painted": _painted,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="of the api, with /v1 at its end")
    parser.add_argument("model")
    parser.add_argument("--sets", default=",".join(SETS), help="of pictures: plain, drawn, painted (all)")
    parser.add_argument("--drawings", type=whole, default=100, help="how many of each set (100)")
    parser.add_argument("--first", type=count, default=FIRST, help="number of the first one, of those held out")
    parser.add_argument("--wrong", type=Path, metavar="FOLDER", help="write those that are answered wrong there")
    parser.add_argument("--record", type=Path, metavar="CSV", help="append a demo.vision row for each set and topic")


def run(args: argparse.Namespace) -> int:
    for name in args.sets.split(","):
        if name not in SETS:
            raise UsageError(f"no set {name!r}; there are {', '.join(SETS)}")
        asked, right = Counter[str](), Counter[str]()
        for number in range(args.first, args.first + args.drawings):
            image, question = SETS[name](number)
            said = ask(args.url, args.model, image, question.question)
            is_so = is_right(question, said)
            for topic in (question.topic, "all"):
                asked[topic] += 1
                right[topic] += is_so
            if args.wrong and not is_so:
                _keep(args.wrong, f"{name}-{number}", image, f"{question.question}\n{question.answer}\n{said}\n")
        for topic in (*TOPICS, "all"):
            if asked[topic]:
                percent = 100 * right[topic] / asked[topic]
                print(f"{name:<8} {topic:<11}{right[topic]:>5} of {asked[topic]:<5}{percent:6.1f} %", flush=True)
                if args.record:
                    note = f"{name}, {topic}: {right[topic]} of {asked[topic]} from {args.first} on, asked of the api"
                    figures.append(args.record, "demo.vision", percent, "%", f"{args.model}, {note}")
    return 0


def ask(url: str, model: str, image: Image.Image, question: str) -> str:
    """What the server says to a picture and a question about it."""
    out = io.BytesIO()
    image.save(out, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    return str(Server(url, timeout_s=300).choice(body)["message"]["content"] or "")


def _keep(folder: Path, name: str, image: Image.Image, text: str) -> None:
    """The picture, and beside it the question, the answer, and what was said."""
    folder.mkdir(parents=True, exist_ok=True)
    image.save(folder / f"{name}.png")
    (folder / f"{name}.txt").write_text(text, encoding="utf-8")
