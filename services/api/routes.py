"""The endpoints. Owns paths, status of each answer, and the order validate - open - reply; the work is in chat.py."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.api.answer import Answer, Done
from services.api.chat import Chats
from services.api.errors import ClientGone, EngineFailed, EngineLost, InvalidRequest
from services.api.model_folder import model_ids, thinks
from services.api.replies import ChatReply
from services.api.schemas import ChatRequest, parse_json, validate
from services.api.sse import EventStream, until_gone

router = APIRouter()

CREATED = 1_764_374_400  # models have no date of their own; clients sort by it
_CHAT_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": ChatRequest.model_json_schema()}}}
}


@router.post("/v1/chat/completions", openapi_extra=_CHAT_BODY)
async def chat_completions(request: Request) -> Response:
    """An answer to a dialog, whole or as a stream of events."""
    chat = validate(ChatRequest, await read_json(request))
    chats: Chats = request.app.state.chats
    answer = await chats.open(chat, request.state.request_id)
    reply = ChatReply(chat.model, answer, bool(chat.stream_options and chat.stream_options.include_usage))

    def gone() -> None:
        chats.metrics.disconnects.inc()
        answer.close()

    if chat.stream:
        ping_interval_s: float = request.app.state.ping_interval_s
        return EventStream(_chunks(answer, reply), ping_interval_s, request.app.state.on_error, gone)
    try:
        done = await until_gone(request.receive, _collect(answer))
    except ClientGone:
        gone()
        raise
    return JSONResponse(reply.whole(done))


async def _chunks(answer: Answer, reply: ChatReply) -> AsyncGenerator[dict[str, Any], None]:
    events = answer.events()
    try:
        yield reply.first()
        async for event in events:
            if isinstance(event, Done):
                for chunk in reply.last(event):
                    yield chunk
            else:
                yield reply.piece(event)
    finally:
        await events.aclose()


async def _collect(answer: Answer) -> Done:
    events = answer.events()
    try:
        async for event in events:
            if isinstance(event, Done):
                return event
    finally:
        await events.aclose()
    raise EngineFailed("the answer ended without an end")


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The ids a client can choose from, with the engine's limits."""
    _, info = await request.app.state.chats.engines.pick()
    data = [_model(model_id, info.context_tokens) for model_id in model_ids(info.model)]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> dict[str, Any]:
    _, info = await request.app.state.chats.engines.pick()
    thinks(model_id, info.model)
    return _model(model_id, info.context_tokens)


def _model(model_id: str, context_tokens: int) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": CREATED,
        "owned_by": "thimble",
        "max_model_len": context_tokens,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
    }


@router.get("/health")
async def health() -> dict[str, str]:
    """The process is alive; says nothing of the engine."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, Any]:
    """The engine answers and serves: a chat would be taken. 503 otherwise."""
    chats: Chats = request.app.state.chats
    engine, info = await chats.engines.pick(age_s=0)
    if not await engine.serving():
        raise EngineLost(f"the engine at {engine.address} is up, but does not serve yet")
    return {
        "status": "ready",
        "model": info.model,
        "engine": {"address": engine.address, "device": info.device, "version": info.version},
        "context_tokens": info.context_tokens,
        "snapshot_store": "available" if chats.snapshots.store_available else "not available",
    }


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """For Prometheus."""
    chats: Chats = request.app.state.chats
    return Response(generate_latest(chats.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def read_json(request: Request) -> Any:
    """The body. Only with its own content type: a page in a browser can post others here without being asked."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidRequest("send the body as JSON with the header Content-Type: application/json")
    return parse_json(await request.body())
