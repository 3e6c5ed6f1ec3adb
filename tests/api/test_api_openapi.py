"""The published OpenAPI document, and what schemathesis makes of it: requests of every shape that it allows, and more.
None may be a fault of the server's, hang, or be answered in a way that the document does not know."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from running_api import RunningApi
from scripted_engine import ScriptedEngine

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
REQUEST_LIMIT_S = 10
RUN_LIMIT_S = 280  # it takes 10
EXAMPLES = 6  # an endpoint; with hundreds the same was found as with these


@pytest.fixture
def document(api: RunningApi) -> dict[str, Any]:
    published: dict[str, Any] = api.client.get("/openapi.json").json()
    return published


def walk(value: Any) -> list[dict[str, Any]]:
    """Every object in it, itself included."""
    if isinstance(value, list):
        return [found for inner in value for found in walk(inner)]
    return [value, *(found for inner in value.values() for found in walk(inner))] if isinstance(value, dict) else []


def fuzz(document: dict[str, Any], url: str, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Schemathesis, always with the same requests. Its exit status is 1 if it found something."""
    path = folder / "openapi.json"
    path.write_text(json.dumps(document))
    command = [Path(sys.executable).parent / "schemathesis", "run", path, "--url", url, "--checks", CHECKS]
    command += ["--phases", "fuzzing", "--max-examples", str(EXAMPLES), "--seed", "1", "--continue-on-failure"]
    command += ["--generation-database", "none", "--request-timeout", str(REQUEST_LIMIT_S), "--warnings", "off"]
    return subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False, cwd=folder
    )


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = {found["$ref"] for found in walk(document) if isinstance(found.get("$ref"), str)}
    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references <= known
    assert len(references) > 10


def test_every_body_is_described(document: dict[str, Any]) -> None:
    posts = {path: kinds["post"] for path, kinds in document["paths"].items() if "post" in kinds}
    without = {path for path, post in posts.items() if "requestBody" not in post}
    assert without == {"/v1/responses/{response_id}/cancel"}
    for path in set(posts) - without:
        assert posts[path]["requestBody"]["content"]["application/json"]["schema"]["properties"], path


@pytest.mark.timeout(RUN_LIMIT_S + 20)
def test_no_request_is_a_fault_of_ours(
    api: RunningApi, engine: ScriptedEngine, document: dict[str, Any], tmp_path: Path
) -> None:
    # Else nearly every request would be refused for its model.
    for found in walk(document):
        if "model" in found.get("properties", {}):
            found["properties"]["model"] = {"enum": ["demo", "demo-think"]}
    run = fuzz(document, api.url, tmp_path)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "No issues found" in run.stdout
    assert engine.calls, "some were answered"


def test_schemathesis_can_find_something(api: RunningApi, document: dict[str, Any], tmp_path: Path) -> None:
    """A control: the document says what is not so."""
    responses = document["paths"]["/health"]["get"]["responses"]
    responses["200"]["content"]["application/json"]["schema"] = {"type": "integer"}
    run = fuzz(document, api.url, tmp_path, "--include-path", "/health")
    assert run.returncode == 1
    assert "/health" in run.stdout


def test_a_bias_of_null_is_none(api: RunningApi, engine: ScriptedEngine) -> None:
    """Found by schemathesis: every field that may be null may be sent as null."""
    assert api.chat("Hi", logit_bias=None)["choices"]
    schema = api.client.get("/openapi.json").json()["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    fields = schema["content"]["application/json"]["schema"]["properties"]
    optional = dict.fromkeys(set(fields) - {"model", "messages"})
    assert len(optional) > 20
    assert api.chat("Hi", **optional)["choices"]


def test_metadata_of_null_is_none(api: RunningApi) -> None:
    body = {"model": "demo", "input": "Hi", "metadata": None}
    assert api.client.post("/v1/responses", json=body).status_code == 200
