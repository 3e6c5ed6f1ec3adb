"""pydantic-ai as a client of clients.py's kind. It is asynchronous inside, and leaves its event loop to us."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
from clients import ENDLESS, LONG_TOKENS, QUESTION, STORY, WEATHER, City, Sum
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class PydanticAi:
    def __init__(self, url: str, model: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        self._model = OpenAIChatModel(model, provider=OpenAIProvider(openai_client=self._client))

    def _agent(self, output: Any = str, **more: Any) -> Agent[None, Any]:
        settings: Any = {"temperature": 0, "max_tokens": LONG_TOKENS, **more}
        return Agent(self._model, output_type=output, model_settings=settings)

    def chat(self) -> str:
        return str(self._agent().run_sync(QUESTION).output)

    def stream(self) -> list[str]:
        return list(self._pieces(QUESTION))

    def tool(self) -> tuple[str, dict[str, Any]]:
        """An output by a tool is a call that must be made."""
        output = self._agent(ToolOutput(City, name="City")).run_sync(WEATHER).output
        return "City", output.model_dump()

    def schema(self) -> Any:
        return self._agent(NativeOutput(Sum)).run_sync(QUESTION).output

    def pieces(self) -> Iterator[str]:
        return self._pieces(STORY, extra_body=ENDLESS)

    def _pieces(self, question: str, **more: Any) -> Iterator[str]:
        with self._agent(**more).run_stream_sync(question) as result:
            yield from result.stream_text(delta=True, debounce_by=None)

    def close(self) -> None:
        loop = asyncio.get_event_loop()
        loop.run_until_complete(self._client.close())
        asyncio.set_event_loop(None)
        loop.close()
