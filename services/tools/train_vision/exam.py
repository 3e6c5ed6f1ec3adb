"""`thimble see`: drawings that were never trained on, shown to a running server, and how many it answers right."""

import argparse
import base64
import io
import json
import urllib.request
from collections import Counter
from pathlib import Path

from services.tools import figures
from services.tools.train_vision.drawings import HELD_OUT, KINDS, Drawing, drawing, is_right


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="of the api, with /v1 at its end")
    parser.add_argument("model")
    parser.add_argument("--drawings", type=int, default=200, help="how many (200)")
    parser.add_argument("--first", type=int, default=10_000_000, help="number of the first one, of those held out")
    parser.add_argument("--record", type=Path, metavar="CSV", help="append a demo.vision row for each kind of question")


def run(args: argparse.Namespace) -> int:
    asked, right = Counter[str](), Counter[str]()
    for number in range(args.drawings):
        drawn = drawing(HELD_OUT + args.first + number)
        asked[drawn.kind] += 1
        right[drawn.kind] += is_right(drawn, ask(args.url, args.model, drawn))
    for kind in KINDS:
        if asked[kind]:
            percent = 100 * right[kind] / asked[kind]
            print(f"{kind:<8}{right[kind]:>5} of {asked[kind]:<5}{percent:6.1f} %")
            if args.record:
                note = (
                    f"{kind}: {right[kind]} of {asked[kind]} held-out drawings from {args.first} on, asked of the api"
                )
                figures.append(args.record, "demo.vision", percent, "%", f"{args.model}, {note}")
    return 0


def ask(url: str, model: str, drawn: Drawing) -> str:
    """What the server says to a drawing and its question."""
    out = io.BytesIO()
    drawn.image.save(out, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": drawn.question}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 24}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"] or "")
