"""A disk that fails under a running engine: the request that needed the block fails with the expert's name, nothing
else is lost, and what is mended is good again."""

import os
import re
import shutil
from pathlib import Path

import pytest
from demo_engine import Demo, demo

from services.engine.errors import StepError
from services.engine.experts.store import EXPERTS, Store

NAMED = r"MoE layer \d+, expert \d+: .*"


def failure(running: Demo, *turns: str) -> str:
    error = running.ask(running.prompt(*turns), max_tokens=4).fail().error
    assert isinstance(error, StepError)
    return str(error)


def test_another_file_put_in_the_place_of_the_store_s_changes_nothing(demo_store: Store, tmp_path: Path) -> None:
    """As an update does: the engine goes on with the file that it opened, until it starts again."""
    shutil.copytree(demo_store.folder, tmp_path / "store")
    path, other = tmp_path / "store" / EXPERTS, tmp_path / "other"
    other.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    with demo(Store.open(tmp_path / "store"), expert_slots=64, readers=2) as running:
        prompts = [running.prompt(text) for text in ("Tell me about a fox.", "And about a hen, in a long sentence?")]
        expected = [running.answer(prompt, max_tokens=6) for prompt in prompts]
        read_before = running.value("nvme_read_bytes_total", kind="demand")
        os.replace(other, path)
        assert [running.answer(prompt, max_tokens=6) for prompt in prompts] == expected
        assert running.value("nvme_read_bytes_total", kind="demand") > read_before, "nothing was read any more"


@pytest.mark.parametrize("damage", ["truncated", "changed"])
def test_a_request_fails_and_the_engine_goes_on(demo_store: Store, tmp_path: Path, damage: str) -> None:
    shutil.copytree(demo_store.folder, tmp_path / "store")
    store = Store.open(tmp_path / "store")
    path = tmp_path / "store" / EXPERTS
    whole = path.read_bytes()
    with demo(store, expert_slots=64, readers=2) as running:
        prompt = running.prompt("Tell me about a fox.")
        expected = running.answer(prompt, max_tokens=6)
        if damage == "truncated":
            os.truncate(path, 0)
        else:
            path.write_bytes(bytes(byte ^ 1 for byte in whole))
        reason = "the file ends inside the block" if damage == "truncated" else "the checksum does not match, twice"
        for _ in range(2):
            said = failure(running, "And about a hen, in a longer sentence than before?")
            assert reason in said
            assert re.match(NAMED, said), said
            assert str(tmp_path) not in said, "clients hear this"
        path.write_bytes(whole)
        assert running.answer(prompt, max_tokens=6) == expected
        assert running.value("request_failures_total", code="step_failed") == 2
