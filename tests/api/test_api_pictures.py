"""Pictures in the api without an engine that sees: how they are written, carried, shown, and fetched."""

import base64
import ipaddress
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticCustomError

from services.api import fetching
from services.api.errors import InvalidRequest, TemplateRefused, Unsupported
from services.api.fetching import fetch, is_public
from services.api.keys import boundary_keys
from services.api.messages import Message
from services.api.model_folder import load_model_folder
from services.api.pictures import OPEN, PLACE, Picture, decoded, note, refuse_elsewhere, scheme_of, take
from services.api.schemas import ChatRequest
from services.api.shown import Shown, expand, named_places, parts, positions
from services.api.templates import ChatTemplate
from services.api.validation import validate

MODEL_DIR = Path(__file__).parents[2] / "demo"
DATA = b"\x89PNG and more bytes\xff\xfe"
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ({"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}, Picture("data:x", "low")),
        ({"type": "image_url", "image_url": "data:x"}, Picture("data:x", "auto")),
        ({"type": "input_image", "image_url": "data:x", "detail": "original"}, Picture("data:x", "high")),
        ({"type": "image", "source": {"type": "base64", "data": "QUJD"}}, Picture("data:;base64,QUJD", "auto")),
        (
            {"type": "image", "source": {"type": "base64", "data": "data:a;base64,Q"}},
            Picture("data:a;base64,Q", "auto"),
        ),
        ({"type": "image", "source": {"type": "url", "url": "http://a/b"}}, Picture("http://a/b", "auto")),
    ],
)
def test_every_way_to_write_a_picture(part: Any, wanted: Picture) -> None:
    assert take(f"before {note(part)} after") == (f"before {PLACE} after", [wanted])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": {"url": 7}},
        {"type": "image_url", "image_url": ""},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "tiny"}},
        {"type": "input_image", "file_id": "file-1"},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
        {"type": "image", "source": "data:x"} | {"source": None},
    ],
)
def test_a_part_that_is_not_whole_is_refused(part: Any) -> None:
    with pytest.raises(PydanticCustomError):
        note(part)


def test_parts_keep_their_order_and_are_a_line_each() -> None:
    content = [
        {"type": "text", "text": "one"},
        {"type": "image_url", "image_url": "data:x"},
        {"type": "text", "text": "2"},
    ]
    message = Message.model_validate({"role": "user", "content": content})
    assert take(message.content or "")[0] == f"one\n{PLACE}\n2"


def test_a_client_cannot_write_a_note_of_its_own() -> None:
    forged = f"{OPEN}auto:data:x{PLACE}"
    body = {"model": "m", "messages": [{"role": "user", "content": forged}]}
    with pytest.raises(InvalidRequest, match="surrogate"):
        validate(ChatRequest, body)
    with pytest.raises((InvalidRequest, ValidationError)):
        validate(ChatRequest, {"model": "m", "messages": [{"role": "user", "content": PLACE}]})


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_pictures(role: str) -> None:
    picture = note({"type": "image_url", "image_url": "data:x"})
    with pytest.raises(Unsupported, match="cannot hold pictures"):
        refuse_elsewhere(role, picture)
    refuse_elsewhere(role, "text")
    refuse_elsewhere("tool", picture)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:image/heic;BASE64,{TEXT}",
        f"data:;base64,{TEXT.rstrip('=')}",
        f"data:image/png;base64,{TEXT[:8]}\n {TEXT[8:]}\r\n",
        f"data:image/png;base64,{TEXT.replace('=', '%3D').replace('+', '%2B').replace('/', '%2F')}",
        f"data:image/png;base64,{TEXT.replace('+', '-').replace('/', '_')}",
        f"data:image/png;charset=utf-8;base64,{TEXT}",
    ],
)
def test_base64_is_read_as_encoders_write_it(url: str) -> None:
    assert decoded(url) == DATA


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png,abc", "must be base64"),
        ("data:image/png;base64", "must be base64"),
        ("data:image/png;base64,", "empty"),
        ("data:image/png;base64,data:image/png;base64,QUJD", "':' at letter 4"),
        ("data:image/png;base64,QUJDx", "middle of a byte"),
        ("data:image/png;base64,QU€D", "cannot be read"),
        ("data:image/png;base64," + "A" * 70_000_000, "more than 33554432 bytes"),
    ],
)
def test_other_base64_is_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decoded(url)


def test_other_schemes_are_refused() -> None:
    assert scheme_of(Picture("DATA:x", "auto")) == "data"
    assert scheme_of(Picture("HTTPS://a", "auto")) == "http"
    for url in ("file:///etc/passwd", "/etc/passwd", "ftp://a/b", "QUJD", "httpx://a"):
        with pytest.raises(InvalidRequest, match=r"begins with"):
            scheme_of(Picture(url, "auto"))


ONE, OTHER = Shown(b"one", 3), Shown(b"other", 2)


def test_places_become_the_models_tokens() -> None:
    text = expand(f"a {PLACE} b {PLACE}", [ONE, OTHER])
    assert text == "a <img><image><image><image></img> b <img><image><image></img>"
    assert named_places(text, [ONE, OTHER]) == [(2, b"one"), (37, b"other")]
    for already in ("<image>", "<img><image></img>", "<img>" + PLACE + "</img>"):
        assert expand(f"a {already} b", [ONE]) == "a <img><image><image><image></img> b", "not twice"
    assert expand("a <image> b", []) == "a <image> b"
    for text, pictures in ((f"{PLACE}", []), ("", [ONE]), (f"{PLACE}{PLACE}", [ONE])):
        with pytest.raises(TemplateRefused, match="shows"):
            expand(text, pictures)


def test_positions_in_ids() -> None:
    ids = [1, 19, 18, 18, 18, 20, 5, 19, 18, 18, 20]
    assert positions(ids, 18, [ONE, OTHER]) == [2, 8]


def test_a_template_of_strings_gets_strings() -> None:
    folder = load_model_folder(MODEL_DIR)
    message = {"role": "user", "content": f"{PLACE}\nsee <image>"}
    prompt = folder.template.prompt([message], None, None, [ONE])
    ids = folder.tokenizer.encode(prompt.text)
    assert ids.count(18) == 3
    assert "<img><image><image><image></img>\nsee " in prompt.text
    assert prompt.shown == (ONE,)
    answered = folder.template.answered([message, {"role": "assistant", "content": "ok"}], None, None, [ONE])
    assert answered is not None
    assert named_places(answered, [ONE]) == named_places(prompt.text, [ONE])


def test_a_template_of_parts_gets_parts() -> None:
    """A checkpoint's own way to place pictures wins over ours."""
    source = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{%- if m.content is string %}{{ m.content }}{%- else %}"
        "{%- for p in m.content %}{%- if p.type == 'image' %}[<image>]{%- else %}{{ p.text }}{%- endif %}{%- endfor %}"
        "{%- endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = load_model_folder(MODEL_DIR).tokenizer
    template = ChatTemplate(source, {}, tokenizer)
    message = {"role": "user", "content": f"first\n{PLACE}\nlast <image>"}
    prompt = template.prompt([message], None, None, [ONE])
    assert "first[<img><image><image><image></img>]last " in prompt.text
    assert tokenizer.encode(prompt.text).count(18) == 3
    assert parts(f"{PLACE}\na\n{PLACE}", str) == [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image"}]


def test_keys_are_of_the_pictures_before_them() -> None:
    text = "x" * 50
    bare = boundary_keys(b"s", text, [10, 30])
    one, other = (boundary_keys(b"s", text, [10, 30], [(20, name)]) for name in (b"one", b"other"))
    assert one[10] == other[10] == bare[10]
    assert len({one[30], other[30], bare[30]}) == 3


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.1.1", False),
        ("172.16.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("fe80::1", False),
        ("fc00::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
    ],
)
def test_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) == public


class _Web(BaseHTTPRequestHandler):
    seen: ClassVar[list[tuple[str, str]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["User-Agent"]))
        if self.path.startswith("/to/"):
            self.send_response(302)
            self.send_header("Location", self.path.removeprefix("/to/"))
            self.end_headers()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                try:
                    self.wfile.write(bytes(1 << 20))
                except OSError:
                    return
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            try:
                for _ in range(100):
                    self.wfile.write(b"x")
                    threading.Event().wait(0.05)
            except OSError:
                return
        elif self.path == "/picture":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(DATA)
        else:
            self.send_error(404)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def web() -> Iterator[str]:
    _Web.seen.clear()
    server = HTTPServer(("127.0.0.1", 0), _Web)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _loopback(address: fetching.Address) -> bool:
    return address.is_loopback


def test_a_picture_is_fetched(web: str) -> None:
    assert fetch(f"{web}/picture", _loopback) == DATA
    assert fetch(f"{web}/to//picture", _loopback) == DATA
    assert _Web.seen[0] == ("/picture", "thimble")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere", "answered 404"),
        ("/large", "more than 33554432 bytes"),
        ("/to//to//to//to//picture", "more than 3 redirects"),
        ("/to/file:///etc/passwd", "only http: and https:"),
        ("/to/http://10.0.0.1/", "not an address of the open internet"),
        ("/to/http://[::ffff:10.0.0.1]/", "not an address of the open internet"),
        ("/to/http://user:secret@127.0.0.1/", "name or password"),
    ],
)
def test_what_cannot_be_fetched_is_the_clients_error(web: str, path: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fetch(web + path, _loopback)


def test_a_slow_server_is_given_up(web: str) -> None:
    with pytest.raises(InvalidRequest, match=r"timed out|too long"):
        fetch(f"{web}/slow", _loopback, timeout_s=0.4)


def test_private_addresses_are_not_even_asked(web: str) -> None:
    for url in (f"{web}/picture", web.replace("127.0.0.1", "localhost") + "/picture", "http://2130706433/"):
        with pytest.raises(InvalidRequest, match="not an address of the open internet"):
            fetch(url)
    assert _Web.seen == []


def test_a_name_is_resolved_once(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that turns to a private address after the check leads nowhere new: the checked address is connected to."""
    port = int(web.rpartition(":")[2])
    answers = iter(["127.0.0.1", "10.0.0.1"])
    asked: list[str] = []

    def resolve(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(2, 1, 6, "", (next(answers), port))]

    monkeypatch.setattr(fetching.socket, "getaddrinfo", resolve)
    real = fetching.socket.create_connection
    connected: list[Any] = []

    def connect(address: Any, timeout: float) -> Any:
        connected.append(address)
        monkeypatch.undo()
        return real(address, timeout)

    monkeypatch.setattr(fetching.socket, "create_connection", connect)
    assert fetch(f"http://pictures.example:{port}/picture", _loopback) == DATA
    assert (asked, connected) == (["pictures.example"], [("127.0.0.1", port)])
