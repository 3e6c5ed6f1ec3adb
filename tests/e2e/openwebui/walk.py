"""A person's walk through Open WebUI in headless Chromium, against a running api: a chat, a regenerated answer, a chat
with the thinking model, a picture. Fails if what is on the page is not right, and takes screenshots.

    OPENWEBUI/bin/python tests/e2e/openwebui/walk.py --url http://127.0.0.1:8000

OPENWEBUI is an environment with open-webui and playwright, see tests/e2e/screenshots/README.md.
"""

import argparse
import json
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect, sync_playwright
from recorder import make_server
from webui import WebUi

STORY = "Tell me a short story about a fox."
SUM = "What is 20 + 22?"
PICTURE_QUESTION = "What is in this picture?"
ANSWER_LIMIT_MS = 60_000
TASKS = 3
HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the api, as `make up` prints it")
    parser.add_argument("--out", type=Path, default=HERE.parent / "screenshots", help="folder for the screenshots")
    parser.add_argument("--asked", type=Path, help="file to note every request that Open WebUI sends to the api")
    parser.add_argument("--browser", default="/usr/bin/chromium")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        asked = args.asked or Path(temporary) / "asked.jsonl"
        recorder = make_server(args.url, asked)
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        webui = WebUi(f"http://127.0.0.1:{recorder.server_address[1]}/v1", Path(temporary))
        try:
            webui.wait_until_ready()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=args.browser, args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1000, "height": 680})
                page.set_default_timeout(ANSWER_LIMIT_MS)
                for step in args.steps:
                    page.goto(webui.url)
                    if step == args.steps[0]:
                        page.get_by_role("button", name="Okay, Let's Go!").click()
                    STEPS[step](page, args, asked)
                browser.close()
        finally:
            webui.close()
            recorder.shutdown()
            recorder.server_close()
            tell(asked)


def chat(page: Page, args: argparse.Namespace, asked: Path) -> None:
    """And the same answer drawn anew."""
    choose(page, models(args.url)[0]["id"])
    ask(page, STORY)
    first = answer(page)
    assert len(first.split()) > 20, first
    wait_for_tasks(asked)
    page.screenshot(path=args.out / "chat.png")

    page.get_by_role("button", name="Regenerate").click()
    page.get_by_role("button", name="Try Again").click()
    expect(page.get_by_text("2/2")).to_be_visible()
    assert answer(page) != first, "it was drawn anew"
    page.screenshot(path=args.out / "regenerated.png")


def thinking(page: Page, args: argparse.Namespace, asked: Path) -> None:
    choose(page, models(args.url)[1]["id"])
    ask(page, SUM)
    assert "42" in answer(page)
    page.get_by_text("Thought for").first.click()
    page.screenshot(path=args.out / "thinking.png")


def picture(page: Page, args: argparse.Namespace, asked: Path) -> None:
    choose(page, models(args.url)[0]["id"])
    drawn = asked.with_name("drawn.png")
    canvas = Image.new("RGB", (320, 240), "white")
    ImageDraw.Draw(canvas).ellipse((90, 50, 230, 190), fill="red")
    canvas.save(drawn)
    page.locator("input[type=file]").first.set_input_files(drawn)
    expect(page.locator("form img")).to_be_visible()
    ask(page, PICTURE_QUESTION)
    assert answer(page).strip()
    page.screenshot(path=args.out / "picture.png")
    parts = [part["type"] for _, said in requests(asked) if isinstance(said, list) for part in said]
    assert "image_url" in parts, "the model was shown it"


STEPS = {"chat": chat, "thinking": thinking, "picture": picture}


def models(url: str) -> list[dict]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as reply:
        return json.load(reply)["data"]


def choose(page: Page, model: str) -> None:
    page.locator("#model-selector-model-button").click()
    page.get_by_role("option", name=f"Select {model} model", exact=True).click()


def ask(page: Page, text: str) -> None:
    page.locator("#chat-input").click()
    page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.get_by_text(text).first).to_be_visible()


def answer(page: Page) -> str:
    """The last answer, when it is complete."""
    expect(page.get_by_role("button", name="Good Response").last).to_be_visible()
    return page.locator(".chat-assistant").last.inner_text()


def requests(asked: Path) -> list[tuple[str, str]]:
    """What Open WebUI wanted of the api: method, path and status; and the last message."""
    entries = [json.loads(line) for line in asked.read_text().splitlines()]
    return [
        ("{method} {path} {status}".format(**entry), entry["body"]["messages"][-1]["content"] if entry["body"] else "")
        for entry in entries
    ]


def wait_for_tasks(asked: Path) -> None:
    """Title, tags and follow-ups are asked for behind the first answer, of the same model."""
    deadline = time.monotonic() + ANSWER_LIMIT_MS / 1000
    while sum(str(text).startswith("### Task:") for _, text in requests(asked)) < TASKS:
        assert time.monotonic() < deadline, "the tasks behind an answer"
        time.sleep(0.5)


def tell(asked: Path) -> None:
    for what, text in requests(asked):
        print(what, str(text)[:90].replace("\n", " "))


if __name__ == "__main__":
    main()
