"""What `thimble top` shows of two scrapes: lines of text. Owns the arithmetic between scrapes and the layout.

Where no token was made between the two, the shares are those since the start, and the heading says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

BAR, PARTS_SHOWN = 40, 0.0005  # columns; a smaller share of a token has no line
GB = 1e9
OWNERS = 4  # that memory is told of, the largest; the others are together

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """Samples by name and labels, and when they were asked for, in seconds."""

    samples: dict[str, dict[Labels, float]]
    at_s: float = 0.0

    @staticmethod
    def parse(*texts: str, at_s: float = 0.0) -> "Scrape":
        samples: dict[str, dict[Labels, float]] = {}
        for text in texts:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
        return Scrape(samples, at_s)

    def label(self, name: str, label: str) -> str:
        """Of the first series; empty if there is none."""
        return next((dict(labels).get(label, "") for labels in self.samples.get(name, {})), "")


@dataclass(frozen=True)
class Window:
    """Between two scrapes; or, with `before` empty, since the services began."""

    before: Scrape
    now: Scrape

    @property
    def seconds(self) -> float:
        """0: not known."""
        return self.now.at_s - self.before.at_s if self.before.samples else 0.0

    def sums(self, name: str, label: str, **where: str) -> dict[str, float]:
        """By the label's values, how much a counter rose. A service that began again counts from 0."""
        found: dict[str, float] = {}
        for labels, value in self.now.samples.get(name, {}).items():
            if where.items() <= dict(labels).items():
                rose = value - self.before.samples.get(name, {}).get(labels, 0.0)
                key = dict(labels).get(label, "")
                found[key] = found.get(key, 0.0) + (rose if rose >= 0 else value)
        return found

    def sum(self, name: str, **where: str) -> float:
        return sum(self.sums(name, "", **where).values())

    def level(self, name: str, **where: str) -> float:
        """Of a gauge, now."""
        series = self.now.samples.get(name, {})
        return sum(value for labels, value in series.items() if where.items() <= dict(labels).items())


def view(before: Scrape, now: Scrape) -> list[str]:
    window = Window(before, now)
    heading = f"the last {window.seconds:.1f} s"
    if not window.sum("thimble_decode_steps_total"):
        window = Window(Scrape({}), now)
        heading = f"since the start; no token in {heading}"
    name, device = now.label("thimble_model_info", "model_name"), now.label("thimble_model_info", "device")
    lines = [f"{name} on {device}, {heading}", ""]
    for part in (_answers, _prompts, _token, _experts, _disk, _gpu, _memory, _dialogs):
        lines += part(window)
    return lines


def _answers(window: Window) -> Iterator[str]:
    tokens, steps = window.sum("thimble_generation_tokens_total"), window.sum("thimble_decode_steps_total")
    token_s = window.sum("thimble_token_time_seconds_total")
    running, waiting = (window.level(f"thimble_num_requests_{state}") for state in ("running", "waiting"))
    speed = f"{_rate(tokens, window, 'tok/s', 1.0)}, {1e3 * token_s / steps:.2f} ms a step" if steps else "none yet"
    yield _line("answers", f"{speed}; {running:.0f} running, {waiting:.0f} waiting")


def _prompts(window: Window) -> Iterator[str]:
    read = window.sum("thimble_prompt_tokens_total")
    hits, asked = window.sum("thimble_prefix_cache_hits_total"), window.sum("thimble_prefix_cache_queries_total")
    saved = f"; {hits:.0f} of {asked:.0f} prompt tokens ({hits / asked:.0%}) from snapshots" if asked else ""
    yield _line("prompts", f"{_rate(read, window, 'tok/s', 1.0)} read{saved}")


def _token(window: Window) -> Iterator[str]:
    """Where a token's time goes, the largest part first."""
    parts = window.sums("thimble_token_time_seconds_total", "part")
    steps = window.sum("thimble_decode_steps_total")
    whole_s = sum(parts.values())
    if not whole_s:
        return
    yield ""
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        share = seconds / whole_s
        if share >= PARTS_SHOWN:
            bar = "#" * round(BAR * share)
            yield _line(part, f"{bar:<{BAR}} {1e3 * seconds / steps:9.3f} ms {share:6.1%}")
    yield ""


def _experts(window: Window) -> Iterator[str]:
    for phase in ("decode", "prefill"):
        tiers = window.sums("thimble_expert_lookups_total", "tier", phase=phase)
        devices = window.sums("thimble_experts_computed_total", "device", phase=phase)
        if looked := sum(tiers.values()):
            found = ", ".join(f"{count / looked:.1%} {tier}" for tier, count in sorted(tiers.items(), reverse=True))
            computed = sum(devices.values()) or 1
            by = ", ".join(f"{count / computed:.0%} {device}" for device, count in sorted(devices.items()))
            yield _line("experts", f"{phase}: {found}; computed by {by}")


def _disk(window: Window) -> Iterator[str]:
    kinds = window.sums("thimble_nvme_read_bytes_total", "kind")
    reads = ", ".join(f"{_rate(size, window, 'GB/s', GB)} {kind}" for kind, size in sorted(kinds.items()))
    waited_s, forward_s = window.sum("thimble_disk_wait_seconds_total"), window.sum("thimble_forward_seconds_total")
    share = f"; waited for {waited_s / forward_s:.1%} of the model's time" if forward_s else ""
    yield _line("disk", reads + share)


def _gpu(window: Window) -> Iterator[str]:
    ways = window.sums("thimble_pcie_bytes_total", "dir")
    if not sum(ways.values()):
        return
    bytes_ = ", ".join(f"{_rate(size, window, 'GB/s', GB)} {way.replace('_', ' ')}" for way, size in ways.items())
    late = window.sum("thimble_late_tokens_total")
    yield _line("PCIe", f"{bytes_}; {late:.0f} tokens were late")
    watts, celsius = window.level("thimble_gpu_power_watts"), window.level("thimble_gpu_temperature_celsius")
    if celsius:
        yield _line("GPU", f"{window.level('thimble_gpu_busy_ratio'):.0%} busy, {watts:.0f} W, {celsius:.0f} C")


def _memory(window: Window) -> Iterator[str]:
    for kind in ("ram", "vram"):
        owners = {
            dict(labels)["owner"]: value
            for labels, value in window.now.samples.get("thimble_memory_planned_bytes", {}).items()
            if dict(labels)["kind"] == kind
        }
        if not owners:
            continue
        ranked = sorted(owners.items(), key=lambda item: -item[1])
        rest = sum(value for _, value in ranked[OWNERS:])
        told = [*ranked[:OWNERS], *([("others", rest)] if rest else [])]
        planned = ", ".join(f"{name} {value / GB:.3f}" for name, value in told)
        used = window.level("thimble_memory_used_bytes", kind=kind)
        yield _line(kind.upper(), f"{used / GB:.3f} GB used; planned: {planned}")


def _dialogs(window: Window) -> Iterator[str]:
    if "thimble_api_snapshot_store_available" not in window.now.samples:
        yield _line("api", "does not answer")
        return
    used, limit = (window.level("thimble_api_snapshot_store_bytes", kind=kind) for kind in ("used", "limit"))
    there = window.level("thimble_api_snapshot_store_available")
    bound = f" of {limit / GB:.3f}" if limit else ""
    stored = f"{used / GB:.3f}{bound} GB in the store" if there else "the store is not available"
    hot = window.level("thimble_hot_states")
    yield _line("snapshots", f"{stored}; {hot:.0f} states in the engine's memory")


def _rate(amount: float, window: Window, unit: str, scale: float) -> str:
    """A sum, where the time is not known."""
    if window.seconds:
        return f"{amount / scale / window.seconds:.2f} {unit}"
    return f"{amount / scale:.2f} {unit.partition('/')[0]}"


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"
