"""Every client library does what people use it for, against the whole product with the demo model."""

import gc
from collections.abc import Iterator

import pytest
from clients import Anthropic, Client, LangChain, LiteLlm, OpenAi, Sum
from clients_agents import PydanticAi
from running import Running, until

# LiteLLM's own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Item .* is using the `ReadOnly` qualifier:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning"),
]
CLIENTS = (OpenAi, Anthropic, LiteLlm, LangChain, PydanticAi)


@pytest.fixture(params=CLIENTS, ids=lambda kind: kind.__name__)
def client(request: pytest.FixtureRequest, stack: Running) -> Iterator[Client]:
    made: Client = request.param(stack.url, stack.client.models.list().data[0].id)
    yield made
    made.close()
    gc.collect()


def test_chat(client: Client) -> None:
    assert "42" in client.chat()


def test_stream(client: Client) -> None:
    pieces = client.stream()
    assert "".join(pieces) == client.chat()
    assert len(pieces) > 3


def test_tool(client: Client) -> None:
    name, arguments = client.tool()
    assert name == "City"
    assert set(arguments) == {"city", "days"}
    assert isinstance(arguments["city"], str)
    assert isinstance(arguments["days"], int)


def test_schema(client: Client) -> None:
    assert isinstance(client.schema(), Sum)


def test_leaving_in_the_middle_frees_the_place(client: Client, stack: Running) -> None:
    cancelled = "thimble_request_failures_total{code=cancelled}"
    before = stack.metrics()[cancelled]
    pieces = client.pieces()
    assert next(piece for piece in pieces if piece)
    assert until(lambda: stack.metrics()["thimble_num_requests_running"] == 1)
    pieces.close()  # type: ignore[attr-defined]
    assert until(lambda: stack.metrics()["thimble_num_requests_running"] == 0)
    assert stack.metrics()[cancelled] == before + 1
