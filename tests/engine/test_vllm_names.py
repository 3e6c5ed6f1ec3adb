"""vLLM's names carry our values, at the endpoint that Prometheus scrapes; they are there only if asked for."""

import urllib.request

from demo_engine import demo
from prometheus_client.parser import text_string_to_metric_families
from toy_engine import Toy, toy

from services.engine.experts.store import Store
from services.engine.metrics import MetricsServer
from services.engine.request import Request
from services.engine.vllm_names import COUNTERS, GAUGES, HISTOGRAMS, VllmNames

MODEL = {"model_name": "toy"}
THEIRS = MODEL | {"engine": "0"}


def scraped(t: Toy) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    server = MetricsServer(t.metrics.registry, "127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def test_they_carry_our_values() -> None:
    with toy() as t:
        t.metrics.registry.register(VllmNames(t.metrics.registry))
        t.ask(Request("a", (1, 2, 3), 6)).finish()
        t.engine.close()
        t.metrics.kv_pages["used",].set(8)
        samples = scraped(t)
    names = [*GAUGES, *(f"{name}_total" for name in COUNTERS), *(f"{name}_bucket" for name in HISTOGRAMS)]
    for name in names:
        theirs = {labels - {("engine", "0")}: value for labels, value in samples[f"vllm:{name}"].items()}
        assert theirs == samples[f"thimble_{name}"], name
        assert all(("engine", "0") in labels for labels in samples[f"vllm:{name}"])
    assert samples["vllm:generation_tokens_total"] == {frozenset(THEIRS.items()): 6}
    assert samples["vllm:kv_cache_usage_perc"] == {frozenset(THEIRS.items()): 8 / 32}
    assert not {name for name in samples if name.startswith("vllm:expert")}


def test_the_setting_is_off_by_default(demo_store: Store) -> None:
    for on in (False, True):
        with demo(demo_store, expert_slots=64, **({"vllm_names": True} if on else {})) as engine:
            names = {family.name for family in engine._registry.collect()}
        assert ("vllm:generation_tokens" in names) is on
