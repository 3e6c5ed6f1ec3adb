"""Two engine containers behind one api: a dialog whose engine is killed goes on at the other, from its snapshot. What
was read is counted by the engines themselves. A part of the compose drill.
"""

import time
from typing import Any

import openai

SERVICE = "engine-cpu"
CLOSING_TOKENS = 8  # of the template, between two turns
READ = (
    "import urllib.request as u; print(sum(float(line.split()[-1]) for line in "
    "u.urlopen('http://127.0.0.1:8601/metrics', timeout=10).read().decode().splitlines() "
    "if line.startswith('thimble_prompt_tokens_total')))"
)


def check(drill: Any, client: openai.OpenAI, model: str) -> None:
    """`drill`: a Drill whose stack runs with one engine; it runs with two afterwards."""
    with drill.timed("stack.second_engine_s", "scaled to two, until healthy"):
        drill.compose("up", "--detach", "--wait", "--wait-timeout", "300", "--scale", f"{SERVICE}=2", *drill.services)
    engines = drill.compose("ps", "--quiet", SERVICE).split()
    assert len(engines) == 2
    owners = set()
    for number in range(12):  # the api has to hear of the second one, and each dialog has its own
        owners.add(_goes_on(drill, client, model, engines, number, kill=False))
        if len(owners) == 2:
            break
    assert owners == set(engines), "both engines have dialogs of their own"
    _goes_on(drill, client, model, engines, 100, kill=True)


def _goes_on(drill: Any, client: openai.OpenAI, model: str, engines: list[str], number: int, kill: bool) -> str:
    """A dialog of two turns -> which engine had the first one; it is killed between them, if so wanted."""
    dialog: list[Any] = [{"role": "user", "content": f"Tell me a short story about {number} foxes."}]
    before = _read(drill, engines)
    first = _ask(client, model, dialog)
    after = _read(drill, engines)
    (owner,) = [engine for engine in engines if after[engine] > before[engine]]
    assert after[owner] - before[owner] == first.usage.prompt_tokens - _cached(first)
    time.sleep(3)  # what is in flight is stored, as while somebody reads the answer
    left = [engine for engine in engines if engine != owner or not kill]
    if kill:
        drill.docker("kill", owner)
    dialog += [{"role": "assistant", "content": first.choices[0].message.content}]
    dialog += [{"role": "user", "content": "What is the capital of France?"}]
    before = _read(drill, left)
    begin = time.monotonic()
    second = _ask(client, model, dialog)
    seconds = time.monotonic() - begin
    ran = {engine: tokens - before[engine] for engine, tokens in _read(drill, left).items()}
    assert sum(ran.values()) == second.usage.prompt_tokens - _cached(second)
    assert _cached(second) >= first.usage.prompt_tokens - CLOSING_TOKENS, "the history was read again"
    if kill:
        (other,) = left
        note = f"an engine of two was killed after {first.usage.prompt_tokens} prompt tokens; of the next turn's "
        note += f"{second.usage.prompt_tokens} the other read {ran[other]:.0f}"
        drill.figure("stack.killed_engine_next_answer_s", seconds, "s", note)
        drill.figure("stack.killed_engine_tokens_read_again", ran[other], "tokens", note)
    else:
        assert ran[owner] > 0, "a dialog stays where it is"
    return owner


def _ask(client: openai.OpenAI, model: str, dialog: list[Any]) -> Any:
    return client.chat.completions.create(model=model, messages=dialog, temperature=0, max_tokens=24)


def _cached(reply: Any) -> int:
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def _read(drill: Any, engines: list[str]) -> dict[str, float]:
    """Prompt tokens that each container's engine ran for requests."""
    return {engine: float(drill.docker("exec", engine, "python", "-c", READ)) for engine in engines}
