"""What dashboards and alert rules ask of Prometheus: every query, where it stands, and its metrics and labels."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

GRAFANA = Path(__file__).parents[2] / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))


@dataclass(frozen=True)
class Query:
    where: str
    text: str

    def __str__(self) -> str:
        return self.where

    @property
    def promql(self) -> str:
        """As Grafana would send it with every model chosen; the window suits a scrape every second."""
        return self.text.replace("$__rate_interval", "30s").replace("$__range", "1m").replace("$model", ".*")

    def reads(self) -> dict[str, set[str]]:
        """Each metric that it reads, with the labels it picks and groups by. Raises ValueError if it is not PromQL."""
        metrics: dict[str, set[str]] = {}

        def read(tree: Any, grouped: set[str]) -> None:
            def visit(node: Any) -> None:
                if isinstance(node, promql_parser.VectorSelector):
                    picked = {matcher.name for matcher in node.matchers.matchers}
                    metrics.setdefault(node.name, set()).update(picked | grouped)
                if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
                    read(node.expr, grouped | set(node.modifier.labels))

            promql_parser.walk(tree, visit)

        read(promql_parser.parse(self.promql), set())
        return metrics


def panel_queries(dashboard: Path) -> Iterator[Query]:
    content = json.loads(dashboard.read_text())
    for panel in content["panels"]:
        for inner in [panel, *panel.get("panels", [])]:
            for target in inner.get("targets", []):
                yield Query(f"{dashboard.stem}: {inner['title']} {target['refId']}", target["expr"])


def rule_queries() -> Iterator[Query]:
    for group in yaml.safe_load((GRAFANA / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield Query(f"rule: {rule.get('alert') or rule['record']}", rule["expr"])
