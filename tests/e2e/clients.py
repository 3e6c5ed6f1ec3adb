"""Real client libraries, each asked to do the same: a chat, a stream, a tool call, an answer by a schema, and to leave
in the middle. What a library calls these things is owned here; what must come of them, by test_clients.py.

Every text and number has a limit: the demo model, made to begin one, may never come to its end."""

import json
import os
from collections.abc import Iterator
from typing import Any, Literal, Protocol

import anthropic
import openai
from pydantic import BaseModel, Field

# Read when they are imported: else LiteLLM fetches prices, and LangChain may send traces.
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}

QUESTION = "What is 20 + 22?"
STORY = "Tell me a short story about a fox."
WEATHER = "What is the weather in Paris?"
LONG_TOKENS = 2000
ENDLESS: Any = {"ignore_eos": True}  # so that it still lasts when its client leaves
ENDLESS_LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 500}  # where there is no such field


class City(BaseModel):
    """Look up the weather of a city."""

    city: str = Field(max_length=20)
    days: int = Field(ge=0, le=99)


class Sum(BaseModel):
    """What is known of a sum."""

    parity: Literal["even", "odd"]
    positive: bool


class Client(Protocol):
    """Greedy. `model` is the plain id."""

    def __init__(self, url: str, model: str) -> None: ...

    def chat(self) -> str:
        """The answer to QUESTION."""

    def stream(self) -> list[str]:
        """The same in pieces."""

    def tool(self) -> tuple[str, dict[str, Any]]:
        """The call that WEATHER leads to: City is the only tool, and one must be called."""

    def schema(self) -> Any:
        """The answer to QUESTION as the library makes it of a Sum."""

    def pieces(self) -> Iterator[str]:
        """A long answer to STORY. Closing it must end the request."""

    def close(self) -> None: ...


class OpenAi:
    def __init__(self, url: str, model: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._more: Any = {"model": model, "temperature": 0}

    def chat(self) -> str:
        reply = self._client.chat.completions.create(messages=[_user(QUESTION)], **self._more)
        return reply.choices[0].message.content or ""

    def stream(self) -> list[str]:
        with self._client.chat.completions.stream(messages=[_user(QUESTION)], **self._more) as stream:
            return [event.delta for event in stream if event.type == "content.delta"]

    def tool(self) -> tuple[str, dict[str, Any]]:
        tools = [openai.pydantic_function_tool(City)]
        with self._client.chat.completions.stream(
            messages=[_user(WEATHER)], tools=tools, tool_choice="required", **self._more
        ) as stream:
            [call] = stream.get_final_completion().choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, City)
        return call.function.name, call.function.parsed_arguments.model_dump()

    def schema(self) -> Any:
        messages = [_user(QUESTION)]
        reply = self._client.chat.completions.parse(messages=messages, response_format=Sum, **self._more)
        assert self._client.responses.parse(input=QUESTION, text_format=Sum, **self._more).output_parsed is not None
        return reply.choices[0].message.parsed

    def pieces(self) -> Iterator[str]:
        stream = self._client.chat.completions.create(
            messages=[_user(STORY)], stream=True, max_tokens=LONG_TOKENS, extra_body=ENDLESS, **self._more
        )
        with stream:
            for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    def close(self) -> None:
        self._client.close()


class Anthropic:
    def __init__(self, url: str, model: str) -> None:
        self._client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60)
        self._more: Any = {"model": model, "max_tokens": 200, "extra_body": {"temperature": 0}}

    def chat(self) -> str:
        return self._client.messages.create(messages=[_user(QUESTION)], **self._more).content[0].text

    def stream(self) -> list[str]:
        with self._client.messages.stream(messages=[_user(QUESTION)], **self._more) as stream:
            return list(stream.text_stream)

    def tool(self) -> tuple[str, dict[str, Any]]:
        tool = {"name": "City", "description": City.__doc__, "input_schema": City.model_json_schema()}
        with self._client.messages.stream(
            messages=[_user(WEATHER)], tools=[tool], tool_choice={"type": "tool", "name": "City"}, **self._more
        ) as stream:
            [call] = stream.get_final_message().content
        return call.name, call.input

    def schema(self) -> Any:
        reply = self._client.messages.parse(messages=[_user(QUESTION)], output_format=Sum, **self._more)
        return reply.parsed_output

    def pieces(self) -> Iterator[str]:
        more = self._more | {"max_tokens": LONG_TOKENS}
        more["extra_body"] = {
            "temperature": 0,
            "output_config": {"format": {"type": "json_schema", "schema": ENDLESS_LIST}},
        }
        with self._client.messages.stream(messages=[_user(STORY)], **more) as stream:
            yield from stream.text_stream

    def close(self) -> None:
        self._client.close()


class LiteLlm:
    def __init__(self, url: str, model: str) -> None:
        import litellm

        self._ask = litellm.completion
        key = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 60}
        self._more: Any = {"model": f"openai/{model}", "temperature": 0} | key

    def chat(self) -> str:
        return self._ask(messages=[_user(QUESTION)], **self._more).choices[0].message.content

    def stream(self) -> list[str]:
        options = {"include_usage": True}
        stream = self._ask(messages=[_user(QUESTION)], stream=True, stream_options=options, **self._more)
        return [piece for chunk in stream if (piece := chunk.choices[0].delta.content if chunk.choices else "")]

    def tool(self) -> tuple[str, dict[str, Any]]:
        tools = [openai.pydantic_function_tool(City)]
        reply = self._ask(messages=[_user(WEATHER)], tools=tools, tool_choice="required", **self._more)
        [call] = reply.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def schema(self) -> Any:
        reply = self._ask(messages=[_user(QUESTION)], response_format=Sum, **self._more)
        return Sum.model_validate_json(reply.choices[0].message.content)

    def pieces(self) -> Iterator[str]:
        long: Any = {"max_tokens": LONG_TOKENS, "extra_body": ENDLESS}
        stream = self._ask(messages=[_user(STORY)], stream=True, **long, **self._more)
        try:
            for chunk in stream:
                yield chunk.choices[0].delta.content or ""
        finally:
            stream.completion_stream.close()  # the wrapper has no close of its own

    def close(self) -> None:
        pass


class LangChain:
    def __init__(self, url: str, model: str) -> None:
        from langchain_openai import ChatOpenAI

        key: Any = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60}
        self._chat = ChatOpenAI(model=model, temperature=0, **key)
        self._long = ChatOpenAI(model=model, temperature=0, max_tokens=LONG_TOKENS, extra_body=ENDLESS, **key)

    def chat(self) -> str:
        return str(self._chat.invoke(QUESTION).content)

    def stream(self) -> list[str]:
        return [str(chunk.content) for chunk in self._chat.stream(QUESTION) if chunk.content]

    def tool(self) -> tuple[str, dict[str, Any]]:
        [call] = self._chat.bind_tools([City], tool_choice="any").invoke(WEATHER).tool_calls
        return call["name"], call["args"]

    def schema(self) -> Any:
        by_call = self._chat.with_structured_output(Sum, method="function_calling").invoke(QUESTION)
        assert isinstance(by_call, Sum)
        return self._chat.with_structured_output(Sum, method="json_schema").invoke(QUESTION)

    def pieces(self) -> Iterator[str]:
        stream = self._long.stream(STORY)
        try:
            for chunk in stream:
                yield str(chunk.content)
        finally:
            stream.close()

    def close(self) -> None:
        """Its connections are shared by all of its clients, and stay."""


def _user(text: str) -> Any:
    return {"role": "user", "content": text}
