"""The api's metrics: every name is declared here, once, with all of its label values. Owns the registry; where a thing
happens, it is counted. The engine has its own (thimble_...); these, thimble_api_..., are what clients see."""

import itertools
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.api.errors import all_errors

PREFIX = "thimble_api_"
# Long: a first token may wait minutes for a prompt of a whole book, a token for a cold disk.
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)
SHORT_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

FINISH_REASONS = ("stop", "length", "tool_calls")
LOOKUPS = ("hot", "sent", "none", "refused")  # where the prompt's beginning came from, by the engine's word
AHEAD = ("done", "overtaken", "failed")
DISK = ("written", "skipped", "read", "refused")
DISK_LIMITS = ("kept", "day")  # bytes of files, and bytes written in a day; 0 without a disk
STORE_BYTES = ("used", "limit")  # limit 0: there is none
EVICTORS = ("store", "api")  # the api removes the longest unused states before it stores a new one
WRITES = ("stored", "present", "refused", "failed")

Key = tuple[str, ...]


class Metrics:
    """Counters and gauges of one api process. A metric with labels is a dict from label values to series."""

    def __init__(self, version: str) -> None:
        self.registry = CollectorRegistry()
        counter, counters, histogram = self._counter, self._counters, self._histogram
        Gauge(PREFIX + "build_info", "1; the version is in the label", ["version"], registry=self.registry).labels(
            version
        ).set(1)

        # Routes and methods are few (middleware.py), but statuses are not ours to list: the one family whose series
        # appear with use.
        self.http = Counter(
            PREFIX + "http_requests", "requests, by route", ["route", "method", "status"], registry=self.registry
        )
        self.errors = counters("errors", "failures told to clients", code=sorted({e.code for e in all_errors()}))
        self.in_progress = self._gauge("answers_in_progress", "answers being made")
        self.answers = counters("answers", "complete answers, by why they ended", finish_reason=FINISH_REASONS)
        self.disconnects = counter("client_disconnects", "answers given up because the client went away")

        self.prompt_tokens = counter("prompt_tokens", "prompt tokens of complete answers")
        self.cached_tokens = counter("cached_prompt_tokens", "of them, tokens that a restored state had read")
        self.completion_tokens = counter("completion_tokens", "tokens of complete answers")
        self.reasoning_tokens = counter("reasoning_tokens", "of them, tokens of thinking")
        self.tool_calls = counter("tool_calls", "tool calls in answers")

        self.ttft = histogram("time_to_first_token_seconds", "from request to first token", REQUEST_BUCKETS_S)
        self.itl = histogram("inter_token_latency_seconds", "between two tokens of an answer", TOKEN_BUCKETS_S)
        self.e2e = histogram("e2e_request_latency_seconds", "from request to the end", REQUEST_BUCKETS_S)
        self.prompt_s = histogram("prompt_seconds", "template, tokenizer and look-up of a prompt", SHORT_BUCKETS_S)

        self.lookups = counters("snapshot_lookups", "where prompts' beginnings came from", result=LOOKUPS)
        self.ahead = counters("reads_ahead", "histories read ahead of the next turn", result=AHEAD)
        self.ahead_tokens = counter("tokens_read_ahead", "tokens that engines ran for that")
        self.mismatches = counter("snapshot_mismatches", "records that did not fit their text; removed")
        self.writes = counters("snapshot_writes", "snapshots that engines sent", result=WRITES)
        self.replaced = counter("snapshots_replaced", "older states of a dialog that were removed for a newer one")
        self.snapshot_bytes = counters("snapshot_bytes", "payload bytes", dir=("stored", "sent"))
        self.lookup_s = histogram("snapshot_lookup_seconds", "finding the longest stored beginning", SHORT_BUCKETS_S)
        self.send_s = histogram("snapshot_send_seconds", "from store to engine, one payload", SHORT_BUCKETS_S)
        self.save_s = histogram("snapshot_save_seconds", "from engine to store, one answer's payloads", SHORT_BUCKETS_S)
        self.disk = counters("snapshot_disk", "states written to the disk or read from it", result=DISK)
        self.disk_written = counter("snapshot_disk_written_bytes", "written to the disk for them")
        self.disk_bytes = self._gauge("snapshot_disk_bytes", "kept on the disk for them")
        self.disk_limits = self._gauges("snapshot_disk_limit_bytes", "most that may be there", of=DISK_LIMITS)
        self.store_bytes = self._gauges("snapshot_store_bytes", "memory of the snapshot store", kind=STORE_BYTES)
        self.store_evictions = counters("snapshot_store_evictions", "keys removed for want of memory", by=EVICTORS)
        self.store_available = self._gauge("snapshot_store_available", "1 while the snapshot store answers in time")

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self.registry)

    def _counters(self, name: str, text: str, **labels: Sequence[str]) -> dict[Key, Counter]:
        family = Counter(PREFIX + name, text, list(labels), registry=self.registry)
        return {key: family.labels(*key) for key in itertools.product(*labels.values())}

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def _gauges(self, name: str, text: str, **labels: Sequence[str]) -> dict[Key, Gauge]:
        family = Gauge(PREFIX + name, text, list(labels), registry=self.registry)
        return {key: family.labels(*key) for key in itertools.product(*labels.values())}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(PREFIX + name, text, registry=self.registry, buckets=buckets)
