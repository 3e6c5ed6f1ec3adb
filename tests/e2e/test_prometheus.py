"""A real Prometheus scrapes the running stack under a short load, and every panel and rule has data to show."""

import json
import math
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from panels import DASHBOARDS, GRAFANA, Query, panel_queries
from running import Reply, Running, until, user

pytestmark = pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus here: apt install prometheus")
LOAD_S = 8


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
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
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

    def has_data(self, query: Query, since: float) -> bool:
        """Whether its panel would show at least one point: a number, not only NaN."""
        series = self.get("/api/v1/query_range", query=query.promql, start=since, end=time.time(), step=1)["result"]
        return any(not math.isnan(float(value)) for one in series for _, value in one["values"])

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(20)
        self._log.close()


@pytest.fixture
def prometheus(tmp_path: Path, stack: Running) -> Iterator[Prometheus]:
    server = Prometheus(tmp_path, stack)
    try:
        assert until(server.is_up, 30), (tmp_path / "log").read_text()
        yield server
    finally:
        server.close()


def load(stack: Running, until_time: float) -> None:
    """Two dialogs at a time, some with a second turn, one refused: a bit of everything that panels show."""
    plain = stack.client.models.list().data[0].id

    def talk(number: int) -> None:
        turn = 0
        while time.time() < until_time:
            turn += 1
            dialog = [user(f"What is {number} + {turn}?")]
            reply = Reply(stack.client, plain, dialog, max_tokens=12)
            Reply(
                stack.client,
                plain,
                [*dialog, {"role": "assistant", "content": reply.content}, user("Thanks!")],
                max_tokens=4,
            )
            with pytest.raises(openai.BadRequestError):
                Reply(stack.client, plain, [], max_tokens=1)

    threads = [threading.Thread(target=talk, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_panel_has_data(prometheus: Prometheus, stack: Running) -> None:
    begin = time.time()
    load(stack, begin + LOAD_S)
    queries = [query for dashboard in DASHBOARDS for query in panel_queries(dashboard)]
    assert until(lambda: all(prometheus.has_data(query, begin) for query in queries), 10), [
        str(query) for query in queries if not prometheus.has_data(query, begin)
    ]
    assert not prometheus.has_data(Query("control", "rate(thimble_no_such_thing_total[30s])"), begin)

    assert prometheus.has_data(Query("rule", "thimble:expert_hit_ratio:rate10m"), begin)
    rules = [rule for group in prometheus.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []
    assert prometheus.get("/api/v1/alerts")["alerts"] == []
