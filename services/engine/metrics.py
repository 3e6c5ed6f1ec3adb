"""The engine's metrics: every name is declared here, once, with all of its label values, so that each series exists
from the first scrape. Owns the registry and the /metrics endpoint; when something is counted, the scheduler says.

Names follow vLLM's where they mean the same, with our prefix; every series carries model_name. Written by the engine's
thread, read by scrapes.
"""

import itertools
import re
import time
from collections import Counter as Sums
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from services.engine.errors import EngineError
from services.engine.experts.streamer import Counters, Experts
from services.engine.gpu.counts import DeviceCounts
from services.engine.gpu.nvml import CardFigures
from services.engine.process import resident_bytes, written_bytes
from services.engine.request import Finish, Info, Reason, Source
from services.engine.spent import PARTS, Spent, TokenTime
from services.settings import SettingError

PREFIX = "thimble_"
PHASES = ("prefill", "decode")
DEVICES = ("cpu", "gpu")
DRAFTS = ("mtp", "ngram")  # kinds, as in drafts.py
TIERS = ("vram", "ram", "nvme")
CARD_GAUGES = {
    "memory_total_bytes": "memory of the GPU",
    "temperature_celsius": "its temperature",
    "power_watts": "power that it draws",
    "busy_ratio": "share of the last moments in which it computed",
}
# Long: a first token may wait minutes for a prompt of a whole book.
REQUEST_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
TOKEN_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.125, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10, 40)

GLANCE_S = 1.0  # at least between two looks at what the process has and the card says

Key = tuple[str, ...]  # a series' label values, in the order in which its labels are declared


class Metrics:
    """Counters and gauges of one engine. A metric with labels is a dict from label values to series."""

    def __init__(
        self,
        info: Info,
        experts: Experts,
        registry: CollectorRegistry,
        spent: Spent | None = None,
        device: Callable[[], DeviceCounts] | None = None,
        planned: Iterable[tuple[str, str, int]] = (),
        card: Callable[[], CardFigures] | None = None,
    ) -> None:
        """`spent`: what the network says of its time; `device`: of the GPU, if one computes; `card`: its driver;
        `planned`: kind of memory, owner, bytes."""
        self.registry = registry
        self._model = info.model
        self._experts = experts
        self._seen = experts.counters()
        self._spent, self._spent_seen = spent or Spent(), Spent()
        self._device, self._device_seen = device, device() if device else DeviceCounts()
        self._card, self._glanced_at, self._written_seen_bytes = card, 0.0, written_bytes()
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
        self.drafted = counters("spec_decode_num_draft_tokens", "drafts that were tried, by kind", kind=DRAFTS)
        self.accepted = counters("spec_decode_num_accepted_tokens", "of them, those that were right", kind=DRAFTS)
        self.draft_gain = gauge(
            "speculation_gain", "speed with drafts over that without, as measured; 0: not known", kind=DRAFTS
        )
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
            "expert_lookups", "experts a step needed, by where their blocks were", tier=TIERS, phase=PHASES
        )
        self.read_bytes = counters("nvme_read_bytes", "bytes of blocks read", kind=("demand", "prefetch"))
        self.prefetch_issued = counter("prefetch_issued", "blocks read ahead of need")
        self.prefetch_useful = counter("prefetch_useful", "of them, those that were needed while still there")
        self.prefetch_wasted = counter("prefetch_wasted", "of them, those that were evicted unused")
        self.evictions = counter("expert_cache_evictions", "blocks that gave way to others")
        self.slots = gauge("expert_slots", "places for a block in RAM", state=("used", "total"))
        self.computed = counters(
            "experts_computed",
            "experts computed, by where; the same one in two steps is two",
            device=DEVICES,
            phase=PHASES,
        )
        self.pcie_bytes = counters("pcie_bytes", "bytes over PCIe; none on a CPU", dir=("to_gpu", "from_gpu"))
        self.swept_bytes = counter("sweep_bytes", "of them, expert blocks that were copied to read prompts")
        self.gpu_waits_s = counter("gpu_expert_wait_seconds", "the GPU's waits for the host's experts")
        self.late = counter("late_tokens", "tokens that had to go on after the host was late")
        self.token_s = counters("token_time_seconds", "time between tokens of those that answer", part=PARTS)
        self.token_time = TokenTime({part: self.token_s[part,] for part in PARTS})
        self.decode_steps = counter("decode_steps", "steps that gave each of those that answer a token")

        self.memory_used = gauge("memory_used_bytes", "memory of this process, of the GPU by all", kind=("ram", "vram"))
        owners: Sums[Key] = Sums()
        for kind, owner, size_bytes in planned:
            owners[kind, owner] += size_bytes
        self._memory(owners)
        self.written_bytes = counter("disk_written_bytes", "bytes that this process caused to be written to disks")
        self.card = {
            name: gauge(f"gpu_{name}", f"{text}, by the driver; 0 if it says nothing")[()]
            for name, text in CARD_GAUGES.items()
        }

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
            end = time.perf_counter()
            self.forward_s[phase,].inc(end - begin)
            before = self._seen
            self._count_experts(phase, self._experts.counters())
            self._count_device(phase, before)
            self._count_time(phase, self._seen.disk_wait_s - before.disk_wait_s)
            if phase == "decode":
                self.token_time.took("counting", time.perf_counter() - end)

    def finished(self, finish: Finish) -> None:
        self.success[finish.reason.name.lower(),].inc()
        self.queue.observe(finish.queue_s)
        self.prefill.observe(finish.prefill_s)
        self.decode.observe(finish.decode_s)
        self.e2e.observe(finish.queue_s + finish.prefill_s + finish.decode_s)

    def _count_experts(self, phase: str, now: Counters) -> None:
        # Reads of a prefetch may end between two calls: they are counted with the next one, and have no phase.
        seen, self._seen = self._seen, now
        _add(self.lookups["ram", phase], now.hits - seen.hits)
        _add(self.lookups["nvme", phase], now.misses - seen.misses)
        _add(self.disk_wait_s[phase,], now.disk_wait_s - seen.disk_wait_s)
        _add(self.compute_s[phase,], now.compute_s - seen.compute_s)
        _add(self.read_bytes["demand",], now.demand_read_bytes - seen.demand_read_bytes)
        _add(self.read_bytes["prefetch",], now.prefetch_read_bytes - seen.prefetch_read_bytes)
        _add(self.prefetch_issued, now.prefetch_issued - seen.prefetch_issued)
        _add(self.prefetch_useful, now.prefetch_useful - seen.prefetch_useful)
        _add(self.prefetch_wasted, now.prefetch_wasted - seen.prefetch_wasted)
        _add(self.evictions, now.evictions - seen.evictions)
        self.slots["used",].set(now.slots_used)
        self.slots["total",].set(now.slots_total)

    def _count_device(self, phase: str, before: Counters) -> None:
        if self._device is None:
            now, seen = self._seen, before
            _add(self.computed["cpu", phase], now.hits + now.misses - seen.hits - seen.misses)
            return
        counts, last = self._device(), self._device_seen
        self._device_seen = counts
        swept = self._seen.sweep_blocks - before.sweep_blocks
        _add(self.computed["gpu", phase], counts.gpu_experts - last.gpu_experts + swept)
        _add(self.computed["cpu", phase], counts.host_experts - last.host_experts)
        _add(self.lookups["vram", phase], counts.vram_experts - last.vram_experts)
        _add(self.pcie_bytes["to_gpu",], counts.to_gpu_bytes - last.to_gpu_bytes)
        _add(self.pcie_bytes["from_gpu",], counts.from_gpu_bytes - last.from_gpu_bytes)
        _add(self.swept_bytes, counts.swept_bytes - last.swept_bytes)
        _add(self.gpu_waits_s, counts.waited_s - last.waited_s)
        _add(self.late, counts.late - last.late)

    def _count_time(self, phase: str, disk_s: float) -> None:
        now, seen = self._spent, self._spent_seen
        if phase == "decode":
            self.token_time.took("dense", now.dense_s - seen.dense_s)
            self.token_time.took("experts", now.experts_s - seen.experts_s - disk_s)
            self.token_time.took("disk", disk_s)
            self.token_time.took("handoff", now.handoff_s - seen.handoff_s)
            self.token_time.took("inputs", now.inputs_s - seen.inputs_s)
            self.decode_steps.inc()
        self._spent_seen = replace(now)

    def glance(self) -> None:
        """At what the process has and the card says, now and then."""
        if time.monotonic() - self._glanced_at < GLANCE_S:
            return
        self._glanced_at = time.monotonic()
        with suppress(OSError):  # too many files are open, say: no reason to end an engine
            self.memory_used["ram",].set(resident_bytes())
            written = written_bytes()
            self.written_bytes.inc(max(0, written - self._written_seen_bytes))
            self._written_seen_bytes = max(self._written_seen_bytes, written)
        if self._card is not None:
            figures = self._card()
            self.memory_used["vram",].set(figures.memory_used_bytes)
            self.card["memory_total_bytes"].set(figures.memory_total_bytes)
            self.card["temperature_celsius"].set(figures.celsius)
            self.card["power_watts"].set(figures.watts)
            self.card["busy_ratio"].set(figures.busy)

    def _memory(self, owners: dict[Key, int]) -> None:
        """Pairs of kind and owner, not every kind with every owner."""
        text = "memory as it was planned at the start, by what has it"
        labels = ["model_name", "kind", "owner"]
        family = Gauge(PREFIX + "memory_planned_bytes", text, labels, registry=self.registry)
        for key, size_bytes in owners.items():
            family.labels(self._model, *key).set(size_bytes)

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


def _add(counter: Counter, amount: float) -> None:
    """Most counters stand still in most steps."""
    if amount:
        counter.inc(amount)


def owner(line: str) -> str:
    """Of a line of a ledger, without its numbers: "KV, 32 pages of 64 tokens" is "KV", whatever was planned."""
    return re.sub(r"\s*\d+\s*", " ", re.split(r",| \(", line)[0]).strip()


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
