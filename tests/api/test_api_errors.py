"""What can go wrong, as clients see it: status, OpenAI's error body, the name of the field."""

import json
from collections.abc import Callable
from typing import Any

import grpc
import openai
import pytest
from running_api import RunningApi
from scripted_engine import Failure, ScriptedEngine
from timing import in_time

from services.api import errors

USER = {"role": "user", "content": "Hi"}


def post(api: RunningApi, body: Any, **options: Any) -> Any:
    if isinstance(body, bytes):
        headers = {"Content-Type": "application/json"}
        return api.client.post("/v1/chat/completions", content=body, headers=headers, **options)
    return api.client.post("/v1/chat/completions", json=body, **options)


def error_of(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert answer.headers["x-request-id"]
    found: dict[str, Any] = body["error"]
    return found


def test_every_error_has_a_code_a_status_and_a_body() -> None:
    kinds = errors.all_errors()
    assert len(kinds) == len({kind.code for kind in kinds})
    assert {kind.__name__ for kind in kinds} == {
        name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.ApiError)
    }
    for kind in kinds:
        assert 400 <= kind.status < 600
        assert kind("why").body() == {"error": {"message": "why", "type": kind.type, "param": None, "code": kind.code}}
        assert ("Retry-After" in kind("why").headers()) == (kind.status in (429, 503))


def test_every_grpc_status_has_a_meaning() -> None:
    assert set(errors.BY_STATUS) == set(grpc.StatusCode)
    for status in grpc.StatusCode:
        assert isinstance(errors.from_engine(status, "why", None), errors.ApiError)
        assert isinstance(errors.from_engine(status, "", "a code of tomorrow"), errors.ApiError)


BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "messages a string": ({"messages": "Hi"}, "messages"),
    "message a string": ({"messages": ["Hi"]}, "messages[0]"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    "content a number": ({"messages": [USER, {"role": "user", "content": 5}]}, "messages[1].content"),
    "part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    "role unknown": ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "half a surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    "temperature a string": ({"temperature": "hot"}, "temperature"),
    "temperature too high": ({"temperature": 2.1}, "temperature"),
    "temperature negative": ({"temperature": -0.1}, "temperature"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "max_tokens zero": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens a string": ({"max_tokens": "10"}, "max_tokens"),
    "max_completion_tokens a fraction": ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
    "seed too large": ({"seed": 2**64}, "seed"),
    "top_k below -1": ({"top_k": -2}, "top_k"),
    "min_p above one": ({"min_p": 1.5}, "min_p"),
    "presence_penalty too high": ({"presence_penalty": 2.5}, "presence_penalty"),
    "frequency_penalty too low": ({"frequency_penalty": -3}, "frequency_penalty"),
    "repetition_penalty zero": ({"repetition_penalty": 0}, "repetition_penalty"),
    "logit_bias of a word": ({"logit_bias": {"hello": 1}}, "logit_bias"),
    "logit_bias too large": ({"logit_bias": {"5": 101}}, "logit_bias"),
    "logit_bias a string": ({"logit_bias": {"5": "1"}}, "logit_bias"),
    "logit_bias a list": ({"logit_bias": [1]}, "logit_bias"),
    "logit_bias of no token": ({"logit_bias": {"4096": 1}}, "logit_bias"),
    "min_tokens negative": ({"min_tokens": -1}, "min_tokens"),
    "min_tokens above max_tokens": ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    "n zero": ({"n": 0}, "n"),
    "n too large": ({"n": 17}, "n"),
    "logprobs a number": ({"logprobs": 3}, "logprobs"),
    "top_logprobs too many": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs"),
    "thinking_budget negative": ({"thinking_budget": -1}, "thinking_budget"),
    "thinking_budget a string": ({"thinking_token_budget": "many"}, "thinking_budget"),
    "stop a number": ({"stop": 5}, "stop"),
    "stop empty": ({"stop": [""]}, "stop"),
    "too many stops": ({"stop": ["a"] * 17}, "stop"),
    "stream a string": ({"stream": "yes"}, "stream"),
    "model missing": ({"model": None}, "model"),
    "tools an object": ({"tools": {}}, "tools"),
    "tool of another type": ({"tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    "tool name with spaces": ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
    "effort unknown": ({"reasoning_effort": "heroic"}, "reasoning_effort"),
    "usage option a string": ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
}


@pytest.fixture(scope="module")
def shared_engine() -> Any:
    engine = ScriptedEngine()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared_api(shared_engine: ScriptedEngine) -> Any:
    from running_api import MODEL_DIR

    from services.api.config import ApiConfig

    running = RunningApi(ApiConfig(model_dir=MODEL_DIR, engines=shared_engine.address, max_body_bytes=200_000))
    yield running
    running.close()


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_fields_are_named(shared_api: RunningApi, shared_engine: ScriptedEngine, name: str) -> None:
    fields, param = BAD_FIELDS[name]
    body = json.dumps({"model": "demo", "messages": [USER], **fields}).encode()
    error = error_of(post(shared_api, body), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert param.rpartition(".")[2].partition("[")[0] in error["message"]
    assert not shared_engine.calls, "it reached the engine"


UNSUPPORTED = {
    "functions": [{"name": "f"}], "audio": {"voice": "x"}, "modalities": ["audio"], "best_of": 2, "echo": True,
    "suffix": "x", "continue_final_message": True, "add_generation_prompt": False,
}  # fmt: skip


@pytest.mark.parametrize("field", UNSUPPORTED)
def test_what_is_not_built_is_refused_by_name(shared_api: RunningApi, field: str) -> None:
    error = error_of(post(shared_api, {"model": "demo", "messages": [USER], field: UNSUPPORTED[field]}), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == field


def test_pictures_are_refused_by_name(shared_api: RunningApi) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = post(shared_api, {"model": "demo", "messages": [{"role": "user", "content": [part]}]})
    error = error_of(answer, 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == "messages"
    assert "cannot see pictures" in error["message"]


def test_neutral_values_and_unknown_fields_are_fine(api: RunningApi) -> None:
    neutral = {
        "n": 1,
        "logit_bias": {},
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "logprobs": False,
    }
    more = {"top_k": -1, "tool_choice": "auto", "user": "x", "service_tier": "auto", "something_new": {"a": 1}}
    api.chat("Hi", **neutral, **more)


@pytest.mark.parametrize(
    "body", [b"", b"{", b'{"model": "demo",}', b"[1, 2", b"\xff\xfe", b"[" * 100_000, b'{"temperature": NaN}']
)
def test_malformed_json(shared_api: RunningApi, body: bytes) -> None:
    assert error_of(post(shared_api, body), 400)["code"] == "malformed_json"


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"5", b"null"])
def test_json_that_is_no_object(shared_api: RunningApi, body: bytes) -> None:
    assert error_of(post(shared_api, body), 400)["code"] == "invalid_request"


def test_a_body_with_another_content_type(shared_api: RunningApi) -> None:
    """A page in a browser may send these without asking first."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = shared_api.client.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": kind})
        assert "Content-Type" in error_of(answer, 400)["message"]


def test_unknown_model(shared_api: RunningApi) -> None:
    error = error_of(post(shared_api, {"model": "gpt-9", "messages": [USER]}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "demo-think" in error["message"]
    error_of(shared_api.client.get("/v1/models/gpt-9"), 404)
    with shared_api.openai() as client, pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat", "/v1/", "/v2/models", "/nothing"])
def test_unknown_paths(shared_api: RunningApi, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        assert error_of(shared_api.client.request(method, path), 404)["type"] == "invalid_request_error"


def test_wrong_method(shared_api: RunningApi) -> None:
    answer = shared_api.client.get("/v1/chat/completions")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"
    assert error_of(shared_api.client.post("/health"), 405)["code"] == "method_not_allowed"


def test_context_too_long(shared_api: RunningApi) -> None:
    error = error_of(
        post(shared_api, {"model": "demo", "messages": [{"role": "user", "content": "word " * 5000}]}), 400
    )
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "4096" in error["message"]


def test_body_too_large(shared_api: RunningApi) -> None:
    large = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x" * 300_000}]}).encode()
    assert error_of(post(shared_api, large), 413)["code"] == "body_too_large"

    def in_pieces() -> Any:
        for at in range(0, len(large), 10_000):
            yield large[at : at + 10_000]

    headers = {"Content-Type": "application/json"}
    answer = shared_api.client.post("/v1/chat/completions", content=in_pieces(), headers=headers)
    assert error_of(answer, 413)["code"] == "body_too_large"


ENGINE_FAILURES = [
    (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "16 are waiting", "queue_full"), 429, "queue_full", "5"),
    (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "queue_full", None, "37"), 429, "queue_full", "37"),
    (Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", "queue_full", None, "soon"), 429, "queue_full", "5"),
    (Failure(grpc.StatusCode.INTERNAL, "broke", "step_failed", None, "9"), 500, "engine_failed", None),
    (Failure(grpc.StatusCode.UNAVAILABLE, "stopping", "engine_stopping"), 503, "engine_unavailable", "2"),
    (Failure(grpc.StatusCode.INVALID_ARGUMENT, "too long", "context_too_long"), 400, "context_length_exceeded", None),
    (Failure(grpc.StatusCode.INTERNAL, "broke", "step_failed"), 500, "engine_failed", None),
    (Failure(grpc.StatusCode.DEADLINE_EXCEEDED), 504, "engine_timeout", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "code", "retry_after"), ENGINE_FAILURES, ids=lambda value: str(value)[:20]
)
def test_a_refusal_of_the_engine_has_its_status(
    api: RunningApi, engine: ScriptedEngine, failure: Failure, status: int, code: str, retry_after: Any, stream: bool
) -> None:
    engine.failure = failure
    answer = post(api, {"model": "demo", "messages": [USER], "stream": stream})
    assert error_of(answer, status)["code"] == code
    assert answer.headers.get("retry-after") == retry_after
    assert api.metric("errors_total", code=code) == 1


def test_no_engine(start_api: Callable[..., RunningApi], engine: ScriptedEngine) -> None:
    api = start_api()
    engine.close()
    for answer in (
        post(api, {"model": "demo", "messages": [USER]}),
        api.client.get("/v1/models"),
        api.client.get("/ready"),
    ):
        assert error_of(answer, 503)["code"] == "engine_unavailable"
        assert int(answer.headers["retry-after"]) > 0
    assert api.client.get("/health").json() == {"status": "ok"}
    again = ScriptedEngine(engine.port)
    again.script = engine.script
    try:
        assert in_time(lambda: api.client.get("/ready").status_code == 200)
        assert api.chat("Hi")["choices"][0]["message"]["content"] == "Hello there, friend."
    finally:
        again.close()


def test_the_second_engine_serves_when_the_first_is_away(
    start_api: Callable[..., RunningApi], engine: ScriptedEngine
) -> None:
    away = ScriptedEngine()
    api = start_api(engines=f"{away.address},{engine.address}")
    away.close()
    api.chat("Hi")
    assert len(engine.calls) == 1
    assert api.client.get("/ready").json()["engine"]["address"] == engine.address


def test_ready_follows_the_engine_s_health(api: RunningApi, engine: ScriptedEngine) -> None:
    ready = api.client.get("/ready")
    assert ready.status_code == 200
    assert ready.json()["model"] == "demo"
    engine.serving(False)
    assert error_of(api.client.get("/ready"), 503)["code"] == "engine_unavailable"


def test_a_bug_of_ours_is_a_500_that_tells_nothing(
    api: RunningApi, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr("services.api.chat.template_options", broken)
    answer = post(api, {"model": "demo", "messages": [USER]})
    assert error_of(answer, 500)["code"] == "internal_error"
    assert "secret" not in answer.text
    assert "secret detail" in caplog.text


def test_api_key(start_api: Callable[..., RunningApi], tmp_path: Any) -> None:
    (tmp_path / "key").write_text("s3cret\nignored\n")
    for settings in ({"api_key": "s3cret"}, {"api_key_file": str(tmp_path / "key")}):
        api = start_api(**settings)
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": "s3cret"},
        ):
            answer = api.client.get("/v1/models", headers=headers)
            assert error_of(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        error_of(api.client.post("/v1/nothing"), 401)
        assert api.client.get("/health").status_code == 200
        with api.openai(api_key="s3cret") as client:
            assert client.models.list().data
        with api.openai(api_key="other") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_request_ids(shared_api: RunningApi) -> None:
    assert shared_api.client.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = shared_api.client.get("/health", headers={"X-Request-Id": "not\tsafe"}).headers["x-request-id"]
    assert len(made) == 32


def test_cors(start_api: Callable[..., RunningApi]) -> None:
    api = start_api(cors_origins="https://chat.example", api_key="k")
    asking = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    preflight = api.client.options("/v1/chat/completions", headers=asking)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://chat.example"
    refused = api.client.get("/v1/models", headers={"Origin": "https://chat.example"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://chat.example"
    other = api.client.get("/health", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
