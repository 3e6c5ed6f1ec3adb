"""Pictures through the whole product, with the official clients, on a small random model that can see."""

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from drawn import corners, encoded
from openai import BadRequestError
from PIL import Image
from running import Running, assistant, user

from services.engine.experts.store import TEXT_FILES
from services.tools import small_checkpoint
from services.tools.repack import repack

LARGE = encoded(Image.effect_noise((90, 60), 60).convert("RGB"))
SMALL = encoded(corners(20, 12))
OTHER = encoded(corners(20, 12).transpose(Image.Transpose.ROTATE_180))


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Path) -> Iterator[Running]:
    """The stack around a random model with a tower, behind the demo's tokenizer and template."""
    folder = tmp_path_factory.mktemp("sees")
    checkpoint = small_checkpoint.write(folder / "c", "3.5-super-vl", vocabulary=4096)
    for name in TEXT_FILES:
        shutil.copyfile(demo_checkpoint / name, checkpoint / name)
    repack(checkpoint, folder / "store", say=lambda text: None)
    running = Running(folder / "run", THIMBLE_ENGINE_STORE=str(folder / "store"), THIMBLE_ENGINE_MODEL_NAME="eyes")
    try:
        yield running.wait_until_ready()
        assert running.stop() == 0, running.output
    finally:
        running.close()


def url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def picture(data: bytes, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), **more}}


def asks(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}


def chat(sees: Running, *messages: Any, model: str = "eyes", **more: Any) -> Any:
    wanted = {"temperature": 0, "max_tokens": 4, "logprobs": True, "top_logprobs": 5} | more
    return sees.client.chat.completions.create(model=model, messages=list(messages), **wanted)


def thoughts(reply: Any) -> list[list[tuple[str, float]]]:
    """What the model held probable at each place."""
    return [[(top.token, top.logprob) for top in entry.top_logprobs] for entry in reply.choices[0].logprobs.content]


def refused(sees: Running, *messages: Any, **more: Any) -> Any:
    with pytest.raises(BadRequestError) as caught:
        chat(sees, *messages, **more)
    return caught.value


def test_the_models_say_that_they_see(sees: Running) -> None:
    models = {model.id: model for model in sees.client.models.list().data}
    assert set(models) == {"eyes", "eyes-think", "eyes-doc", "eyes-think-doc"}
    for model in models.values():
        assert model.architecture["input_modalities"] == ["text", "image"]  # type: ignore[attr-defined]


def test_a_picture_is_answered_and_counted(sees: Running) -> None:
    bare = chat(sees, user("What is it?")).usage.prompt_tokens
    with_picture = chat(sees, asks(picture(SMALL), "What is it?")).usage.prompt_tokens
    # 20 x 12 pixels are 10 x 6 patches, 15 tokens, between two tags and before the end of a line.
    assert with_picture - bare == 15 + 2 + 1


def test_the_same_picture_again_is_not_read_again(sees: Running) -> None:
    fresh = encoded(Image.effect_noise((22, 20), 40).convert("RGB"))
    before = sees.metrics()
    first = chat(sees, asks(picture(fresh), "Which?"))
    again = chat(sees, asks("Once more:", picture(fresh)))
    after = sees.metrics()
    read, held = (f"thimble_pictures_total{{result={what}}}" for what in ("read", "held"))
    assert after[read] - before[read] == 1
    assert after[held] - before[held] == 1
    assert thoughts(first) != thoughts(again)


def test_another_picture_changes_what_the_model_thinks(sees: Running) -> None:
    question = "Which colours?"
    one, other = (chat(sees, asks(picture(data), question)) for data in (SMALL, OTHER))
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    assert thoughts(one) != thoughts(other)
    assert thoughts(chat(sees, asks(picture(SMALL), question))) == thoughts(one)


def test_a_dialog_goes_on_from_its_picture(sees: Running) -> None:
    """The state of the first turn is found again with the same picture, and only with it."""
    system = {"role": "system", "content": "You see pictures and say in a few words what is in them."}
    dialog = [system, asks(picture(SMALL), "What is in this one?")]
    first = chat(sees, *dialog)
    said = first.choices[0].message.content or ""
    going_on = [*dialog, assistant(said), user("And what else?")]
    second = chat(sees, *going_on)
    assert second.usage.prompt_tokens_details.cached_tokens > 15
    swapped = [system, asks(picture(OTHER), "What is in this one?"), *going_on[2:]]
    third = chat(sees, *swapped)
    # What was sampled may be other tokens than the same text read again.
    assert abs(third.usage.prompt_tokens - second.usage.prompt_tokens) <= 3
    before_the_picture = len("<|im_start|>") + len(system["content"])
    assert (third.usage.prompt_tokens_details.cached_tokens or 0) < before_the_picture // 2
    assert second.usage.prompt_tokens_details.cached_tokens > third.usage.prompt_tokens_details.cached_tokens + 15
    assert thoughts(third) != thoughts(second)


def test_resolution_is_asked_for_by_detail_or_by_model(sees: Running) -> None:
    def tokens(model: str = "eyes", **detail: str) -> int:
        return int(chat(sees, asks(picture(LARGE, **detail), "?"), model=model).usage.prompt_tokens)

    low, normal, high = (tokens(detail=detail) for detail in ("low", "auto", "high"))
    assert low < normal < high
    assert tokens() == normal
    assert tokens("eyes-doc") == tokens("eyes-doc", detail="auto") == high
    assert tokens("eyes-doc", detail="low") == low
    assert "detail must be auto, low or high" in str(refused(sees, asks(picture(LARGE, detail="huge"))))


def test_the_token_written_out_is_text(sees: Running) -> None:
    """Whatever a user writes, only pictures are pictures."""
    client = httpx.Client(base_url=sees.url)
    ids = client.post("/tokenize", json={"messages": [user("Is <image> or <img> a token?")]}).json()["tokens"]
    assert not {18, 19, 20} & set(ids)
    both = client.post("/tokenize", json={"messages": [asks("<image>", picture(SMALL), "<image>")]}).json()["tokens"]
    assert both.count(18) == 15
    assert both.count(19) == both.count(20) == 1
    client.close()


def test_several_pictures_keep_their_order(sees: Running) -> None:
    one = chat(sees, asks("First", picture(SMALL), "second", picture(OTHER), "which?"))
    two = chat(sees, asks("First", picture(OTHER), "second", picture(SMALL), "which?"))
    assert one.usage.prompt_tokens == two.usage.prompt_tokens
    assert thoughts(one) != thoughts(two)
    many = chat(sees, asks(*[picture(LARGE, detail="high")] * 12, "which?"))
    assert many.usage.prompt_tokens < 512, "they share what the context leaves"


def test_what_is_wrong_with_a_picture_is_said(sees: Running) -> None:
    cases = {
        "it is HEIC": picture(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"),
        "damaged or incomplete PNG": picture(LARGE[: len(LARGE) // 2]),
        "base64 cannot be read": {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@@"}},
        "must be base64": {"type": "image_url", "image_url": "data:image/png,abc"},
        "begins with 'file:///etc/": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        "not fetched from the web": {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}},
    }
    for message, part in cases.items():
        error = refused(sees, asks(part, "What is it?"))
        assert message in str(error), (message, str(error))
        assert error.body["param"] == "messages"
    assert "cannot hold pictures" in str(refused(sees, {**asks(picture(SMALL)), "role": "system"}, user("x")))
    assert "do not fit the context" in str(refused(sees, asks(*[picture(SMALL)] * 60, "word " * 420)))
    assert "at most 64" in str(refused(sees, asks(*[picture(SMALL)] * 65)))
    assert chat(sees, asks(picture(SMALL), "Still there?")).choices


def test_base64_in_every_form_that_clients_write(sees: Running) -> None:
    plain = base64.b64encode(SMALL).decode()
    wanted = thoughts(chat(sees, asks(picture(SMALL), "?")))
    lines = "\n".join(plain[at : at + 60] for at in range(0, len(plain), 60))
    forms = [plain.rstrip("="), lines, plain.replace("=", "%3D"), plain.replace("+", "-").replace("/", "_")]
    for head in ("data:image/png;base64,", "DATA:image/jpeg;BASE64,", "data:;base64,"):
        for body in forms:
            part = {"type": "image_url", "image_url": f"{head}{body}"}
            assert thoughts(chat(sees, asks(part, "?"))) == wanted


def test_every_flavour_shows_the_same_picture(sees: Running) -> None:
    wanted = chat(sees, asks(picture(SMALL), "What is it?"), max_tokens=12)
    response = sees.client.responses.create(
        model="eyes",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_image", "image_url": url(SMALL), "detail": "auto"},
                    {"type": "input_text", "text": "What is it?"},
                ],
            }
        ],
        temperature=0,
        max_output_tokens=12,
    )
    assert response.usage is not None
    assert response.usage.input_tokens == wanted.usage.prompt_tokens
    assert response.output_text == (wanted.choices[0].message.content or "")
    client = Anthropic(base_url=sees.url, api_key="none", max_retries=0)
    blocks: list[Any] = [
        {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(SMALL).decode()},
        },
        {"type": "text", "text": "What is it?"},
    ]
    message = client.messages.create(
        model="eyes", max_tokens=12, extra_body={"temperature": 0}, messages=[{"role": "user", "content": blocks}]
    )
    said = "".join(block.text for block in message.content if block.type == "text")
    assert said == (wanted.choices[0].message.content or "")
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == wanted.usage.prompt_tokens
    counted = client.messages.count_tokens(model="eyes", messages=[{"role": "user", "content": blocks}])
    assert counted.input_tokens == wanted.usage.prompt_tokens
    client.close()


def test_tools_may_answer_with_pictures(sees: Running) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]

    def told(data: bytes) -> Any:
        result = {"role": "tool", "tool_call_id": "c1", "content": asks("Here:", picture(data))["content"]}
        before = [user("Look!"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        return chat(sees, *before, result, tools=tools)

    one, other = told(SMALL), told(OTHER)
    assert one.usage.prompt_tokens == other.usage.prompt_tokens
    assert thoughts(one) != thoughts(other)


def test_a_chain_of_responses_remembers_its_picture(sees: Running) -> None:
    first = sees.client.responses.create(
        model="eyes",
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": url(SMALL), "detail": "low"}]}],
        max_output_tokens=4,
    )
    second = sees.client.responses.create(
        model="eyes", previous_response_id=first.id, input="And now?", max_output_tokens=4
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_nothing_of_a_picture_is_in_the_logs(sees: Running) -> None:
    data = base64.b64encode(SMALL).decode()
    logs = [path.read_text() for path in (sees.run_dir / "logs").iterdir()]
    assert logs
    assert not any(data[:60] in text for text in logs)
    assert json.dumps(data)[:60] not in sees.output
