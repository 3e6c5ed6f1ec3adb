"""Random JSON Schemas, sensible and senseless: refused by name or followed, and what is followed to its end is JSON."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from demo_engine import STOP, tokenizer

from services.engine.errors import GrammarError
from services.engine.experts.store import Store
from services.engine.grammar import Grammars
from services.engine.request import Form, Grammar

TYPES = ["string", "object", "integer", "number", "array", "boolean", "null", ["string", "null"], [{}, 5]]
ODD = [None, True, 0, -1, 3.5, 10**9, "", "#", "#/$defs/a", "^a+$", "((", "date", "é\n", [], {}]
NAMES = "type properties required enum const anyOf oneOf allOf $ref $defs items prefixItems minItems maxItems pattern"
NAMES += " format minimum maximum additionalProperties not minLength title multipleOf patternProperties"


@pytest.fixture(scope="module")
def grammars(demo_store: Store) -> Iterator[Grammars]:
    made = Grammars(demo_store.folder / "tokenizer.json", 4096, 100_000, 60.0)
    yield made
    made.close()


def schema(r: random.Random, depth: int) -> Any:
    if depth == 0:
        return r.choice([{"type": r.choice(TYPES)}, {"enum": ["a", 1, None]}, {}, r.choice(ODD)])
    found: dict[str, Any] = {}
    for name in r.sample(NAMES.split(), r.randrange(1, 5)):
        inner = [schema(r, depth - 1) for _ in range(r.randrange(1, 4))]
        sensible: dict[str, Any] = {
            "type": r.choice(TYPES),
            "required": r.sample("abcz", 2),
            "minItems": r.randrange(3),
            **{key: dict(zip("abc", inner, strict=False)) for key in ("properties", "$defs", "patternProperties")},
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems", "enum"), inner),
            **dict.fromkeys(("items", "additionalProperties", "not"), inner[0]),
        }
        found[name] = sensible.get(name, r.choice(ODD)) if r.random() < 0.9 else r.choice(ODD)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_they_are_refused_or_followed(grammars: Grammars, demo_store: Store, seed: int) -> None:
    r = random.Random(seed)
    refused = followed = whole = 0
    for _ in range(60):
        text = json.dumps(schema(r, 3))
        ids: list[int] = []
        try:
            matcher = grammars.matcher(Grammar(Form.JSON_SCHEMA, text), STOP)
            while len(ids) < 40 and not STOP & {*ids}:
                allowed = matcher.allowed(may_stop=True).nonzero()[:, 0].tolist()
                ends = STOP & {*allowed}
                ids.append(min(ends) if ends else r.choice(allowed))
                if not ends:
                    matcher.accept(ids[-1])
        except GrammarError:
            refused += 1
            continue
        followed += 1
        if STOP & {*ids}:
            json.loads(tokenizer(demo_store.folder).decode(ids[:-1], skip_special_tokens=False))
            whole += 1
    assert min(refused, followed, whole) > 0, (refused, followed, whole)
