"""The endpoints of OpenAI's responses. Owns their paths; a response is answered as the chat that it means."""

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from services.api.chat import Chats
from services.api.messages import Message, ToolCall
from services.api.responses_memory import ResponseMemory
from services.api.responses_reply import WIRE, ResponseReply
from services.api.responses_request import ResponseRequest
from services.api.serving import read_json, rejoin, respond
from services.api.users import caller_of
from services.api.validation import body_schema, validate

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_schema(ResponseRequest))
async def create(request: Request) -> Response:
    """An answer, whole, as a stream of events, or made in the background."""
    body = validate(ResponseRequest, await read_json(request))
    if (joined := await rejoin(request)) is not None:
        return joined
    memory: ResponseMemory = request.app.state.responses
    chats: Chats = request.app.state.chats
    previous = body.previous_response_id
    before = memory.kept(previous, "previous_response_id").messages if previous else []
    choices = await chats.open(body.chat(before), caller_of(request, body.safety_identifier or body.user), "resp_")

    def ended(reply: ResponseReply) -> None:
        said = choices.answers[0].message
        calls = [ToolCall.model_validate(call) for call in said.calls or []]
        answer = Message(
            role="assistant",
            content=said.content or None,
            reasoning_content=said.reasoning or None,
            tool_calls=calls or None,
        )
        memory.keep(reply, [*before, *body.messages(), answer])

    reply = ResponseReply(body, choices, ended if body.store is not False else None)
    memory.note(reply)
    if body.background:
        memory.run(reply, request.app.state.on_error)
        return JSONResponse(reply.object)
    return await respond(request, choices, reply, bool(body.stream), WIRE)


@router.get("/v1/responses/{response_id}")
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A response as it is now."""
    found: dict[str, Any] = request.app.state.responses.find(response_id)
    return found


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(request: Request, response_id: str) -> dict[str, Any]:
    """End a response that is under way."""
    found: dict[str, Any] = await request.app.state.responses.cancel(response_id)
    return found
