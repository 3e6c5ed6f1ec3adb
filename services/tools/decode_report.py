"""What a decode benchmark says: the floor of a token, the table, the figures. Owns arithmetic and words, no clock.

The floor is the time in which the bytes that a token must move can be moved, by rates of the same run: dense weights,
states and keys over the card's own memory; then the experts' bytes with processor and GPU reading RAM at once. The two
follow each other in every layer, so they add up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from kernels.block import GROUP, BlockLayout
from kernels.experts import reference
from services.engine.experts.store import Store
from services.engine.gpu.ledger import Kv, Layout, dense_bytes, page_bytes
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS
from services.engine.state import state_bytes
from services.tools.replay import Trace
from services.tools.token_parts import HEADING, Parts, line

GIB = 1 << 30
PUBLISHED_MARK = "published"


@dataclass(frozen=True)
class ExpertBytes:
    """Of one layer's experts for one token, what must be read: all of `up`, the alive neurons of `down`, their groups'
    scales. Shares are of neurons and of groups."""

    layer_bytes: float
    alive: float
    touched: float


@dataclass(frozen=True)
class Floor:
    """One sequence's token. Rates in GB/s, all of this run."""

    dense_bytes: int
    expert_bytes: float
    copy_gb_s: float  # the card's own memory, bytes read plus bytes written
    cpu_gb_s: float  # reading RAM while the GPU reads it, too
    gpu_gb_s: float

    @property
    def dense_ms(self) -> float:
        return self.dense_bytes / self.copy_gb_s / 1e6

    @property
    def experts_ms(self) -> float:
        return self.expert_bytes / (self.cpu_gb_s + self.gpu_gb_s) / 1e6

    @property
    def token_ms(self) -> float:
        return self.dense_ms + self.experts_ms

    def __str__(self) -> str:
        return (
            f"floor {self.token_ms:.2f} ms: {self.dense_bytes / 1e9:.2f} GB on the card at {self.copy_gb_s:.0f} GB/s "
            f"({self.dense_ms:.2f} ms), {self.expert_bytes / 1e9:.2f} GB of experts at {self.cpu_gb_s:.0f} + "
            f"{self.gpu_gb_s:.0f} GB/s ({self.experts_ms:.2f} ms)"
        )


@dataclass(frozen=True)
class Result:
    """One method's tokens. `ms`: of each step, by the wall clock; `parts` of its median step, if they were recorded."""

    method: str
    threads: int
    rows: int
    ms: Sequence[float]
    gpu_experts: float  # of a layer's, on average
    parts: Parts | None = None

    @property
    def token_ms(self) -> float:
        return median(self.ms)

    @property
    def tok_s(self) -> float:
        """Of all sequences together."""
        return self.rows * 1e3 / self.token_ms

    @property
    def published(self) -> bool:
        return self.method.startswith(PUBLISHED_MARK)

    @property
    def name(self) -> str:
        return f"{self.method}, {self.threads} threads" + (f", batch {self.rows}" if self.rows > 1 else "")


def token_bytes(config: ModelConfig, dense: Layout, context_tokens: int, kv: Kv) -> int:
    """On the card, for one token of one sequence: weights once, states read and written, keys and values read."""
    pages = context_tokens / PAGE_TOKENS * page_bytes(config, kv)
    return dense_bytes(config, dense) + 2 * state_bytes(config) + int(pages)


def expert_bytes(layout: BlockLayout, top_k: int, alive: float, touched: float) -> float:
    """Of one layer, from the shares of alive neurons and of groups with any."""
    up = layout.down_values  # where `down` begins `up` ends
    down = alive * layout.width * layout.latent / 2 + touched * layout.width / GROUP * layout.latent
    return top_k * (up + down)


def sampled(store: Store, trace: Trace, experts: int = 12) -> ExpertBytes:
    """From the real sums of some experts of a trace's first token: which neurons live."""
    alive, touched, width = 0.0, 0.0, store.layout.width
    layers = trace.ids.shape[1]
    for number in range(experts):
        layer = number * layers // experts
        id = int(trace.ids[0, layer, 0, number % trace.ids.shape[3]])
        block = store.blocks[layer][id]
        expert = reference.unpack_expert(store.read_block(layer, id), store.layout, block.up_scale, block.down_scale)
        neurons = alive_neurons(expert, trace.x[0, layer, :1])
        alive += float(neurons.float().mean()) / experts
        touched += float(neurons.view(width // GROUP, GROUP).any(1).float().mean()) / experts
    return ExpertBytes(expert_bytes(store.layout, trace.ids.shape[3], alive, touched), alive, touched)


def alive_neurons(expert: reference.Expert, x: torch.Tensor) -> torch.Tensor:
    """bool [width]: whose value is not zero once it is an integer, for x float32 [1, latent]."""
    xq, e = reference.quantise(x)
    v = reference.rescale(xq.double() @ expert.up.double().T, expert.up_scale, e)
    return reference.quantise(torch.where(v > 0, v * v, 0.0))[0][0] != 0


def best_published(results: Iterable[Result]) -> Result:
    return min((result for result in results if result.published), key=lambda result: result.token_ms)


def table(results: Sequence[Result], floor: Floor) -> str:
    """All methods, batch 1 first."""
    published_ms = best_published(results).token_ms
    lines = [HEADING + f"{'x published':>13}{'x floor':>9}"]
    for result in results:
        if result.parts is not None:
            shown = line(result.name, result.parts, result.rows)
        else:
            shown = f"{result.name:<34}{result.token_ms:>8.2f}{result.tok_s:>8.2f}{'':>55}"
        alone = result.rows == 1
        lines.append(
            shown
            + (f"{published_ms / result.token_ms:>13.2f}{result.token_ms / floor.token_ms:>9.2f}" if alone else "")
            + f"  GPU takes {result.gpu_experts:.1f}"
        )
    lines.append(f"{'floor':<34}{floor.token_ms:>8.2f}{1e3 / floor.token_ms:>8.2f}")
    lines.append(
        "PCIe: the GPU's experts and waits for copies; CPU: what the GPU then still waits for the host; handoff: what "
        "both are with nothing to compute"
    )
    return "\n".join(lines)


def figure_rows(
    results: Sequence[Result], floor: Floor, peak_bytes: Mapping[int, int], load_s: float, note: str
) -> list[tuple[str, float, str, str]]:
    """Name, value, unit and note of every figure; `peak_bytes` of graphics memory by the number of sequences."""
    ours = [result for result in results if not result.published]
    single = [result for result in ours if result.rows == 1]
    most = max(single, key=lambda result: result.threads)
    published = best_published(results)

    def told(result: Result, more: str = "") -> str:
        return f"{note}, batch {result.rows}, {result.threads} threads{more}"

    rows: list[tuple[str, float, str, str]] = []
    for result in ours:
        rows.append(("decode.tok_s", result.tok_s, "tok/s", told(result)))
        if result.rows == 1:
            rows.append(("decode.ours_over_published", published.token_ms / result.token_ms, "ratio", told(result)))
            rows.append(("decode.over_floor", result.token_ms / floor.token_ms, "ratio", told(result)))
    rows.append(("decode.published_tok_s", published.tok_s, "tok/s", told(published, f", {published.method}")))
    rows.append(("decode.floor_ms", floor.token_ms, "ms", f"{note}, {floor}"))
    for result in (most, published):
        if result.parts is not None:
            kind = "published" if result.published else "ours"
            for part in ("dense", "pcie", "cpu", "handoff", "disk", "rest"):
                rows.append((f"decode.{kind}_{part}_ms", getattr(result.parts, f"{part}_ms"), "ms", told(result)))
            rows.append((f"decode.{kind}_rest_share", result.parts.rest_share, "ratio", told(result)))
    for sequences, size in peak_bytes.items():
        said = f"{note}, batch {sequences}, by the driver's free memory"
        rows.append(("decode.peak_vram_gb", size / GIB, "GiB", said))
    rows.append(("decode.load_s", load_s, "s", f"{note}, dense weights to the card"))
    return rows
