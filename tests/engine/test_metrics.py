"""What is scraped agrees exactly with what was done; every series is there from the start."""

import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families
from toy_engine import Gate, Toy, toy

from services.engine.errors import EngineError
from services.engine.metrics import MetricsServer
from services.engine.request import Request
from services.settings import SettingError

PROMPT = (1, 2, 3, 4, 5) * 5


@pytest.fixture
def t() -> Iterator[Toy]:
    with toy() as engine:
        yield engine


def counted(t: Toy) -> dict[str, float]:
    """Every non-zero sample but clocks, limits and what the process has, as `name{labels}`."""
    found = {}
    for family in t.metrics.registry.collect():
        for sample in family.samples:
            labels = ",".join(v for k, v in sample.labels.items() if k not in ("model_name",))
            name = sample.name.removeprefix("thimble_")
            if (
                sample.value
                and not name.endswith(("_created", "_sum", "_bucket", "_info"))
                and "seconds_total" not in name
            ):
                found[f"{name}{{{labels}}}"] = sample.value
    return found


def test_counts_agree_with_what_was_done(t: Toy) -> None:
    first = t.ask(Request("a", PROMPT, 6, snapshot_at=(13,)))
    ref = first.finish().snapshots[0].state
    first.handle.cancel()
    t.ask(Request("b", PROMPT, 4, offers=(ref,))).finish()
    stop = first.tokens[0]
    t.ask(Request("c", PROMPT, 6, stop_ids=frozenset({stop}))).finish()
    gate = Gate()
    t.model.before = gate
    cancelled = t.ask(Request("d", PROMPT, 900))
    gate.hold(1)  # its first chunk of eight is under way
    cancelled.handle.cancel()
    gate.open()
    cancelled.fail()
    t.engine.close()

    fed = sum(map(sum, t.model.calls))
    prompt_fed = 25 + 12 + 25  # the cancelled one's first chunk breaks off
    decode_fed = 5 + 3
    of_the_process = ("kv_pages{total", "expert_slots", "memory_used", "disk_written")
    assert {k: v for k, v in counted(t).items() if not k.startswith(of_the_process)} == {
        "prompt_tokens_total{}": prompt_fed,
        "generation_tokens_total{}": 6 + 4 + 1,
        "decode_steps_total{}": decode_fed,
        "prefix_cache_queries_total{}": 4 * 25,
        "prefix_cache_hits_total{}": 13,
        "request_success_total{length}": 2,
        "request_success_total{stop}": 1,
        "request_failures_total{cancelled}": 1,
        "time_to_first_token_seconds_count{}": 3,
        "inter_token_latency_seconds_count{}": 5 + 3,
        "e2e_request_latency_seconds_count{}": 3,
        "request_queue_time_seconds_count{}": 3,
        "request_prefill_time_seconds_count{}": 3,
        "request_decode_time_seconds_count{}": 3,
        "expert_lookups_total{ram,prefill}": prompt_fed,
        "expert_lookups_total{nvme,prefill}": prompt_fed,
        "expert_lookups_total{ram,decode}": decode_fed,
        "expert_lookups_total{nvme,decode}": decode_fed,
        "experts_computed_total{cpu,prefill}": 2 * prompt_fed,
        "experts_computed_total{cpu,decode}": 2 * decode_fed,
        "nvme_read_bytes_total{demand}": 4096 * (prompt_fed + decode_fed),
        "snapshot_lookups_total{none}": 3,
        "snapshot_lookups_total{hot}": 1,
        "snapshots_total{taken}": 1,
        "snapshot_bytes_total{taken}": ref.size_bytes,
        "hot_states{}": 1,
        "hot_state_bytes{}": ref.size_bytes,
    }
    assert fed == prompt_fed + decode_fed + 8
    calls = {"prefill": 4 + 2 + 4, "decode": 5 + 3}
    for phase, count in calls.items():
        assert t.value("disk_wait_seconds_total", phase=phase) == 0.25 * count
        assert t.value("forward_seconds_total", phase=phase) > 0


def test_what_runs_and_waits_is_shown_while_it_does(t: Toy) -> None:
    gate = Gate()
    t.model.before = gate
    calls = [t.ask(Request("r", PROMPT, 6)) for _ in range(3)]
    gate.hold(2)
    assert (t.value("num_requests_running"), t.value("num_requests_waiting")) == (2, 1)
    assert t.value("kv_pages", state="used") == 2
    gate.open()
    for call in calls:
        call.finish()
    t.engine.close()
    assert (t.value("num_requests_running"), t.value("num_requests_waiting")) == (0, 0)
    assert t.value("kv_pages", state="used") == 0


def test_every_series_exists_before_anything_happens(t: Toy) -> None:
    for tier in ("ram", "nvme"):
        for phase in ("prefill", "decode"):
            assert t.value("expert_lookups_total", tier=tier, phase=phase) == 0
    assert t.value("pcie_bytes_total", dir="to_gpu") == 0
    assert {t.value("request_failures_total", code=kind.code) for kind in EngineError.tree()} == {0}
    assert t.value("build_info", version="0") == 1
    assert t.value("model_info", model_fingerprint="0123", arithmetic_fingerprint="4567", device="cpu") == 1
    names = [family.name for family in t.metrics.registry.collect()]
    assert all(name.startswith("thimble_") for name in names)
    assert len(names) == len(set(names)) > 30


def test_the_endpoint_serves_it_and_a_taken_port_is_an_error(t: Toy) -> None:
    server = MetricsServer(t.metrics.registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            families = {family.name for family in text_string_to_metric_families(answer.read().decode())}
        assert {"thimble_generation_tokens", "thimble_num_requests_running"} <= families
        with pytest.raises(SettingError, match=r"metrics cannot listen on 127.0.0.1:\d+ .*THIMBLE_ENGINE_METRICS_"):
            MetricsServer(t.metrics.registry, "127.0.0.1", server.port)
    finally:
        server.close()
    MetricsServer(t.metrics.registry, "127.0.0.1", server.port).close()
