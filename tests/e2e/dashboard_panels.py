"""A dashboard as its picture needs it: each panel's place, kind, queries and look. Owns what is understood of Grafana's
JSON; what it does not know it refuses, so that no picture shows less than Grafana would."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("row", "stat", "timeseries", "bargauge", "text")


class UnknownPanel(Exception):
    """The picture would not be what Grafana shows."""


@dataclass(frozen=True)
class Target:
    promql: str  # with Grafana's variables in it
    legend: str

    def asked(self, interval_s: int, range_s: int) -> str:
        """As Grafana would send it with every model chosen."""
        text = self.promql.replace("$__rate_interval", f"{interval_s}s").replace("$__range", f"{range_s}s")
        return text.replace("$model", ".*")

    def name(self, labels: Mapping[str, str]) -> str:
        return re.sub(r"{{\s*(\w+)\s*}}", lambda found: labels.get(found.group(1), ""), self.legend)


@dataclass(frozen=True)
class Panel:
    """`x`, `y`, `w`, `h`: on a grid of 24 columns. `colours`: by a series' name, where the dashboard says so."""

    kind: str
    title: str
    x: int
    y: int
    w: int
    h: int
    targets: tuple[Target, ...] = ()
    unit: str = "none"
    decimals: int | None = None
    low: float | None = None
    high: float | None = None
    stacked: bool = False
    fill: float = 0.0
    on_background: bool = False
    colours: Mapping[str, str] | None = None
    words: Mapping[float, tuple[str, str]] | None = None  # by value: what is written for it, in which colour
    steps: tuple[tuple[float, str], ...] = ()  # from which value on, which colour
    markdown: str = ""


def panels_of(dashboard: Path) -> list[Panel]:
    """Every panel, also those inside of rows. Raises UnknownPanel."""
    content = json.loads(dashboard.read_text())
    return [_panel(one) for panel in content["panels"] for one in (panel, *panel.get("panels", []))]


def _panel(panel: Mapping[str, Any]) -> Panel:
    kind, options = panel["type"], panel.get("options", {})
    field = panel.get("fieldConfig", {})
    defaults = field.get("defaults", {})
    custom = defaults.get("custom", {})
    stacking = custom.get("stacking", {}).get("mode", "none")
    if kind not in KINDS or stacking not in ("none", "normal") or custom.get("drawStyle", "line") != "line":
        raise UnknownPanel(f"{panel['title']}: a {kind} panel of this look cannot be drawn")
    return Panel(
        kind,
        panel["title"],
        **{name: panel["gridPos"][name] for name in "xywh"},
        targets=tuple(Target(one["expr"], one["legendFormat"]) for one in panel.get("targets", [])),
        unit=defaults.get("unit", "none"),
        decimals=defaults.get("decimals"),
        low=defaults.get("min"),
        high=defaults.get("max"),
        stacked=stacking == "normal",
        fill=custom.get("fillOpacity", 0) / 100,
        on_background=options.get("colorMode") == "background",
        colours=dict(_colour(panel["title"], one) for one in field.get("overrides", [])),
        words={float(key): value for one in defaults.get("mappings", []) for key, value in _words(one)},
        steps=tuple(
            (float(one["value"] or 0), one["color"]) for one in defaults.get("thresholds", {}).get("steps", [])
        ),
        markdown=options.get("content", ""),
    )


def _colour(title: str, override: Mapping[str, Any]) -> tuple[str, str]:
    [its] = override["properties"]
    if override["matcher"]["id"] != "byName" or its["id"] != "color" or its["value"]["mode"] != "fixed":
        raise UnknownPanel(f"{title}: only colours of series by name can be drawn")
    return override["matcher"]["options"], its["value"]["fixedColor"]


def _words(mapping: Mapping[str, Any]) -> list[tuple[str, tuple[str, str]]]:
    return [(value, (told["text"], told["color"])) for value, told in mapping["options"].items()]
