"""The api's side of a request with pictures against an engine that only pretends to see: who is told what, and when."""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from running_api import MODEL_DIR, RunningApi
from scripted_engine import Failure, ScriptedEngine

from services.api.config import ApiConfig
from services.api.model_folder import ModelFolder
from services.rpc import engine_pb2 as pb

ONE, OTHER = b"\x89PNG one picture", b"\xff\xd8\xff another picture" * 90_000


class Seeing(ScriptedEngine):
    """Every picture takes 7 tokens. Remembers what it was asked and sent."""

    def __init__(self) -> None:
        super().__init__()
        self.vision = True
        self.held: set[bytes] = set()
        self.asks: list[pb.VisionAsk] = []
        self.received: list[bytes] = []
        self.gone = 0  # how many requests from now find their pictures gone

    def Vision(self, requests: Iterator[pb.VisionIn], context: Any) -> pb.VisionOut:
        ask, data = next(requests).ask, b"".join(message.data for message in requests)
        self.asks.append(ask)
        for picture in ask.pictures:
            own, data = data[: picture.size_bytes], data[picture.size_bytes :]
            if own:
                assert hashlib.sha256(own).digest() == picture.digest
                self.received.append(own)
                self.held.add(picture.digest)
        missing = [i for i, picture in enumerate(ask.pictures) if picture.digest not in self.held]
        if missing:
            return pb.VisionOut(missing=missing)
        return pb.VisionOut(pictures=[pb.SeenPicture(handle=p.digest, tokens=7) for p in ask.pictures])

    def Generate(self, requests: Iterator[pb.GenerateIn], context: Any) -> Iterator[pb.GenerateOut]:
        if self.gone:
            self.gone -= 1
            self.failure = Failure(grpc.StatusCode.FAILED_PRECONDITION, "gone", "picture_gone")
            self.held.clear()
        yield from super().Generate(requests, context)


@pytest.fixture
def eyes(folder: ModelFolder) -> Iterator[Seeing]:
    engine = Seeing()
    engine.script = folder.tokenizer.encode("I see.")
    yield engine
    engine.close()


@pytest.fixture
def api(eyes: Seeing) -> Iterator[RunningApi]:
    running = RunningApi(ApiConfig(model_dir=MODEL_DIR, engines=eyes.address, stop_timeout_s=1))
    yield running
    running.close()


def picture(data: bytes, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:;base64,{base64.b64encode(data).decode()}", **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def test_bytes_are_sent_once_and_only_when_they_are_lacked(api: RunningApi, eyes: Seeing) -> None:
    api.chat(user(picture(ONE), "and", picture(OTHER), "and again", picture(ONE)))
    assert eyes.received == [ONE, OTHER]
    assert [p.size_bytes for p in eyes.asks[0].pictures] == [0, 0, 0]
    assert [p.size_bytes for p in eyes.asks[1].pictures] == [len(ONE), len(OTHER), 0]
    api.chat(user(picture(OTHER)))
    assert len(eyes.received) == 2
    assert len(eyes.asks) == 3


def test_places_and_names_reach_the_engine(api: RunningApi, eyes: Seeing) -> None:
    api.chat(user("Look:", picture(OTHER), picture(ONE)))
    start = eyes.calls[0].start
    assert [ref.handle for ref in start.pictures] == [hashlib.sha256(data).digest() for data in (OTHER, ONE)]
    for ref in start.pictures:
        at = slice(ref.position, ref.position + ref.tokens)
        assert list(start.ids[at]) == [18] * 7
        assert (start.ids[ref.position - 1], start.ids[at.stop]) == (19, 20)
    text_tokens = eyes.asks[0].text_tokens
    assert text_tokens + 14 == len(start.ids), "the engine is told what the text takes, tags included"


def test_resolutions(api: RunningApi, eyes: Seeing) -> None:
    asked = pb.PictureAsk.Resolution
    for model, detail, wanted in (
        ("demo", {}, asked.NORMAL),
        ("demo", {"detail": "auto"}, asked.NORMAL),
        ("demo", {"detail": "low"}, asked.LOW),
        ("demo", {"detail": "high"}, asked.HIGH),
        ("demo-doc", {}, asked.HIGH),
        ("demo-doc", {"detail": "low"}, asked.LOW),
        ("demo-think-doc", {}, asked.HIGH),
    ):
        api.chat(user(picture(ONE, **detail)), model=model)
        assert eyes.asks[-1].pictures[0].resolution == wanted, (model, detail)


def test_a_picture_that_is_gone_is_sent_again(api: RunningApi, eyes: Seeing) -> None:
    eyes.gone = 2
    api.chat(user(picture(ONE)))
    assert eyes.received == [ONE] * 3
    eyes.gone = 100
    answer = api.client.post("/v1/chat/completions", json={"model": "demo", "messages": [user(picture(ONE))]})
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "picture_gone"
    assert "Retry-After" in answer.headers


def test_an_engine_that_never_has_enough_is_given_up(api: RunningApi, eyes: Seeing, monkeypatch: Any) -> None:
    monkeypatch.setattr(eyes, "held", type("Never", (set,), {"add": lambda self, item: None})())
    answer = api.client.post("/v1/chat/completions", json={"model": "demo", "messages": [user(picture(ONE))]})
    assert answer.status_code == 500
    assert len(eyes.received) == 2


def test_counting_computes_nothing(api: RunningApi, eyes: Seeing) -> None:
    body = {"model": "demo", "messages": [user(picture(ONE), "What?")]}
    counted = api.client.post("/tokenize", json=body).json()["count"]
    assert eyes.asks[-1].count_only
    assert not eyes.calls
    assert api.chat(*body["messages"])["usage"]["prompt_tokens"] == counted  # type: ignore[index]
    assert not eyes.asks[-1].count_only


def test_the_next_turn_begins_where_this_one_ended(api: RunningApi, eyes: Seeing) -> None:
    """Keys are of pictures too: the same words about another picture are another dialog."""
    first = user(picture(ONE), "What is it?")
    said = {"role": "assistant", "content": api.chat(first)["choices"][0]["message"]["content"]}
    api.saved()
    api.chat(first, said, user("And now?"))
    assert eyes.calls[-1].restored_tokens > 15
    other = user(picture(OTHER), "What is it?")
    api.chat(other, said, user("And now?"))
    assert eyes.calls[-1].restored_tokens < 15


def test_without_a_picture_nobody_is_asked(api: RunningApi, eyes: Seeing) -> None:
    api.chat("Is <image> a token?")
    assert not eyes.asks
    assert 18 not in eyes.calls[0].start.ids
    assert not eyes.calls[0].start.pictures
