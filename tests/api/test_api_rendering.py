"""Templates that never end or fill the memory are stopped; whoever comes next is served."""

import asyncio
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from services.api import render, rendering
from services.api.errors import ModelFolderError, TemplateRefused
from services.api.model_folder import ModelFolder
from services.api.rendering import LARGE_BYTES, Rendering, RenderRefused, TemplateBroken, Turns
from services.api.templates import ChatTemplate

PLAIN = "{{ text }}!"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": LOOP,
    "in a single call of C": "{{ 3 ** (10 ** 9) }}",
}
HUGE = {
    "a product": "{{ text * 10 ** 10 }}",
    "a product while it is compiled": "{{ 'x' * 10 ** 10 }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a filter": "{{ text | center(10 ** 10) }}",
    "a list": "{{ ([1] * 10 ** 10) | length }}",
    "doubling": "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "indented JSON": "{{ [1] | tojson(indent=10 ** 10) }}",
    "more text than may be": "{{ text * 70000000 }}",
    "macros without end": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a deep expression": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}",
    "a tower of calls": "{{ text" + " | trim" * 50_000 + " }}",
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Rendering]:
    """With little memory and processor time."""
    one = Rendering(memory_bytes=300 << 20, cpu_s=0.3)
    yield one
    one.close()


def test_what_is_small_passes(strict: Rendering) -> None:
    assert strict.render(PLAIN, {"text": "a\ud800\udfff\U0001f98a"}) == "a\ud800\udfff\U0001f98a!"
    assert strict.render("{% for i in range(1000) %}x{% endfor %}", {}) == "x" * 1000


@pytest.mark.parametrize("name", [*ENDLESS, *HUGE])
def test_what_takes_too_much_is_stopped_and_the_next_is_served(strict: Rendering, name: str) -> None:
    with pytest.raises((RenderRefused, TemplateBroken)) as refusal:
        strict.render((ENDLESS | HUGE)[name], {"text": "x"})
    assert 0 < len(str(refusal.value)) <= render.MOST_WHY
    assert strict.render(PLAIN, {"text": "next"}) == "next!"


def test_it_is_the_limits_that_stop_them(strict: Rendering) -> None:
    """With more of both, a smaller one of each kind ends by itself."""
    roomy = Rendering()
    source = (
        "{% for i in range(3000) %}{% for j in range(1000) %}{% endfor %}{% endfor %}{{ (text * 3 ** 18) | length }}"
    )
    assert roomy.render(source, {"text": "x"}) == str(3**18)
    with pytest.raises(RenderRefused, match="memory"):
        strict.render("{{ (text * 3 ** 18) | length }}", {"text": "x"})
    roomy.close()


def test_one_that_was_killed_is_replaced(strict: Rendering) -> None:
    strict.render(PLAIN, {"text": "x"})
    os.kill(_pid(strict), signal.SIGKILL)
    assert strict.render(PLAIN, {"text": "y"}) == "y!"


def test_a_large_dialog_has_a_process_of_its_own_which_goes(strict: Rendering) -> None:
    strict.render(PLAIN, {"text": "x"})
    before = _pid(strict)
    text = "x" * (LARGE_BYTES + 1)
    assert strict.render(PLAIN, {"text": text}) == text + "!"
    assert _pid(strict) == before
    assert strict._large._process is None


@pytest.mark.parametrize("in_turn", [True, False])
def test_large_dialogs_that_wait_take_no_threads(strict: Rendering, in_turn: bool) -> None:
    """Though those who asked go away meanwhile. The control: without turns they take all there are."""
    large = {"text": "x" * (LARGE_BYTES + 1)}

    async def ask() -> list[Any]:
        threads, turns = ThreadPoolExecutor(2), Turns()
        asyncio.get_running_loop().set_default_executor(threads)
        run = turns.run if in_turn else asyncio.to_thread
        with strict._large._turn:  # one is being rendered
            asked = [asyncio.create_task(run(strict.render, PLAIN, large))]
            while in_turn and not turns._large.locked():
                await asyncio.sleep(0.001)
            asked += [asyncio.create_task(run(strict.render, PLAIN, large)) for _ in range(3)]
            while len(turns._large._waiters or ()) < 3 if in_turn else threads._work_queue.qsize() < 2:
                await asyncio.sleep(0.001)
            asked[0].cancel()
            await asyncio.sleep(0.1)  # for the next one, if his turn came now
            ordinary = asyncio.create_task(turns.run(strict.render, PLAIN, {"text": "y"}))
            done, _ = await asyncio.wait([ordinary], timeout=10 if in_turn else 0.3)
            assert bool(done) == in_turn
        assert await ordinary == "y!"
        return await asyncio.gather(*asked, return_exceptions=True)

    gone, *rendered = asyncio.run(ask())
    assert isinstance(gone, asyncio.CancelledError)
    assert rendered == [large["text"] + "!"] * 3


def test_what_a_client_and_an_owner_see(strict: Rendering, folder: ModelFolder) -> None:
    source = "<|im_start|>{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}"
    template = ChatTemplate(source, {}, folder.tokenizer, strict)
    with pytest.raises(TemplateRefused, match=r"more than 0\.3 s of processor time"):
        template.prompt([{"role": "user", "content": "loop"}])
    assert template.prompt([{"role": "user", "content": "x"}]).text == "<|im_start|>"
    with pytest.raises(ModelFolderError, match="does not render a plain message"):
        ChatTemplate(LOOP, {}, folder.tokenizer, strict)
    with pytest.raises(TemplateBroken, match="unknown tag"):
        ChatTemplate("{% nothing %}", {}, folder.tokenizer, strict)


def test_both_sides_mean_the_same_letters() -> None:
    for name in ("TEXT", "INVALID", "EXHAUSTED"):
        assert getattr(render, name) == getattr(rendering, name)


def _pid(one: Rendering) -> Any:
    process = one._ordinary._process
    assert process is not None
    return process.pid
