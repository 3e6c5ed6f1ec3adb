"""The engine's metrics: every name is declared here, once, with all of its label values, so that each series exists
from the first scrape. Owns the registry and the /metrics endpoint; when something is counted, the scheduler says.

Names follow vLLM's where they mean the same, with our prefix; every series carries model_name. Written by the engine's
thread, read by scrapes.
"""

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from services.engine.errors import EngineError
from services.engine.experts.streamer import Counters, Experts
from services.engine.request import Finish, Info, Reason, Source
from services.settings import SettingError

PREFIX = "thimble_"
PHASES = ("prefill", "decode")
# Long: a first token may wait minutes for a prompt of a whole book.
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)

Key = tuple[str, ...]  # a series' label values, in the order in which its labels are declared


class Metrics:
    """Counters and gauges of one engine. A metric with labels is a dict from label values to series."""

    def __init__(self, info: Info, experts: Experts, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._model = info.model
        self._experts = experts
        self._seen = experts.counters()
        gauge, counter, counters, histogram = self._gauge, self._counter, self._counters, self._histogram

        gauge("build_info", "1; the version is in the labels", version=(info.version,))[info.version,].set(1)
        gauge(
            "model_info",
            "1; the model is in the labels",
            model_fingerprint=(info.model_fingerprint,),
            arithmetic_fingerprint=(info.arithmetic_fingerprint,),
            device=(info.device,),
        )[info.model_fingerprint, info.arithmetic_fingerprint, info.device].set(1)

        requests = ("running", "waiting")
        self.requests = {state: gauge(f"num_requests_{state}", f"requests {state}")[()] for state in requests}
        self.kv_pages = gauge("kv_pages", "KV pages of the pool", state=("used", "total"))
        self.hot_states = gauge("hot_states", "states kept in RAM")[()]
        self.hot_state_bytes = gauge("hot_state_bytes", "RAM taken by hot states")[()]

        self.prompt_tokens = counter("prompt_tokens", "prompt tokens that the model ran")
        self.idle_tokens = counter(
            "idle_tokens", "tokens read ahead of the next request, while there was nothing to do"
        )
        self.idle_put_off = counter("idle_put_off", "times that such reading gave way to a request")
        self.generation_tokens = counter("generation_tokens", "tokens sampled")
        self.cache_queries = counter("prefix_cache_queries", "prompt tokens of the requests that got a place")
        self.cache_hits = counter("prefix_cache_hits", "of them, tokens that came from a restored state")
        self.success = counters(
            "request_success",
            "answers, by why they ended",
            finished_reason=tuple(reason.name.lower() for reason in Reason),
        )
        self.failures = counters(
            "request_failures", "requests that ended in an error", code=tuple(kind.code for kind in EngineError.tree())
        )
        self.ttft = histogram("time_to_first_token_seconds", "from submission to first token", REQUEST_BUCKETS_S)
        self.itl = histogram("inter_token_latency_seconds", "between two tokens of an answer", TOKEN_BUCKETS_S)
        self.prefill_stall = histogram(
            "prefill_stall_seconds", "how long answers stood still for a slice of prompt reading", TOKEN_BUCKETS_S
        )
        self.e2e = histogram("e2e_request_latency_seconds", "from submission to the end", REQUEST_BUCKETS_S)
        self.queue = histogram("request_queue_time_seconds", "from submission to a place", REQUEST_BUCKETS_S)
        self.prefill = histogram("request_prefill_time_seconds", "from a place to first token", REQUEST_BUCKETS_S)
        self.decode = histogram("request_decode_time_seconds", "from first token to the end", REQUEST_BUCKETS_S)

        self.forward_s = counters("forward_seconds", "time in the model", phase=PHASES)
        self.disk_wait_s = counters("disk_wait_seconds", "of it, waiting for the disk", phase=PHASES)
        self.compute_s = counters("expert_compute_seconds", "of it, computing routed experts", phase=PHASES)
        self.lookups = counters(
            "expert_lookups", "experts a step needed, by where their blocks were", tier=("ram", "nvme"), phase=PHASES
        )
        self.read_bytes = counters("nvme_read_bytes", "bytes of blocks read", kind=("demand", "prefetch"))
        self.prefetch_issued = counter("prefetch_issued", "blocks read ahead of need")
        self.prefetch_useful = counter("prefetch_useful", "of them, those that were needed while still there")
        self.prefetch_wasted = counter("prefetch_wasted", "of them, those that were evicted unused")
        self.evictions = counter("expert_cache_evictions", "blocks that gave way to others")
        self.slots = gauge("expert_slots", "places for a block in RAM", state=("used", "total"))
        self.pcie_bytes = counters("pcie_bytes", "bytes over PCIe; none on a CPU", dir=("to_gpu", "from_gpu"))

        sources = tuple(source.name.lower() for source in Source if source is not Source.SEND)
        self.restores = counters("snapshot_lookups", "where requests' first states came from", result=sources)
        self.pictures = counters("pictures", "pictures asked for: held already, or read", result=("held", "read"))
        self.snapshots = counters("snapshots", "states wanted by requests", result=("taken", "held", "dropped"))
        self.snapshot_bytes = counters("snapshot_bytes", "payload bytes", dir=("taken", "received"))

    @contextmanager
    def forward(self, phase: str) -> Iterator[None]:
        """Around one call of the model: its time, and what the experts did in it."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.forward_s[phase,].inc(time.perf_counter() - begin)
            self._count_experts(phase, self._experts.counters())

    def finished(self, finish: Finish) -> None:
        self.success[finish.reason.name.lower(),].inc()
        self.queue.observe(finish.queue_s)
        self.prefill.observe(finish.prefill_s)
        self.decode.observe(finish.decode_s)
        self.e2e.observe(finish.queue_s + finish.prefill_s + finish.decode_s)

    def _count_experts(self, phase: str, now: Counters) -> None:
        # Reads of a prefetch may end between two calls: they are counted with the next one, and have no phase.
        seen, self._seen = self._seen, now
        self.lookups["ram", phase].inc(now.hits - seen.hits)
        self.lookups["nvme", phase].inc(now.misses - seen.misses)
        self.disk_wait_s[phase,].inc(now.disk_wait_s - seen.disk_wait_s)
        self.compute_s[phase,].inc(now.compute_s - seen.compute_s)
        self.read_bytes["demand",].inc(now.demand_read_bytes - seen.demand_read_bytes)
        self.read_bytes["prefetch",].inc(now.prefetch_read_bytes - seen.prefetch_read_bytes)
        self.prefetch_issued.inc(now.prefetch_issued - seen.prefetch_issued)
        self.prefetch_useful.inc(now.prefetch_useful - seen.prefetch_useful)
        self.prefetch_wasted.inc(now.prefetch_wasted - seen.prefetch_wasted)
        self.evictions.inc(now.evictions - seen.evictions)
        self.slots["used",].set(now.slots_used)
        self.slots["total",].set(now.slots_total)

    def _counter(self, name: str, text: str) -> Counter:
        return self._counters(name, text)[()]

    def _counters(self, name: str, text: str, **labels: Key) -> dict[Key, Counter]:
        family = Counter(PREFIX + name, text, ["model_name", *labels], registry=self.registry)
        return {key: family.labels(self._model, *key) for key in itertools.product(*labels.values())}

    def _gauge(self, name: str, text: str, **labels: Key) -> dict[Key, Gauge]:
        family = Gauge(PREFIX + name, text, ["model_name", *labels], registry=self.registry)
        return {key: family.labels(self._model, *key) for key in itertools.product(*labels.values())}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(PREFIX + name, text, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model)


class MetricsServer:
    """/metrics over HTTP in a thread of its own. Port 0 takes any free one; `port` says which."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        """Raises SettingError if the address cannot be listened on."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise SettingError(
                f"metrics cannot listen on {host}:{port} ({error}): set THIMBLE_ENGINE_METRICS_HOST and _PORT"
            ) from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
