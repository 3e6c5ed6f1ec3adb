"""Dashboards and alert rules ask only for what is there: valid PromQL, declared metrics, labels that those carry."""

import json
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from panels import DASHBOARDS, GRAFANA, Query, panel_queries, rule_queries
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from services.api.metrics import Metrics as ApiMetrics
from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts
from services.engine.metrics import Metrics as EngineMetrics
from services.engine.request import Info

SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
SCRAPE = {"job", "instance"}
BY_PROMETHEUS = {"up": set[str]()}
RECORDED = {"thimble:expert_hit_ratio:rate10m": {"model_name"}}

Declared = dict[str, set[str]]


def series(registry: CollectorRegistry) -> Declared:
    """Every series name that scrapes may bring, with its labels; families whose series come with use as well."""
    found: Declared = {}
    for collector in set(registry._collector_to_names):
        assert isinstance(collector, MetricWrapperBase)
        for suffix in SUFFIXES[collector._type]:
            found[collector._name + suffix] = {*collector._labelnames, *({"le"} if suffix == "_bucket" else ())}
    return found


@pytest.fixture(scope="session")
def declared(demo_store: Store) -> Declared:
    """What both services declare, read from the registries that they serve."""
    registry = CollectorRegistry()
    experts = open_experts(demo_store, slots=8, readers=1, workers=1)
    try:
        EngineMetrics(Info("m", "", "", 1, 1, 1, 1, False, "cpu", "0"), experts, registry)
        return series(registry) | series(ApiMetrics("0").registry) | RECORDED | BY_PROMETHEUS
    finally:
        experts.close()


def complaints(query: Query, declared: Declared) -> list[str]:
    wrong = []
    for metric, labels in query.reads().items():
        if metric not in declared:
            wrong.append(f"{query}: no metric {metric}")
        elif not labels <= declared[metric] | SCRAPE:
            wrong.append(f"{query}: {metric} has no label {labels - declared[metric] - SCRAPE}")
    return wrong


def all_queries() -> list[Query]:
    return [query for dashboard in DASHBOARDS for query in panel_queries(dashboard)] + list(rule_queries())


def test_every_query_asks_for_what_is_declared(declared: Declared) -> None:
    assert len(all_queries()) > 40
    assert [text for query in all_queries() for text in complaints(query, declared)] == []


@pytest.mark.parametrize(
    "promql",
    [
        "rate(thimble_generated_tokens_total[1m])",
        'thimble_expert_lookups_total{teir="ram"}',
        "sum by (reason) (thimble_request_success_total)",
        "thimble_generation_tokens",
        "thimble_time_to_first_token_seconds",
    ],
)
def test_a_misspelt_query_is_noticed(promql: str, declared: Declared) -> None:
    assert complaints(Query("control", promql), declared) != []


def test_what_is_not_promql_is_noticed() -> None:
    with pytest.raises(ValueError, match=r"\w"):
        promql_parser.parse("rate(thimble_x_total[5m")


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_are_complete_and_do_not_overlap(dashboard: Path) -> None:
    content = json.loads(dashboard.read_text())
    panels: list[dict[str, Any]] = content["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"]
        if panel["type"] == "text":
            assert panel["options"]["content"], panel["title"]
        elif panel["type"] != "row":
            assert panel["description"], panel["title"]
            assert panel["targets"], panel["title"]
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24, panel["title"]
        assert not cells & taken, panel["title"]
        taken |= cells


def test_provisioning_fits_the_dashboards() -> None:
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/thimble.yml").read_text())["providers"]
    compose = (GRAFANA.parent / "docker-compose.yml").read_text()
    assert f"./grafana/dashboards:{provider['options']['path']}:ro" in compose
    assert source["url"] == "http://prometheus:9090"
    for dashboard in DASHBOARDS:
        [variable] = [v for v in json.loads(dashboard.read_text())["templating"]["list"] if v["type"] == "datasource"]
        assert variable["current"]["value"] == source["uid"]
