"""`thimble record STORE FOLDER`: dialogs with a store's model, each in a trace of its own, for `thimble simulate`.

Greedy answers, a cold cache for every dialog, nothing beside it: two recordings of one store differ in nothing but what
the disk did. To record what an owner really asks, set THIMBLE_ENGINE_TRACE instead.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from services.api.model_folder import ModelFolder, load_model_folder
from services.engine.errors import TraceError
from services.engine.experts.store import Store
from services.engine.experts.streamer import Experts, open_experts
from services.engine.experts.trace import Header, Recorder
from services.engine.load import served_name
from services.engine.model import Model, Segment
from services.engine.pages import PagePool, pages_for
from services.engine.state import State
from services.tools.amounts import amount, whole

CHUNK_TOKENS = 64  # as the engine's setting
MOST_BYTES = 1_000_000_000
DIALOGS = (
    (
        "Please tell me a short story about a boy who finds a small dog in the snow.",
        "What is the name of the dog?",
        "Tell me what they did in the spring.",
    ),
    ("What is the capital of Italy?", "And of France?", "Which of the two is larger, and on which rivers do they lie?"),
    (
        "Tom has 14 apples and gives 5 of them to Anna. How many does he have left?",
        "Anna eats 2 of hers. How many does she have?",
        "How many apples do they have together?",
    ),
    ("Write a Python function that counts the words of a text.", "Now make it ignore capital letters."),
    (
        "My name is Clara and I live in Oslo. I have a red bicycle and a grey cat.",
        "What colour is my cat, and where do I live?",
        "Write a poem about the two of us.",
    ),
    ("How does a lighthouse work?", "Who wound the clockwork before there was electricity?", "Make that one sentence."),
)


def record(
    store: Store,
    folder: Path,
    *,
    slots: int,
    answer_tokens: int = 60,
    dialogs: int = len(DIALOGS),
    prefetch: str = "off",
    beside: Callable[[Experts], Experts] = lambda experts: experts,
) -> list[Path]:
    """The traces' paths. `beside` may put something between model and experts. Raises what opening the store raises."""
    words = load_model_folder(store.folder)
    paths = []
    for number, turns in enumerate(DIALOGS[:dialogs], start=1):
        recorder = Recorder(folder / f"dialog{number}.trace", Header.of(store, served_name(store)), MOST_BYTES)
        experts = open_experts(store, slots=slots, prefetch=prefetch, trace=recorder)
        try:
            _talk(Model(store.dense(), store.config, beside(experts), recorder), words, turns, answer_tokens)
        finally:
            experts.close()
        paths.append(recorder.path)
    return paths


def _talk(model: Model, words: ModelFolder, turns: tuple[str, ...], answer_tokens: int) -> None:
    messages: list[dict[str, str]] = []
    ends = {token.id for token in words.tokenizer.added.values() if token.literal in words.template.turn_tokens}
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        rendered = words.template.prompt(messages, options={"enable_thinking": False})
        ids = words.tokenizer.encode(rendered.text)
        pages = pages_for(len(ids) + answer_tokens)
        state = State(model.config, PagePool(model.config, pages))
        for begin in range(0, len(ids), CHUNK_TOKENS):
            logits = model.forward([Segment(state, ids[begin : begin + CHUNK_TOKENS])])
        answer: list[int] = []
        while len(answer) < answer_tokens and (token := int(torch.argmax(logits[0]))) not in ends:
            answer.append(token)
            logits = model.forward([Segment(state, [token])])
        state.release()
        text = b"".join(words.tokenizer.shown_bytes(token) for token in answer).decode(errors="replace")
        messages.append({"role": "assistant", "content": text})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble repack` wrote")
    parser.add_argument("folder", type=Path, help="where the traces go")
    parser.add_argument("--share", type=amount, default=0.24, help="share of all experts with a slot in RAM")
    parser.add_argument("--answer-tokens", type=whole, default=60, help="longest answer")
    parser.add_argument("--prefetch", choices=("off", "on", "auto"), default="off")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TraceError(
            f"{args.folder}: no traces can be written there: {error.strerror}; give another folder"
        ) from error
    slots = max(store.config.experts_per_token, int(args.share * sum(map(len, store.blocks))))
    for path in record(store, args.folder, slots=slots, answer_tokens=args.answer_tokens, prefetch=args.prefetch):
        print(path)
    return 0
