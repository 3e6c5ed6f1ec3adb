"""Troubles that come where nobody looks for them: a machine without room for a process, an answer that the template
does not take."""

import asyncio
import errno
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import grpc
import openai
import pytest
from running_api import RunningApi
from scripted_engine import Failure, ScriptedEngine
from timing import in_time

from services.api import choices, rendering, seeing
from services.api.embedded import EmbeddedStore
from services.api.errors import TemplateRefused
from services.api.pictures import Picture
from services.api.rendering import Rendering
from services.api.templates import ChatTemplate

FULL = OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("place", [(subprocess, "Popen"), (rendering.socket, "socketpair")])
def test_a_template_is_rendered_again_as_soon_as_there_is_room(
    place: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = Rendering()

    def is_full(*args: Any, **options: Any) -> NoReturn:
        raise FULL

    with monkeypatch.context() as full:
        full.setattr(*place, is_full)
        for _ in range(2):
            with pytest.raises(OSError, match="open files"):
                templates.render("{{ x }}", {"x": 1})
    assert templates.render("{{ x }}", {"x": 1}) == "1", "its first caller pays for nothing"
    templates.close()


@pytest.mark.parametrize("trouble", [TemplateRefused("it takes too long"), FULL])
def test_an_answer_that_is_not_rendered_again_costs_no_more_than_its_own_state(
    start_api: Callable[..., RunningApi],
    engine: ScriptedEngine,
    store: EmbeddedStore,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Exception,
) -> None:
    def refuses(*args: Any) -> NoReturn:
        raise trouble

    monkeypatch.setattr(ChatTemplate, "answered", refuses)
    monkeypatch.setattr(ChatTemplate, "upcoming", refuses)
    api = start_api(redis_url=store.url)
    api.chat({"role": "system", "content": "Be brief. " * 100}, "Hi " * 300)
    api.saved()
    assert engine.calls[0].ended.wait(10), "all that the engine has to send was taken off the stream"
    assert api.metric("snapshot_writes_total", result="stored") == 2, "of the first turn and of the question"
    engine.hot.clear()
    api.chat({"role": "system", "content": "Be brief. " * 100}, "Hi " * 300)
    assert engine.calls[1].source == "SENT"
    failed = isinstance(trouble, OSError)  # a refusal of the probe says nothing of the dialog
    assert (api.metric("reads_ahead_total", result="failed") > 0) == failed


def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault_of_ours(api: RunningApi) -> None:
    place = api.client.base_url
    with socket.create_connection((place.host, place.port)) as client:
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 99"]
        client.sendall("\r\n".join([*head, "", '{"model":']).encode())
    assert in_time(lambda: api.metric("errors_total", code="client_gone") == 1)
    assert api.metric("errors_total", code="internal_error") == 0


def test_slow_servers_of_pictures_hold_up_nobody_s_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as would take all threads that asyncio has for work."""
    answered = threading.Event()

    def slow(url: str) -> bytes:
        assert answered.wait(20)
        return url.encode()

    async def work() -> None:
        requests = [[Picture(f"http://{number}/{other}", "auto") for other in range(8)] for number in range(4)]
        under_way = [asyncio.create_task(seeing.load(request, False, may_fetch=True)) for request in requests]
        await asyncio.sleep(0)  # each has asked for its threads
        await asyncio.wait_for(asyncio.to_thread(answered.set), 10)
        found = await asyncio.gather(*under_way)
        assert [[picture.data.decode() for picture in each] for each in found] == [
            [picture.url for picture in request] for request in requests
        ]

    monkeypatch.setattr(seeing, "fetch", slow)
    asyncio.run(work())


@pytest.mark.parametrize("patience_s", [600, 0])
def test_an_answer_of_several_is_not_lost_to_a_full_queue(
    start_api: Callable[..., RunningApi],
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    patience_s: float,
) -> None:
    """Others were let in while the first one was made."""
    api = start_api(read_ahead=False)
    monkeypatch.setattr(choices, "PATIENCE_S", patience_s)
    full = Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "queue_full", retry_after_s="1")
    said = {0: "", 1: ""}

    def read_all() -> None:
        messages: Any = [{"role": "user", "content": "Hi"}]
        for event in api.openai().chat.completions.create(model="demo", messages=messages, n=2, stream=True):
            if not any(said.values()):
                engine.failure = full
            said[event.choices[0].index] += event.choices[0].delta.content or ""

    if patience_s:
        read_all()
        assert len(engine.calls) == 3, "the second one asked twice"
    else:
        with pytest.raises(openai.APIError, match="full"):
            read_all()
    assert said == {0: "Hello there, friend.", 1: "Hello there, friend." if patience_s else ""}
