"""Twenty turns of one dialog, with tools and a picture: how many prompt tokens the engine executes in each turn, by its
own count, beside the least that there can be: the turn's new text. `python tests/drills/twenty_turns.py --out FILE`
"""

import argparse
import base64
import io
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from fleet import Fleet
from PIL import Image, ImageDraw

from services.api.model_folder import ModelFolder, load_model_folder
from services.engine.experts.store import TEXT_FILES
from services.tools import figures, small_checkpoint
from services.tools.repack import repack

DEMO = Path(__file__).parents[2] / "demo"
TURNS, WITH_PICTURE, WITH_TOOLS = 20, 3, (4, 11)
SYSTEM = {"role": "system", "content": "You are a patient assistant."}
SOUND_S = 10.0  # a store that is sound stores everything: a machine that is busy is waited for
AHEAD, SAVES = "thimble_api_reads_ahead_total", "thimble_api_snapshot_save_seconds_count"
WRITES = "thimble_api_snapshot_writes_total"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def seeing_store(folder: Path) -> Path:
    """A small random model that can see, behind the demo's tokenizer and template."""
    checkpoint = small_checkpoint.write(folder / "checkpoint", "3.5-super-vl", vocabulary=4096)
    for name in TEXT_FILES:
        shutil.copyfile(DEMO / name, checkpoint / name)
    return repack(checkpoint, folder / "store", say=lambda text: None).folder


def open_fleet(store: Path, folder: Path) -> Fleet:
    """With hardly any room for hot states: most come from the store."""
    settings = {
        "ENGINE_WORKERS": "1",
        "ENGINE_HOT_STATES_GB": "0.02",
        "ENGINE_MODEL_NAME": "demo",
        "ENGINE_CONTEXT_TOKENS": "2048",
        "API_REDIS_TIMEOUT_MS": "20000",  # a store that is slow only because a machine is busy is not left alone
    }
    return Fleet(store, folder, engines=1, **settings)


def run(fleet: Fleet, store: Path, thinking: bool, picture: bool) -> list[tuple[float, int]]:
    """Executed and ideal prompt tokens of each turn. The fleet has answered nothing of this dialog before."""
    folder = load_model_folder(store)
    dialog: list[Any] = [SYSTEM]
    costs: list[tuple[float, int]] = []
    calls: Any = None
    drawn = _picture() if picture else None
    picture_tokens = _tokens_of(fleet, drawn) if drawn else 0
    for turn in range(TURNS):
        text = f"What is {turn} + {turn}?"
        shows = turn == WITH_PICTURE and drawn is not None
        if calls:
            dialog.append({"role": "tool", "tool_call_id": calls[0]["id"], "content": text})
        else:
            dialog.append({"role": "user", "content": [drawn, {"type": "text", "text": text}] if shows else text})
        before = executed(fleet)
        answer = fleet.chat(
            dialog,
            model="demo-think" if thinking else "demo",
            tools=[TOOL],
            tool_choice="required" if turn in WITH_TOOLS else "auto",
            max_tokens=200 if turn in WITH_TOOLS or not picture else 24,
            thinking_budget=5 if thinking and picture else None,
        )
        ran = executed(fleet) - before
        usage = answer["usage"]
        assert ran == usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], "what clients are told"
        costs.append((ran, _ideal(folder, text, thinking, bool(calls)) + shows * picture_tokens))
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls")
        assert calls or turn not in WITH_TOOLS
        dialog.append({key: message[key] for key in ("role", "content", "tool_calls") if key in message})
        settle(fleet, SOUND_S)
    return costs


def executed(fleet: Fleet) -> float:
    """Prompt tokens that the fleet's engines ran for requests, by their own count."""
    total = 0.0
    for name in fleet.engines:
        line = next(line for line in fleet.log(name).splitlines()[::-1] if line.startswith("ready:"))
        total += sum(_sums_of(line.split("metrics on ")[1], "thimble_prompt_tokens_total"))
    return total


def settle(fleet: Fleet, quiet_s: float = 0.8) -> None:
    """Until the newest history is read ahead and stored. That is certain when each answer was stored, has been read
    ahead of, and that has been stored; where one was not (a store in trouble), when nothing has grown for so long."""
    seen, since = (-1.0,), time.monotonic()
    while time.monotonic() - since < quiet_s:
        ahead, stored, _ = now = _sums_of(f"{fleet.url}/metrics", AHEAD, SAVES, WRITES)
        if (ahead, stored) == (fleet.answers, 2 * fleet.answers):
            return
        if now != seen:
            seen, since = now, time.monotonic()
        time.sleep(0.02)


def _ideal(folder: ModelFolder, text: str, thinking: bool, from_tool: bool) -> int:
    """Tokens of a turn's new text, and of what begins the answer."""
    shown = f"<tool_response>\n{text}\n</tool_response>\n" if from_tool else text
    opening = "<think>\n" if thinking else "<think></think>"
    return len(folder.tokenizer.encode(f"<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n{opening}"))


def _picture() -> dict[str, Any]:
    image = Image.new("RGB", (160, 96), "white")
    ImageDraw.Draw(image).rectangle((20, 20, 80, 60), fill="red")
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def _tokens_of(fleet: Fleet, picture: dict[str, Any]) -> int:
    """What a picture adds to a message, asked in another dialog."""
    text = {"type": "text", "text": "x"}
    counts = [
        fleet.chat([{"role": "user", "content": content}], max_tokens=1)["usage"]["prompt_tokens"]
        for content in ([picture, text], [text])
    ]
    settle(fleet, SOUND_S)
    return int(counts[0] - counts[1])


def _sums_of(url: str, *names: str) -> tuple[float, ...]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return tuple(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)) for name in names)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    over = 0.0
    for picture in (False, True):
        for thinking in (False, True):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                demo = None if picture else repack(DEMO, folder / "demo", say=lambda text: None).folder
                store = demo or seeing_store(folder)
                with open_fleet(store, folder) as fleet:
                    costs = run(fleet, store, thinking, picture)[1:]
            ran, ideal = sum(ran for ran, _ in costs), sum(ideal for _, ideal in costs)
            over = max(over, ran / ideal)
            model = "small random model, a picture in turn 3" if picture else "demo model"
            note = f"{model}, {'with' if thinking else 'without'} thinking, tool calls in turns {WITH_TOOLS}"
            note += f"; turns 1 to {TURNS - 1}: {ran:.0f} prompt tokens executed, {ideal} new"
            print(f"{ran / ideal:.4f} {note}; {costs}", flush=True)
            if args.out:
                figures.append(args.out, "snapshot.turns_over_ideal", ran / ideal, "ratio", note)
    return 1 if over > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
