"""A short run of the messages' fuzzer, and that it would see an engine that was harmed."""

import hostile_messages
import pytest
from hostile_messages import Report, fuzz, honest, run
from toy_engine import toy
from toy_server import channel_to, serving


def test_damaged_messages_are_refused_and_harm_nobody() -> None:
    report = run(3, seed=2, least=40)
    assert report.findings == []
    assert sum(report.calls.values()) >= 40
    assert report.honest >= 1
    assert {"Generate", "Info", "Vision"} <= set(report.calls)


def test_a_wrong_answer_and_a_dead_server_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with toy() as t, serving(t.engine) as running, channel_to(running) as channel:
        report = Report()
        honest(report, t, channel)
        assert report.findings == []
        monkeypatch.setattr(hostile_messages, "answer", lambda ids, count: [0] * count)
        honest(report, t, channel)
        assert len(report.findings) == 1
    with toy() as t, serving(None) as running, channel_to(running) as channel:
        assert any("UNAVAILABLE" in finding for finding in fuzz(0.3, 1, t, channel).findings)
