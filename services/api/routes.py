"""The endpoints. Owns paths, status of each answer, and the order validate - open - reply; the work is in chat.py."""

from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.api.answer import Done, Usage
from services.api.chat import Chats
from services.api.choices import Choices
from services.api.errors import ClientGone, EngineLost, InvalidRequest
from services.api.model_folder import model_ids, thinks
from services.api.replies import ChatReply, together
from services.api.schemas import ChatRequest
from services.api.sse import EventStream, until_gone
from services.api.validation import parse_json, validate
from services.rpc import engine_pb2 as pb

router = APIRouter()

CREATED = 1_764_374_400  # models have no date of their own; clients sort by it
_CHAT_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": ChatRequest.model_json_schema()}}}
}


@router.post("/v1/chat/completions", openapi_extra=_CHAT_BODY)
async def chat_completions(request: Request) -> Response:
    """Answers to a dialog, whole or as a stream of events."""
    chat = validate(ChatRequest, await read_json(request))
    choices = await request.app.state.chats.open(chat, request.state.request_id)
    include_usage = bool(chat.stream_options and chat.stream_options.include_usage)
    reply = ChatReply(chat.model, choices, include_usage, bool(chat.logprobs))
    if chat.stream:
        return event_stream(request, choices, _chunks(choices, reply))
    return JSONResponse(reply.whole(await collect(request, choices)))


def event_stream(request: Request, choices: Choices, source: AsyncGenerator[dict[str, Any], None]) -> EventStream:
    """`source` is made from the events of `choices`, which end with the client."""
    state = request.app.state
    return EventStream(source, state.ping_interval_s, state.on_error, lambda: _gone(state.chats, choices))


async def collect(request: Request, choices: Choices) -> list[Done]:
    """The ends of all choices, once they are there. Raises ClientGone."""

    async def ends() -> list[Done]:
        events = choices.events()
        try:
            return [event async for _, event in events if isinstance(event, Done)]
        finally:
            await events.aclose()

    try:
        return await until_gone(request.receive, ends())
    except ClientGone:
        _gone(request.app.state.chats, choices)
        raise


def _gone(chats: Chats, choices: Choices) -> None:
    chats.metrics.disconnects.inc()
    choices.close()


async def _chunks(choices: Choices, reply: ChatReply) -> AsyncGenerator[dict[str, Any], None]:
    events = choices.events()
    usages: list[Usage] = []
    try:
        yield reply.first(0)
        begun = 0
        async for index, event in events:
            if index > begun:
                begun = index
                yield reply.first(index)
            if isinstance(event, Done):
                usages.append(event.usage)
                yield reply.last(index, event)
            else:
                yield reply.piece(index, event)
        for chunk in reply.ending(together(usages)):
            yield chunk
    finally:
        await events.aclose()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The ids a client can choose from, with the engine's limits."""
    _, info = await request.app.state.chats.engines.pick()
    data = [_model(model_id, info) for model_id in model_ids(info)]
    return {"object": "list", "data": data}


@router.get("/v1/models/{model_id:path}")
async def model(request: Request, model_id: str) -> dict[str, Any]:
    _, info = await request.app.state.chats.engines.pick()
    thinks(model_id, info)
    return _model(model_id, info)


def _model(model_id: str, info: pb.InfoResponse) -> dict[str, Any]:
    return {
        "id": model_id,
        "object": "model",
        "created": CREATED,
        "owned_by": "thimble",
        "max_model_len": info.context_tokens,
        "architecture": {
            "input_modalities": ["text", "image"] if info.vision else ["text"],
            "output_modalities": ["text"],
        },
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
