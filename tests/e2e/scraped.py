"""A real Prometheus with this repository's configuration and rules, beside a running stack. Owns its process."""

import json
import math
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from panels import GRAFANA, Query
from ports import free_ports
from running import Running


class Prometheus:
    """Ours in everything but the targets and the pace."""

    def __init__(self, folder: Path, stack: Running) -> None:
        config = yaml.safe_load((GRAFANA / "prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
        urls = {"thimble-engine": stack.engine_metrics_url, "thimble-api": f"{stack.url}/metrics"}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [urllib.parse.urlsplit(urls[job["job_name"]]).netloc]}]
        shutil.copy(GRAFANA / "alerts.yml", folder)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        [port] = free_ports(1)
        address = f"127.0.0.1:{port}"
        self.url = f"http://{address}"
        self._log = (folder / "log").open("wb")
        words = [
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={address}",
        ]
        self.process = subprocess.Popen(["prometheus", *words], stdout=self._log, stderr=self._log)

    def get(self, path: str, **parameters: Any) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}?{urllib.parse.urlencode(parameters)}", timeout=10) as reply:
            return json.load(reply)["data"]

    def is_up(self) -> bool:
        try:
            return len(self.get("/api/v1/query", query="up == 1")["result"]) == 2
        except (urllib.error.URLError, ConnectionError):
            return False

    def series(self, promql: str, begin: float, end: float, step_s: int = 1) -> list[dict[str, Any]]:
        """Of a range, as Prometheus gives it: `metric` and `values`."""
        found: list[dict[str, Any]] = self.get("/api/v1/query_range", query=promql, start=begin, end=end, step=step_s)[
            "result"
        ]
        return found

    def has_data(self, query: Query, since: float) -> bool:
        """Whether its panel would show at least one point: a number, not only NaN."""
        series = self.series(query.promql, since, time.time())
        return any(not math.isnan(float(value)) for one in series for _, value in one["values"])

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        self._log.close()
