"""The series that mean the same in vLLM under vLLM's names, so that its stock dashboards show this engine. Off unless
the setting says so. Owns the names; the values are those of metrics.py at every scrape.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OURS, THEIRS = "thimble_", "vllm:"
GAUGES = ("num_requests_running", "num_requests_waiting")
COUNTERS = (
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success"),
    *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
)
HISTOGRAMS = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
)
PAGES, USAGE = "kv_pages", "kv_cache_usage_perc"
ENGINE = {"engine": "0"}  # a label that theirs have


class VllmNames(Collector):
    """Registered beside the metrics that it repeats."""

    def __init__(self, registry: CollectorRegistry) -> None:
        samples = [*GAUGES, PAGES, *(f"{name}_total" for name in COUNTERS)]
        samples += [f"{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")]
        self._ours = registry.restricted_registry([OURS + name for name in samples])

    def collect(self) -> Iterator[Metric]:
        for family in self._ours.collect():
            if family.name == OURS + PAGES:
                yield _usage(family)
                continue
            theirs = Metric(_renamed(family.name), family.documentation, family.type)
            for sample in family.samples:
                theirs.add_sample(_renamed(sample.name), sample.labels | ENGINE, sample.value, sample.timestamp)
            yield theirs


def _renamed(name: str) -> str:
    return THEIRS + name.removeprefix(OURS)


def _usage(pages: Metric) -> Metric:
    """From used and total pages to the share in use."""
    counts = {sample.labels["state"]: sample for sample in pages.samples}
    model = counts["total"].labels["model_name"]
    usage = GaugeMetricFamily(THEIRS + USAGE, "share of the KV pages in use", labels=("model_name", *ENGINE))
    usage.add_metric((model, *ENGINE.values()), counts["used"].value / max(1.0, counts["total"].value))
    return usage
