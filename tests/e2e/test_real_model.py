"""From a hub to an answer by the README's own lines, on a small checkpoint in the exact layout, from a local server."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from running import UP, Reply, Running, user
from tools.hub_server import Hub, serving

from services.tools import small_checkpoint

ROOT = Path(__file__).parents[2]
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def documented(names: dict[str, str]) -> list[list[str]]:
    """The section's `thimble` lines, with `names` put in."""
    section = (ROOT / "README.md").read_text().split("### The real model")[1]
    [block] = re.findall(r"```sh\n(.*?)```", re.split(r"\n##+ ", section)[0], re.DOTALL)
    lines = [shlex.split(line) for line in block.splitlines() if line.startswith(".venv/bin/thimble ")]
    return [[names.get(word, word) for word in line[1:]] for line in lines]


def test_the_documented_path(tmp_path: Path, demo_checkpoint: Path) -> None:
    source = small_checkpoint.write(tmp_path / "source", "3.5-super-vl-export", vocabulary=4096)
    for name in TEXT_FILES:
        shutil.copy(demo_checkpoint / name, source)
    with serving(Hub(source)) as hub:
        names = {"OWNER/NAME": hub.model, "CHECKPOINT": str(tmp_path / "c"), "STORE": str(tmp_path / "store")}
        *steps, up = documented(names)
        assert [step[0] for step in (*steps, up)] == ["fetch", "repack", "verify", "up"]
        said = []
        for words in steps:
            done = subprocess.run(
                [sys.executable, "-m", "services.tools.cli", *words],
                env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            said.append(done.stdout)
    assert "all checksums right" in said[0]
    assert "16 random experts are the checkpoint's, byte for byte" in said[1]
    assert "passed: mean KL at most 0.003" in said[2]
    stack = Running(tmp_path / "run", (*UP, *up[1:]))
    try:
        stack.wait_until_ready()
        model = stack.client.models.list().data[0].id
        reply = Reply(stack.client, model, [user("What is 20 + 22?")], max_tokens=8)
        assert reply.completion_tokens >= 1
        assert stack.stop() == 0
    finally:
        stack.close()
