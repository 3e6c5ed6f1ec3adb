"""The invoice test tests itself: a perfect reader gets everything, one that slips a line gets nothing."""

import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import pytest
from invoice import (
    FIELDS,
    FIRST,
    LAST,
    LINES,
    PAGE,
    Invoice,
    answer_of,
    draw,
    invoice,
    question,
    right_fields,
    score,
    server,
)
from PIL import Image

from services.engine.vision.decode import opened

PAGES = [invoice(seed) for seed in range(4)]


def reader(pages: list[Invoice], slip: int = 0) -> Any:
    """Knows what is on each page; reads `slip` lines too far down."""
    known = {draw(page): page for page in pages}

    def ask(picture: bytes, text: str) -> str:
        number = int(re.findall(r"number (\d+)", text)[0])
        return f"Here it is: {answer_of(known[picture].lines[number - 1 + slip])}"

    return ask


def test_a_perfect_reader_gets_everything_and_a_slip_costs_everything() -> None:
    perfect = score(PAGES, reader(PAGES))
    assert perfect.asked == 4 * 10
    assert perfect.right == dict.fromkeys(FIELDS, 40)
    slipped = score(PAGES, reader(PAGES, slip=1))
    assert slipped.right["article"] == slipped.right["amount"] == 0
    assert slipped.right["quantity"] <= 2
    assert score(PAGES[:1], lambda picture, text: "I cannot read this.").right == dict.fromkeys(FIELDS, 0)


def test_pages() -> None:
    assert {page.layout for page in PAGES} == {"plain", "ruled", "striped", "boxed"}
    for page in PAGES:
        data = draw(page)
        assert opened(data).size == PAGE
        assert draw(invoice(PAGES.index(page))) == data, "the same for the same seed"
        assert len(page.lines) == LINES
        assert len({line.article for line in page.lines}) == len({line.amount_cents for line in page.lines}) == LINES
    assert len({draw(page) for page in PAGES}) == 4


def test_every_line_is_on_the_page() -> None:
    """Ink in each line's own band, to its right end, and none where two lines meet."""
    page = invoice(0)
    image = Image.open(io.BytesIO(draw(page)))
    for index in range(LINES):
        band = image.crop((60, 200 + 23 * (index + 1) + 4, PAGE[0] - 60, 200 + 23 * (index + 2) + 1))
        box = band.point(lambda value: 255 - value).getbbox()
        assert box is not None
        assert box[0] < 40
        assert box[2] > 1000


def test_fields_count_by_themselves() -> None:
    line = invoice(0).lines[FIRST - 1]
    told = json.loads(answer_of(line))
    assert right_fields(line, json.dumps(told)) == set(FIELDS)
    assert right_fields(line, json.dumps(told | {"quantity": f"{line.quantity} pcs"})) == set(FIELDS)
    assert right_fields(line, json.dumps(told | {"amount": f"EUR {line.amount_cents / 100:.2f}"})) == set(FIELDS)
    assert right_fields(line, json.dumps(told | {"quantity": line.quantity + 1})) == {"article", "amount"}
    assert right_fields(line, json.dumps(told | {"article": told["article"][:-1]})) == {"quantity", "amount"}
    assert right_fields(line, json.dumps(told | {"amount": line.amount_cents})) == {"article", "quantity"}
    assert right_fields(line, "{broken") == right_fields(line, "{broken}") == set()
    assert f"number {LAST} " in question(LAST)


class _Model(BaseHTTPRequestHandler):
    asked: ClassVar[list[Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        image, text = body["messages"][0]["content"]
        number = int(re.findall(r"number (\d+)", text["text"])[0])
        self.asked.append((self.path, body["model"], image["image_url"]))
        answer = {"choices": [{"message": {"content": answer_of(PAGES[0].lines[number - 1])}}]}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    listening = HTTPServer(("127.0.0.1", 0), _Model)
    thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{listening.server_port}/v1"
    listening.shutdown()
    thread.join()
    listening.server_close()


def test_it_asks_any_openai_server(url: str) -> None:
    said: list[str] = []
    found = score(PAGES[:1], server(url, "some-model", "high"), said.append)
    assert found.right == dict.fromkeys(FIELDS, 10)
    path, model, image = _Model.asked[0]
    assert (path, model, image["detail"]) == ("/v1/chat/completions", "some-model", "high")
    assert image["url"].startswith("data:image/png;base64,iVBOR")
    assert str(found) in said[0]
    assert str(found) == "article 10/10, quantity 10/10, amount 10/10"
