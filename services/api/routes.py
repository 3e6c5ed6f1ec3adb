"""The endpoints for chats, models and operation. Owns their paths and the order validate - open - reply; the work is in
chat.py, the form of replies in replies.py."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from services.api.chat import Chats
from services.api.errors import EngineLost, NotFound
from services.api.model_folder import model_ids, thinks
from services.api.replies import ChatReply
from services.api.schemas import ChatRequest, ControlRequest
from services.api.serving import read_json, rejoin, respond
from services.api.users import caller_of
from services.api.validation import body_schema, validate
from services.rpc import engine_pb2 as pb

router = APIRouter()

CREATED = 1_764_374_400  # models have no date of their own; clients sort by it


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def chat_completions(request: Request) -> Response:
    """Answers to a dialog, whole or as a stream of events."""
    chat = validate(ChatRequest, await read_json(request))
    if (joined := await rejoin(request)) is not None:
        return joined
    choices = await request.app.state.chats.open(chat, caller_of(request, chat.user_name))
    return await respond(request, choices, ChatReply(chat, choices), bool(chat.stream))


@router.post("/v1/chat/completions/control", openapi_extra=body_schema(ControlRequest))
async def control(request: Request) -> dict[str, Any]:
    """End the thinking of an answer under way. `id` is the answer's, or the X-Request-Id of its request."""
    body = validate(ControlRequest, await read_json(request))
    if not await request.app.state.chats.under_way(body.id).stop_thinking():
        raise NotFound(f"the answer {body.id!r} is over", "id")
    return {"object": "chat.completion.control", "id": body.id, "action": body.action}


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
