"""Real answers from the demo model through the whole product, with the official client."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from running import Reply, Running, assistant, until, user

from services.engine.experts.store import Store

STORY = "Tell me a short story about a fox."
QUESTIONS = ("What is 20 + 22?", "What is the capital of France?", STORY)
COMMON_WORD = re.compile(
    r"the|an?|and|to|of|was|is|it|he|she|they|his|her|in|on|with|for|that|said|very|little|one|day"
)


def models(running: Running) -> tuple[str, str]:
    plain, think, *_ = [model.id for model in running.client.models.list().data]  # then those for documents
    assert think == f"{plain}-think"
    return plain, think


def ask(running: Running, messages: list[Any], **options: Any) -> Reply:
    return Reply(running.client, models(running)[0], messages, **options)


def is_english(text: str) -> bool:
    words = re.findall(r"[a-z']+", text.lower())
    return len(words) >= 20 and sum(bool(COMMON_WORD.fullmatch(word)) for word in words) / len(words) > 0.25


def test_a_streamed_answer_in_english(stack: Running) -> None:
    story = ask(stack, [user(STORY)])
    assert story.chunks > 20
    assert is_english(story.content), story.content
    assert not is_english("lorem ipsum dolor sit amet " * 5)
    assert not is_english("the " * 10)


def test_answers_are_right(stack: Running) -> None:
    """The demo model knows its sums: garbage that looks like English would not."""
    assert "42" in ask(stack, [user("What is 20 + 22?")]).content
    assert "Paris" in ask(stack, [user("What is the capital of France?")]).content


def test_a_whole_answer_is_the_streamed_one(stack: Running) -> None:
    plain, _ = models(stack)
    whole = stack.client.chat.completions.create(model=plain, messages=[user(STORY)], temperature=0, max_tokens=64)  # type: ignore[list-item]
    streamed = ask(stack, [user(STORY)])
    assert whole.choices[0].message.content == streamed.content
    assert whole.choices[0].finish_reason == streamed.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == streamed.completion_tokens == 64


def test_a_second_turn_comes_from_a_snapshot_and_says_the_same(stack: Running, bare_stack: Running) -> None:
    dialog = [user("What is the capital of France?")]
    first = ask(stack, dialog)
    dialog += [assistant(first.content), user(STORY)]
    assert ask(bare_stack, dialog).cached_tokens == 0
    expected = ask(bare_stack, dialog).content
    assert is_english(expected)

    second = ask(stack, dialog)
    assert second.cached_tokens > 0
    assert second.content == expected
    again = ask(stack, dialog)
    assert again.cached_tokens >= second.cached_tokens
    assert again.content == expected


def test_a_snapshot_survives_in_the_store_alone(stack: Running) -> None:
    """After the engine's own hot states are of no use (another dialog's end), Redis still has the beginning."""
    before = stack.metrics()
    ask(stack, [{"role": "system", "content": "You are a friendly helper."}, user("What is 2 + 3?")])
    stored = "thimble_api_snapshot_writes_total{result=stored}"
    assert until(lambda: stack.metrics()[stored] > before[stored])


def test_thinking_is_told_apart(stack: Running) -> None:
    _, think = models(stack)
    reply = Reply(stack.client, think, [user("What is 20 + 22?")], max_tokens=200)
    assert len(reply.reasoning.split()) > 3
    assert "42" in reply.content
    assert "think>" not in reply.reasoning + reply.content
    assert reply.finish_reason == "stop"
    assert ask(stack, [user("What is 20 + 22?")]).reasoning == ""


def test_three_chats_at_once_say_what_each_says_alone(stack: Running, bare_stack: Running) -> None:
    alone = [ask(bare_stack, [user(question)]).content for question in QUESTIONS]
    assert len(set(alone)) == len(QUESTIONS)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        for running in (stack, bare_stack):
            together = list(pool.map(lambda question, at=running: ask(at, [user(question)]).content, QUESTIONS))
            assert together == alone


def test_a_tenth_of_the_cache_says_the_same(stack: Running, bare_stack: Running, demo_store: Store) -> None:
    before = bare_stack.metrics()
    for question in QUESTIONS:
        assert ask(bare_stack, [user(question)]).content == ask(stack, [user(question)]).content
    after = bare_stack.metrics()
    slots, misses = "thimble_expert_slots{state=total}", "thimble_expert_lookups_total{phase=decode}{tier=nvme}"
    assert stack.metrics()[slots] == sum(map(len, demo_store.layers))
    assert after[slots] == sum(map(len, demo_store.blocks)) // 10
    assert after[misses] > before[misses] + 1000
    assert after["thimble_expert_cache_evictions_total"] > before["thimble_expert_cache_evictions_total"]


def test_a_seed_gives_the_same_answer_and_another_seed_another(stack: Running) -> None:
    warm: dict[str, Any] = {"temperature": 1.0, "max_tokens": 32}
    first, second = (ask(stack, [user(STORY)], seed=7, **warm).content for _ in range(2))
    assert first == second
    assert len({ask(stack, [user(STORY)], seed=seed, **warm).content for seed in range(3)}) > 1


def test_metrics_count_what_was_done(stack: Running) -> None:
    before = stack.metrics()
    replies = [ask(stack, [user("What is 31 + 11?")]), ask(stack, [user(STORY)], max_tokens=5)]
    with pytest.raises(openai.NotFoundError):
        Reply(stack.client, "no-such-model", [user("Hello")])
    after = stack.metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    prompt, cached = (sum(getattr(reply, name) for reply in replies) for name in ("prompt_tokens", "cached_tokens"))
    sampled = sum(reply.completion_tokens for reply in replies)
    assert grown("thimble_generation_tokens_total") == grown("thimble_api_completion_tokens_total") == sampled
    assert grown("thimble_prompt_tokens_total") == prompt - cached
    assert grown("thimble_prefix_cache_queries_total") == grown("thimble_api_prompt_tokens_total") == prompt
    assert grown("thimble_prefix_cache_hits_total") == grown("thimble_api_cached_prompt_tokens_total") == cached
    for reason in ("stop", "length"):
        wanted = sum(reply.finish_reason == reason for reply in replies)
        assert grown(f"thimble_request_success_total{{finished_reason={reason}}}") == wanted == 1
        assert grown(f"thimble_api_answers_total{{finish_reason={reason}}}") == wanted
    assert grown("thimble_time_to_first_token_seconds_count") == len(replies)
    assert grown("thimble_inter_token_latency_seconds_count") == sampled - len(replies)
    assert grown("thimble_api_errors_total{code=model_not_found}") == 1
    # A step of one token asks for 6 experts in each of 7 layers; one that tries a draft too, for what either asks for.
    lookups = sum(grown(f"thimble_expert_lookups_total{{phase=decode}}{{tier={tier}}}") for tier in ("ram", "nvme"))
    tried, right = (
        sum(grown(f"thimble_spec_decode_num_{name}_tokens_total{{kind={kind}}}") for kind in ("mtp", "ngram"))
        for name in ("draft", "accepted")
    )
    alone = (sampled - len(replies) - right) * 6 * 7
    assert alone <= lookups <= alone + tried * 6 * 7
    assert tried or lookups == alone


def test_a_client_that_hangs_up_frees_its_place(stack: Running) -> None:
    before = stack.metrics()
    plain, _ = models(stack)
    long: Any = {"messages": [user(STORY)], "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    stream = stack.client.chat.completions.create(model=plain, stream=True, **long)
    next(iter(stream))
    assert until(lambda: stack.metrics()["thimble_num_requests_running"] == 1)
    stream.close()
    assert until(lambda: stack.metrics()["thimble_num_requests_running"] == 0)
    cancelled = "thimble_request_failures_total{code=cancelled}"
    assert stack.metrics()[cancelled] == before[cancelled] + 1


def test_the_terminal_client(stack: Running) -> None:
    command = [sys.executable, "-m", "services.tools.cli", "chat", "--url", stack.url, "--temperature", "0"]
    once = subprocess.run([*command, "What is 20 + 22?"], capture_output=True, text=True, timeout=60, check=True)
    assert "42" in once.stdout
    assert re.search(
        r"tok/s, \d+ tokens, first after \d+\.\d\d s, \d+ of \d+ prompt tokens from a snapshot", once.stdout
    )
    typed = "What is the capital of France?\n/think\nWhat is 20 + 22?\n/quit\n"
    talk = subprocess.run(command, input=typed, capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in talk.stdout
    assert "-think" in talk.stdout
    assert re.search(r"\[.*20.*\]\n.*42", talk.stdout, re.DOTALL), talk.stdout
    refused = subprocess.run(
        [*command, "--model", "nobody", "Hi"], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 1
    assert "nobody" in refused.stderr
