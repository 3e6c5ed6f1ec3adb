"""The endpoints of Anthropic's API. Owns their paths; a message is answered as the chat that it means."""

import asyncio

from fastapi import APIRouter, Request, Response

from services.api.anthropic_reply import WIRE, MessageReply
from services.api.anthropic_request import CountRequest, MessagesRequest
from services.api.chat import Chats
from services.api.serving import read_json, rejoin, respond
from services.api.users import caller_of
from services.api.validation import body_schema, validate

router = APIRouter()


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def messages(request: Request) -> Response:
    """An answer to a dialog, whole or as a stream of events."""
    body = validate(MessagesRequest, await read_json(request))
    if (joined := await rejoin(request)) is not None:
        return joined
    caller = caller_of(request, body.metadata.user_id if body.metadata else None)
    choices = await request.app.state.chats.open(body.chat(), caller, "msg_")
    return await respond(request, choices, MessageReply(body.model, choices), bool(body.stream), WIRE)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountRequest))
async def count_tokens(request: Request) -> dict[str, int]:
    """How many tokens a dialog is, with tools and the beginning of the answer."""
    body = validate(CountRequest, await read_json(request))
    chats: Chats = request.app.state.chats
    prompt, _ = await chats.render(body.chat())
    return {"input_tokens": len(await asyncio.to_thread(chats.folder.tokenizer.encode, prompt.text))}
