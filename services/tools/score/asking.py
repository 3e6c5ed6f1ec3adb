"""Two ways to ask a model: a server with OpenAI's chat completions, or a checkpoint in this process by the engine's own
model on the CPU. Both are asked greedily. Owns no question and no judgement."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from services.api.model_folder import load_model_folder
from services.api.parsers.answer import AnswerParser, Content, Reasoning
from services.api.parsers.tool_calls import CallStart
from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.model import Model, Segment
from services.engine.pages import PagePool, pages_for
from services.engine.state import State
from services.tools import completions
from services.tools.repack import repack

CHUNK_TOKENS = 64
REPLY_TOKENS = 256
Messages = Sequence[Mapping[str, Any]]


@dataclass
class Reply:
    """`finished`: the model ended it, not the limit of tokens."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    finished: bool = False


class Asked(Protocol):
    def ask(self, messages: Messages, tools: Sequence[Any] = (), think: bool = False) -> Reply: ...


class Server:
    """Raises completions.ServerError."""

    def __init__(self, url: str, model: str) -> None:
        self._server, self._model = completions.Server(url, timeout_s=600), model

    def ask(self, messages: Messages, tools: Sequence[Any] = (), think: bool = False) -> Reply:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": REPLY_TOKENS,
            "chat_template_kwargs": {"enable_thinking": think},
        }
        if tools:
            body["tools"] = list(tools)
        choice = self._server.choice(body)
        said = choice["message"]
        calls = [call["function"] for call in said.get("tool_calls") or ()]
        return Reply(
            said.get("content") or "",
            said.get("reasoning_content") or "",
            [(call["name"], arguments(call["arguments"])) for call in calls],
            choice["finish_reason"] in ("stop", "tool_calls"),
        )


class InProcess:
    """`scratch`: an empty folder for the store that is made of the checkpoint."""

    def __init__(self, checkpoint: Path, scratch: Path) -> None:
        self._words = load_model_folder(checkpoint)
        store: Store = repack(checkpoint, scratch / "store", say=lambda text: None)
        self._experts = open_experts(store, slots=sum(map(len, store.blocks)))
        self._model = Model(store.dense(), store.config, self._experts)

    def close(self) -> None:
        self._experts.close()

    @torch.inference_mode()
    def ask(self, messages: Messages, tools: Sequence[Any] = (), think: bool = False) -> Reply:
        prompt = self._words.template.prompt(messages, list(tools) or None, {"enable_thinking": think})
        ids = self._words.tokenizer.encode(prompt.text)
        pages = pages_for(len(ids) + REPLY_TOKENS)
        state = State(self._model.config, PagePool(self._model.config, pages))
        for begin in range(0, len(ids), CHUNK_TOKENS):
            logits = self._model.forward([Segment(state, ids[begin : begin + CHUNK_TOKENS])])
        said: list[int] = []
        stops = self._words.defaults.stop_ids
        while (token := int(logits[0].argmax())) not in stops and len(said) < REPLY_TOKENS:
            said.append(token)
            logits = self._model.forward([Segment(state, [token])])
        state.release()
        text = b"".join(self._words.tokenizer.shown_bytes(token) for token in said).decode(errors="replace")
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        return parsed(text, prompt.starts_thinking, schemas, len(said) < REPLY_TOKENS)


def parsed(text: str, starts_thinking: bool, schemas: Mapping[str, Any], finished: bool) -> Reply:
    parser = AnswerParser(starts_thinking, schemas or None, ())
    reply, names, pieces = Reply(finished=finished), list[str](), list[str]()
    for delta in [*parser.feed(text), *parser.finish(cut=not finished)]:
        match delta:
            case Content(said):
                reply.content += said
            case Reasoning(thought):
                reply.reasoning += thought
            case CallStart():
                names.append(delta.name)
                pieces.append("")
            case _:
                pieces[delta.index] += delta.json
    reply.calls = [(name, arguments(piece)) for name, piece in zip(names, pieces, strict=True)]
    return reply


def arguments(text: str) -> dict[str, Any]:
    """Of a call; {} if they are no JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
