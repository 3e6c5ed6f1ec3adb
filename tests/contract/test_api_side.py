"""The contract from the api's side: what it may send, what it must understand, nothing left out."""

import ast
import re
from pathlib import Path

from services.api import errors
from services.api.metrics import LOOKUPS
from services.engine import errors as engine_errors
from services.engine.server import CODE_KEY, INTERNAL_CODE, RETRY_AFTER_KEY
from services.rpc import engine_pb2 as pb

ROOT = Path(__file__).parents[2]
API = sorted((ROOT / "services/api").rglob("*.py"))


def test_every_code_of_the_engine_has_a_meaning() -> None:
    codes = {
        value.code
        for value in vars(engine_errors).values()
        if isinstance(value, type) and issubclass(value, engine_errors.EngineError)
    }
    assert len(codes) > 10
    codes.add(INTERNAL_CODE)
    assert codes - set(errors.BY_ENGINE_CODE) == set(), "the api does not know these codes of the engine"
    assert set(errors.BY_ENGINE_CODE) - codes == set(), "the engine has no such codes any more"


def test_a_client_s_mistake_is_a_4xx_and_an_engine_s_trouble_a_5xx() -> None:
    mistakes = {"context_too_long", "bad_grammar", "bad_picture", "bad_sampling", "unsupported"}
    mistakes |= {"queue_full", "out_of_pages", "picture_gone"}  # of too much at once
    for code, kind in errors.BY_ENGINE_CODE.items():
        assert (kind.status < 500) == (code in mistakes), code


def test_the_engine_names_the_key_of_its_codes_as_the_api_does() -> None:
    assert errors.CODE_KEY == CODE_KEY
    assert errors.RETRY_AFTER_KEY == RETRY_AFTER_KEY


def test_every_restore_that_ends_is_counted() -> None:
    ends = {name.lower() for name in pb.Restore.Source.keys() if name != "SEND"}  # noqa: SIM118  a protobuf enum is no dict
    assert ends == set(LOOKUPS)


def test_every_kind_of_message_is_handled() -> None:
    """A kind added to GenerateOut must be thought of in the api, if only to be ignored by name here."""
    ignored = {"progress"}
    text = "".join(path.read_text() for path in API)
    kinds = [field.name for field in pb.GenerateOut.DESCRIPTOR.oneofs_by_name["message"].fields]
    assert "token" in kinds
    for kind in set(kinds) - ignored:
        assert re.search(rf'"{kind}"|\.{kind}\b', text), kind


def test_every_field_of_start_is_filled() -> None:
    """A field that the engine reads and the api never sets would be a silent default."""
    calls = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for name in ("chat.py", "sampling.py")
        for node in ast.walk(ast.parse((ROOT / "services/api" / name).read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert calls["Start"] == {field.name for field in pb.Start.DESCRIPTOR.fields}
    assert calls["Sampling"] == {field.name for field in pb.Sampling.DESCRIPTOR.fields}


def test_the_api_keeps_none_of_the_engine_s_limits_as_a_setting() -> None:
    from dataclasses import fields

    from services.api.config import ApiConfig

    limits = {"context_tokens", "vocab_size", "max_sequences", "queue_limit", "model"}
    assert limits & {field.name for field in fields(ApiConfig)} == set()
    assert limits <= {field.name for field in pb.InfoResponse.DESCRIPTOR.fields}
