"""What a grammar that the api wrote lets the demo's tokens say, as the engine would find out."""

import json
from functools import cache

from llguidance import LLMatcher, LLTokenizer, grammar_from
from running_api import MODEL_DIR
from tokenizers import Tokenizer

from services.rpc import engine_pb2 as pb

FORMS = {"json_schema": "json_schema", "regex": "regex", "lark": "lark", "gbnf": "gbnf"}


@cache
def _tokenizers() -> tuple[LLTokenizer, Tokenizer]:
    text = (MODEL_DIR / "tokenizer.json").read_text()
    return LLTokenizer(text, n_vocab=4096), Tokenizer.from_str(text)


def accepts(grammar: pb.Grammar, text: str) -> bool:
    """Whether an answer may be this text, special tokens written out, and end there."""
    form = grammar.WhichOneof("form")
    assert form is not None
    words, tokenizer = _tokenizers()
    matcher = LLMatcher(words, grammar_from(FORMS[form], getattr(grammar, form)), log_level=0)  # type: ignore[arg-type]
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def call(name: str, **arguments: object) -> str:
    """A call as the model writes it."""
    text = f"<tool_call>\n<function={name}>\n"
    for key, value in arguments.items():
        shown = json.dumps(value) if isinstance(value, list | dict) else str(value)
        text += f"<parameter={key}>\n{shown}\n</parameter>\n"
    return text + "</function>\n</tool_call>"
