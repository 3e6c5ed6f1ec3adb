"""Tokens with their log probabilities, as OpenAI's chat completions show them. Owns that form only."""

from typing import Any

from services.api.tokens import TextTokenizer
from services.rpc import engine_pb2 as pb

LEAST = -9999.0  # JSON has no infinity; OpenAI's number for what is next to impossible


def entry(tokenizer: TextTokenizer, token: pb.Token) -> dict[str, Any]:
    """A sampled token, and the most probable ones in its place."""
    top = [_one(tokenizer, other.id, other.logprob) for other in token.top]
    return {**_one(tokenizer, token.id, token.logprob), "top_logprobs": top}


def _one(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    text = data.decode("utf-8", "replace")  # a part of a character shows as U+FFFD; `bytes` has it
    return {"token": text, "logprob": max(logprob, LEAST), "bytes": list(data)}
