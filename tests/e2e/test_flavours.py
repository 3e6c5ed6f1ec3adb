"""The demo model through every flavour of API, with the official clients: one model, one answer."""

import httpx
from anthropic import Anthropic
from running import Running, user

QUESTION = "What is 20 + 22?"


def test_every_flavour_gives_the_same_answer(stack: Running) -> None:
    plain = stack.client.models.list().data[0].id
    chat = stack.client.chat.completions.create(
        model=plain,
        messages=[user(QUESTION)],
        temperature=0,
        logprobs=True,
        top_logprobs=2,  # type: ignore[list-item]
    )
    said = chat.choices[0].message.content or ""
    assert "42" in said
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == said
    assert all(token.top_logprobs[0].token == token.token for token in logprobs.content), "greedy is the most probable"

    assert stack.client.responses.create(model=plain, input=QUESTION, temperature=0).output_text == said
    with Anthropic(base_url=stack.url, api_key="none", max_retries=0) as client:
        asked = {"model": plain, "max_tokens": 200, "messages": [user(QUESTION)], "extra_body": {"temperature": 0}}
        assert client.messages.create(**asked).content[0].text == said
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_text() == said

    prompt = httpx.post(f"{stack.url}/apply-template", json={"messages": [user(QUESTION)]}).json()["prompt"]
    text = stack.client.completions.create(model=plain, prompt=prompt, temperature=0, max_tokens=200).choices[0].text
    assert text.strip() == said


def test_a_thinking_budget_ends_the_thinking(stack: Running) -> None:
    think = stack.client.models.list().data[1].id

    def reasoning_tokens(**more: int) -> int:
        reply = stack.client.chat.completions.create(
            model=think,
            messages=[user(QUESTION)],
            temperature=0,
            max_tokens=200,
            extra_body=more,  # type: ignore[list-item]
        )
        assert reply.choices[0].message.content, "an answer follows"
        assert reply.usage is not None
        assert reply.usage.completion_tokens_details is not None
        return reply.usage.completion_tokens_details.reasoning_tokens or 0

    assert reasoning_tokens() > 4
    assert reasoning_tokens(thinking_budget=3) == 4, "three and the end"
