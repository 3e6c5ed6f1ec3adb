"""The endpoints for text without a dialog. Owns their paths; text.py owns bodies and replies."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from services.api.chat import Chats
from services.api.errors import InvalidRequest
from services.api.fitting import refuse_to_count
from services.api.schemas import ChatRequest
from services.api.serving import read_json, rejoin, respond
from services.api.text import CompletionRequest, DetokenizeRequest, TextReply, TokenizeRequest
from services.api.users import caller_of
from services.api.validation import body_schema, validate

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def completions(request: Request) -> Response:
    """The model's continuation of a text, in which special tokens may be written out."""
    body = validate(CompletionRequest, await read_json(request))
    if (joined := await rejoin(request)) is not None:
        return joined
    chats: Chats = request.app.state.chats
    choices = await chats.open_text(body, caller_of(request, body.user))
    return await respond(request, choices, TextReply(body, choices), bool(body.stream))


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, Any]:
    """The ids of a text, in which special tokens may be written out, or of a dialog."""
    body = validate(TokenizeRequest, await read_json(request))
    chats: Chats = request.app.state.chats
    _, info = await chats.engines.pick()
    text = body.content or body.prompt or ""
    if body.messages is not None:
        chat = ChatRequest(model=body.model or info.model, messages=body.messages, tools=body.tools)
        text = (await chats.render(chat))[0].text
    tokenizer = chats.folder.tokenizer
    refuse_to_count(text, info.context_tokens)
    ids = await asyncio.to_thread(tokenizer.encode, text)
    strings = [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
    found = {"count": len(ids), "max_model_len": info.context_tokens, "tokens": ids}
    return found | ({"token_strs": strings} if body.return_token_strs else {})


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of ids, under vLLM's and llama.cpp's names for it."""
    ids = validate(DetokenizeRequest, await read_json(request)).tokens
    tokenizer = request.app.state.chats.folder.tokenizer
    unknown = [token_id for token_id in ids if not tokenizer.knows(token_id)]
    if unknown:
        raise InvalidRequest(f"tokens has {unknown[0]}, which is no token of this model", "tokens")
    text = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    return {"prompt": text, "content": text}


@router.post("/apply-template", openapi_extra=body_schema(ChatRequest))
async def apply_template(request: Request) -> dict[str, Any]:
    """A dialog as the model reads it. Takes the body of a chat; the model's own id is the default."""
    chats: Chats = request.app.state.chats
    _, info = await chats.engines.pick()
    data = await read_json(request)
    chat = validate(ChatRequest, {"model": info.model, **data} if isinstance(data, dict) else data)
    prompt, _ = await chats.render(chat)
    return {"prompt": chats.folder.tokenizer.restore(prompt.text)}
