"""Recorded routing: what is written is read, a damaged file is good up to the damage, and no disk ends a request."""

import errno
import logging
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from demo_engine import demo

from services.engine.errors import TraceError
from services.engine.experts.store import Store
from services.engine.experts.trace import DECODE, FRAME, PREFILL, Header, Recorder, phases, read_trace, row_type

HEADER = Header(
    1, "tiny", "00ff", layers=3, experts=20, top_k=4, latent=32, width=16, block_bytes=4096, dense_bytes=100
)
NOTE = {"misses": 7, "policy": "lru"}


def write(path: Path, calls: list[list[int]], most_bytes: int = 1 << 20, close: bool = True) -> Recorder:
    """Each call is the tokens of its sequences. Every layer guesses the next one, and the one after."""
    recorder = Recorder(path, HEADER, most_bytes)
    recorder.attach(lambda: NOTE)
    random = torch.Generator().manual_seed(1)
    for tokens in calls:
        for layer in range(HEADER.layers):
            for ahead in range(min(3, HEADER.layers - layer)):
                scores = torch.rand(sum(tokens), HEADER.experts, generator=random)
                weights, ids = scores.topk(HEADER.top_k)
                recorder.record(layer + ahead, ids.int(), weights, phases(tokens), ahead)
    if close:
        recorder.close()
    return recorder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a.trace", [[5], [1, 1], [1]])
    trace = read_trace(tmp_path / "a.trace")
    assert (trace.header, trace.note, trace.whole) == (HEADER, NOTE, True)
    assert (trace.prompt_tokens, trace.decoded_tokens) == (5, 3)
    routed = trace.rows[trace.rows["ahead"] == 0]
    assert routed["call"].tolist() == [0] * 15 + [1] * 6 + [2] * 3
    assert routed["phase"].tolist() == [PREFILL] * 15 + [DECODE] * 9
    assert (np.diff(routed["scores"].astype(float), axis=1) <= 0).all()
    assert len(trace.rows) == 8 * (3 + 2 + 1)


def test_a_replay_gets_steps_and_the_guesses_made_in_them(tmp_path: Path) -> None:
    write(tmp_path / "a.trace", [[5], [1, 1], [1]])
    trace = read_trace(tmp_path / "a.trace")
    routing = trace.routing()
    assert routing.layer.tolist() == [0, 1, 2] * 3
    assert routing.rows_of_step.tolist() == [5] * 3 + [2] * 3 + [1] * 3
    assert len(routing.guesses) == 2
    for ahead, guesses in enumerate(routing.guesses, start=1):
        layer = np.repeat(routing.layer, routing.rows_of_step)
        assert (guesses[layer + ahead >= 3] == -1).all()
        there = guesses[layer + ahead < 3]
        assert np.array_equal(there, trace.rows[trace.rows["ahead"] == ahead]["ids"])


def test_calls_that_guess_beside_such_that_do_not(tmp_path: Path) -> None:
    """A GPU guesses in steps of answers, not in the sweeps of prompts between them."""
    recorder = Recorder(tmp_path / "a.trace", HEADER, 1 << 20)
    for tokens, guesses in (([9], False), ([1], True), ([12], False), ([1, 1], True)):
        for layer in range(HEADER.layers):
            ids = torch.arange(HEADER.top_k, dtype=torch.int32).repeat(sum(tokens), 1) + layer
            recorder.record(layer, ids, ids.float(), phases(tokens))
            if guesses and layer + 1 < HEADER.layers:
                recorder.record(layer + 1, ids + 10, ids.float(), phases(tokens), ahead=1)
    recorder.close()
    routing = read_trace(tmp_path / "a.trace").routing()
    assert routing.rows_of_step.tolist() == [9] * 3 + [1] * 3 + [12] * 3 + [2] * 3
    [guesses] = routing.guesses
    steps = np.split(guesses[:, 0], routing.first[1:-1])
    assert [set(step.tolist()) for step in steps] == [{-1}] * 3 + [{10}, {11}, {-1}] + [{-1}] * 3 + [{10}, {11}, {-1}]


def test_numpy_alone_reads_a_frame(tmp_path: Path) -> None:
    """The format as its description has it."""
    write(tmp_path / "a.trace", [[1]])
    data = (tmp_path / "a.trace").read_bytes()
    assert data[:8] == b"THMTRACE"
    kind, size, _ = struct.unpack_from("<IIQ", data, 8)
    assert kind == 1
    kind, rows_size, _ = struct.unpack_from("<IIQ", data, 24 + size)
    rows = np.frombuffer(data, row_type(4), count=6, offset=24 + size + 16)
    assert (kind, rows_size) == (2, rows.nbytes)
    assert rows["layer"].tolist() == [0, 1, 2, 1, 2, 2]


def test_a_file_cut_anywhere_is_good_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "a.trace"
    write(path, [[400]] * 8)
    data, whole = path.read_bytes(), read_trace(path)
    for size in (len(data) - 1, len(data) * 2 // 3, 400):
        path.write_bytes(data[:size])
        cut = read_trace(path)
        assert not cut.whole
        assert not cut.note
        assert np.array_equal(cut.rows, whole.rows[: len(cut.rows)])
        assert len(cut.rows) < len(whole.rows) or size == len(data) - 1
        assert cut.routing().layer.tolist() == [0, 1, 2] * (len(cut.routing().layer) // 3)
    flipped = bytearray(data)
    flipped[-400] ^= 1
    path.write_bytes(flipped)
    assert not read_trace(path).whole


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a trace"),
        (b"THMTRACE", "header is damaged"),
        (b"THMTRACE" + FRAME.pack(1, 5, 0), "header is damaged"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "x")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_another_version_is_refused(tmp_path: Path) -> None:
    Recorder(tmp_path / "x", replace(HEADER, version=2), 1000).close()
    with pytest.raises(TraceError, match="version 2, this program reads 1"):
        read_trace(tmp_path / "x")


def test_a_trace_has_a_bound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write(tmp_path / "a.trace", [[400]] * 30, most_bytes=300_000)
    assert "ends there" in caplog.text
    size = (tmp_path / "a.trace").stat().st_size
    assert 300_000 < size < 600_000
    assert read_trace(tmp_path / "a.trace").note == NOTE


def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.trace", [[1]]).path for _ in range(3)]
    assert [path.name for path in paths] == ["a.trace", "a.1.trace", "a.2.trace"]
    with pytest.raises(TraceError, match="cannot be written"):
        Recorder(tmp_path / "none" / "a", HEADER, 1000)


def test_the_engine_records_what_it_routes(demo_store: Store, tmp_path: Path) -> None:
    """The setting, a prompt and an answer: every token in every MoE layer once, and what the engine counted."""
    with demo(demo_store, trace=str(tmp_path / "a.trace"), expert_slots=60, prefetch="on", warm_dir="-") as engine:
        ids = engine.prompt("What is 20 + 22?")
        answer = engine.answer(ids, max_tokens=6)
    trace = read_trace(tmp_path / "a.trace")
    assert trace.whole
    assert (trace.header.layers, trace.header.experts, trace.header.top_k) == (7, demo_store.config.experts, 6)
    assert trace.prompt_tokens == len(ids)
    assert len(answer) - 1 <= trace.decoded_tokens <= len(answer)
    assert (trace.note["slots_total"], trace.note["prefetch"], trace.note["policy"]) == (60, "on", "shipped")
    routing = trace.routing()
    assert len(routing.ids) == 7 * (trace.prompt_tokens + trace.decoded_tokens)
    assert len(routing.guesses) == 2
    lookups = sum(len(set(named.ravel().tolist())) for named in np.split(routing.ids, routing.first[1:-1]))
    assert trace.note["hits"] + trace.note["misses"] == lookups


def test_a_full_disk_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = write(tmp_path / "a.trace", [[1]], close=False)

    class Full:
        def __init__(self, file: object) -> None:
            self.file = file

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            self.file.close()  # type: ignore[attr-defined]

    recorder._file = Full(recorder._file)  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING):
        recorder.close()
        recorder.record(0, torch.zeros(1, 4).int(), torch.zeros(1, 4), phases([1]))
    assert "ends early: [Errno 28] No space left" in caplog.text
    assert not read_trace(tmp_path / "a.trace").whole
