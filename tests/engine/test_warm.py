"""The expert cache over a restart: the file and its refusals, and an engine whose first reply has hits."""

import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_engine import demo
from timing import in_time

from kernels.workers.pool import Workers
from services.engine.experts.store import Store
from services.engine.experts.streamer import HostExperts
from services.engine.experts.warm import NAME, Warm, WarmSet

KEYS = Warm(np.array([5, 3, 9, 0], np.int32), np.arange(10, dtype=np.uint32) << 28)


def warm_set(folder: Path, fingerprint: str = "abc", blocks: int = 10) -> WarmSet:
    return WarmSet(folder / NAME, fingerprint, blocks)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    nothing = warm_set(tmp_path).load()
    assert (nothing.keys.tolist(), nothing.heat.tolist()) == ([], [])
    warm_set(tmp_path).save(KEYS)
    found = warm_set(tmp_path).load()
    assert (found.keys.tolist(), found.heat.tolist()) == (KEYS.keys.tolist(), KEYS.heat.tolist())
    assert [path.name for path in tmp_path.iterdir()] == [NAME], "nothing is left beside it"


@pytest.mark.parametrize("change", ["byte", "head", "cut", "other model", "fewer experts", "no file of ours", "empty"])
def test_what_does_not_match_is_refused(tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture) -> None:
    warm_set(tmp_path).save(KEYS)
    path = tmp_path / NAME
    data = bytearray(path.read_bytes())
    if change == "byte":
        data[-3] ^= 1
    elif change == "head":
        data = bytearray(data.replace(b'"version": 2', b'"version": 1'))
    elif change == "cut":
        del data[-4:]
    elif change == "no file of ours":
        data = bytearray(b"\x00\xff")
    elif change == "empty":
        data = bytearray()
    path.write_bytes(data)
    reader = warm_set(tmp_path, "xyz" if change == "other model" else "abc", 9 if change == "fewer experts" else 10)
    with caplog.at_level(logging.WARNING):
        assert reader.load().keys.tolist() == []
    assert "the expert cache starts empty" in caplog.text
    warm_set(tmp_path).save(KEYS)
    assert warm_set(tmp_path).load().keys.tolist() == KEYS.keys.tolist(), "the next save mends it"


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    missing = WarmSet(tmp_path / "missing" / NAME, "abc", 10)
    with caplog.at_level(logging.WARNING):
        missing.save(KEYS)
        missing.save(Warm(KEYS.keys[:2], KEYS.heat))
    assert caplog.text.count("cannot be written") == 1
    missing.save(Warm(np.empty(0, np.int32), KEYS.heat))


def test_it_is_saved_from_time_to_time(tmp_path: Path) -> None:
    kept, asked = warm_set(tmp_path), threading.Event()

    def resident() -> Warm:
        asked.set()
        return KEYS

    kept.keep(resident, every_s=0.01)
    assert asked.wait(20)
    kept.close()
    assert warm_set(tmp_path).load().keys.tolist() == KEYS.keys.tolist()


def answer(store: Store, folder: Path, slots_read: int = 0) -> tuple[list[int], int, int]:
    """Of a fresh engine, once so many slots are filled: the ids of its first reply, its lookups that missed, and the
    slots in use. Without prefetch, so that nothing but the set that is read at the start and time can change them."""
    with demo(store, warm_dir=str(folder), prefetch="off") as running:
        experts = running.engine._experts
        assert in_time(lambda: experts.counters().slots_used >= slots_read), "the set is not read"
        ids = running.answer(running.prompt("Tell me about a fox."), max_tokens=8)
        misses = sum(running.value("expert_lookups_total", tier="nvme", phase=phase) for phase in ("prefill", "decode"))
        return ids, int(misses), experts.counters().slots_used


def test_the_first_reply_after_a_restart_has_hits(demo_store: Store, tmp_path: Path) -> None:
    """The same prompt, the same bits: once with the set of the run before, once while that is still being read, and,
    as a control, once without it."""
    kept = tmp_path / (NAME if demo_store.draft_file is None else f"mtp.{NAME}")
    cold_ids, cold_misses, used = answer(demo_store, tmp_path)
    assert kept.stat().st_size > 400
    warm_ids, warm_misses, _ = answer(demo_store, tmp_path, slots_read=used)
    early_ids, early_misses, _ = answer(demo_store, tmp_path)
    kept.unlink()
    again_ids, again_misses, _ = answer(demo_store, tmp_path)
    assert warm_ids == cold_ids == early_ids == again_ids
    assert cold_misses == again_misses > 200
    assert warm_misses == 0
    assert early_misses <= cold_misses


@pytest.mark.parametrize("remembers", [True, False])
def test_what_was_named_before_the_first_request_is_not_hot(demo_store: Store, tmp_path: Path, remembers: bool) -> None:
    """A GPU's graphs name experts when they are captured; nobody asked for those."""
    warm = WarmSet(tmp_path / NAME, "abc", demo_store.config.experts * len(demo_store.blocks)) if remembers else None
    experts = HostExperts(demo_store, Workers(1), slots=8, readers=1, lock_memory=False, warm=warm)
    try:
        ids = torch.zeros(1, 1, dtype=torch.int32)
        experts.step(0, ids, torch.ones(1, 1), torch.ones(1, demo_store.layout.latent))
        assert experts.host.heat().any(), "a step heats"
        experts.begin_warm()
        assert not experts.host.heat().any()
    finally:
        experts.close()
