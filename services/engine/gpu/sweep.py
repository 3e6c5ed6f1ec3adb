"""A sweep: many tokens of one or several prompts go through the network layer by layer; an expert's block moves once.

Owns the buffers between the kernels and the order of work; the experts' part is expert_sweep.py's. Every buffer is made
at construction; the largest lie in a room that others use between two sweeps. A token's bits depend on its place, its
state and what came before it, neither on how its prompt was cut nor on what else is read with it: kernels/*/sweep.py
say why. They are not those of the decode path (token.py).

Everything is in plain order, but for the last row of each prompt, whose logits are made as decode makes them.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import kernels.attention.sweep as attention
import kernels.linear.sweep as dense
import kernels.mamba.sweep as mamba
import kernels.norm.sweep as norm
import kernels.router.gpu as router
from kernels.experts import prefill
from kernels.linear.gpu import linear as decode_linear
from kernels.linear.octets import from_octets, to_octets
from kernels.mamba.gpu import Sizes
from services.engine.gpu.expert_sweep import ExpertSweep
from services.engine.gpu.ledger import MOST_SEQUENCES, SWEEP_PART, wide_bytes
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.ranges import named
from services.engine.gpu.tracing import Tracing
from services.engine.gpu.weights import AttentionWeights, DeviceWeights, MambaWeights, MoeWeights
from services.engine.model import Segment
from services.engine.pages import pages_for
from services.engine.vision.ids import FIRST

FINGERPRINT = "; ".join(each.FINGERPRINT for each in (dense, norm, mamba, attention, prefill))

SMALLER = 8.0  # the square root of how much smaller squares are kept than they are, for float16's range


@dataclass(frozen=True)
class Part:
    """At most SWEEP_PART rows of a chunk, that the wide buffers hold at once."""

    rows: slice
    scanned: Tensor  # int32 [segments, 3], kernels/mamba/sweep.py's
    attended: attention.Segments


class Sweep:
    """For at most `tokens` tokens at once, of sequences of at most `context_tokens`. `tracing`: of what is routed."""

    tracing: Tracing | None = None

    def __init__(
        self, weights: DeviceWeights, pool: DevicePool, experts: ExpertSweep, tokens: int, context_tokens: int
    ) -> None:
        config, device = weights.config, pool.conv.device
        self.weights, self.pool, self.experts, self.tokens = weights, pool, experts, tokens
        self.sizes = Sizes(config.mamba_heads, config.mamba_head_dim, config.mamba_state, config.mamba_groups)
        part = min(tokens, SWEEP_PART)

        def new(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        f32 = torch.float32
        self.norms = [from_octets(layer.norm.weight) for layer in weights.layers]
        self.x = experts.room.take(tokens, config.hidden_size, dtype=f32)
        self.normed, self.normed32 = new(part, config.hidden_size), new(part, config.hidden_size, dtype=f32)
        # One layer's wide rows at a time: what the kinds of layers need lies in one piece of memory.
        self.wide = experts.room.take(part * wide_bytes(config), dtype=torch.uint8)
        self.workspace = mamba.Workspace(part, self.sizes.heads, device)
        self.scores = new(part, config.experts, dtype=f32)
        self.latent = new(tokens, config.latent_size)
        self.routed = new(tokens, config.latent_size, dtype=f32)
        self.chosen = new(tokens, config.experts_per_token, dtype=torch.int32)
        self.chosen_weights = new(tokens, config.experts_per_token, dtype=f32)
        self.tables = new(MOST_SEQUENCES, pages_for(context_tokens), dtype=torch.int32)
        self.logits = new(MOST_SEQUENCES, config.vocab_size, dtype=f32)

    def run(self, segments: Sequence[Segment], states: Sequence[DeviceState]) -> Generator[float, None, Tensor]:
        """Feed at most `tokens` ids of at most MOST_SEQUENCES sequences, whose pages are reserved -> logits after each
        one's last id, float32 [segments, vocab] on the host. Yields the share of the work that is done, wherever
        others may run. The caller extends `ids`. Raises StepError; the states are then half-way between two tokens.
        """
        counts = [len(segment.ids) for segment in segments]
        assert sum(counts) <= self.tokens
        assert len(segments) <= MOST_SEQUENCES
        try:
            return (yield from self._layers(segments, states, counts))
        except BaseException:
            self.experts.stop()  # what the next layer would have needed nobody needs now
            raise

    def _layers(
        self, segments: Sequence[Segment], states: Sequence[DeviceState], counts: Sequence[int]
    ) -> Generator[float, None, Tensor]:
        total, tracing = sum(counts), self.tracing
        if tracing:
            tracing.begin_sweep()
        parts = self._parts(counts, states)
        self._embed(segments)
        for row, state in enumerate(states):
            self.tables[row, : len(state.pages)] = torch.tensor(state.pages, dtype=torch.int32)
        index = {MambaWeights: 0, AttentionWeights: 0, MoeWeights: 0}
        layers = len(self.weights.layers)
        for number, layer in enumerate(self.weights.layers):
            yield number / layers
            weight, place = self.norms[number], index[type(layer)]
            index[type(layer)] += 1
            match layer:
                case MambaWeights():
                    with named("sweep: Mamba layer", number):
                        for part in parts:
                            self._mamba(layer, place, weight, part)
                case AttentionWeights():
                    with named("sweep: attention layer", number):
                        for part in parts:
                            self._attention(layer, place, weight, part)
                case MoeWeights():
                    # By now the GPU has the layers before this one to compute, while the first blocks come.
                    self.experts.ahead(place, total)
                    with named("sweep: router and shared expert of layer", number):
                        for part in parts:
                            self._route(layer, weight, part.rows)
                    if tracing:
                        tracing.sweep(self.chosen[:total], self.chosen_weights[:total])
                    running = self.experts.run(
                        place, self.chosen[:total], self.chosen_weights[:total], self.latent[:total],
                        self.routed[:total],
                    )  # fmt: skip
                    for share in running:
                        yield (number + share) / layers
                    for part in parts:
                        dense.linear(self.routed[part.rows], layer.fc2, self.x[part.rows], "add", precise=True)
        if tracing:
            tracing.end_sweep()
        return self._logits(torch.tensor(counts).cumsum(0) - 1)

    def _parts(self, counts: Sequence[int], states: Sequence[DeviceState]) -> list[Part]:
        parts = []
        total = sum(counts)
        for begin in range(0, total, SWEEP_PART):
            end = min(begin + SWEEP_PART, total)
            scanned, attended, first = [], [], 0
            for table, (count, state) in enumerate(zip(counts, states, strict=True)):
                low, high = max(begin, first), min(end, first + count)
                if low < high:
                    scanned.append([low - begin, high - low, state.place])
                    position = state.tokens + low - first
                    attended.append(attention.Segment(low - begin, high - low, position, table))
                first += count
            device = self.x.device
            on_device = torch.tensor(scanned, dtype=torch.int32).to(device)
            parts.append(Part(slice(begin, end), on_device, attention.Segments(attended, device)))
        return parts

    def _embed(self, segments: Sequence[Segment]) -> None:
        ids = torch.tensor([id_ for segment in segments for id_ in segment.ids])
        pictured = ids >= FIRST
        pictures = [some for segment in segments for some in segment.rows]
        assert sum(map(len, pictures)) == int(pictured.sum()), "every place of a picture has its row"
        shown = torch.cat(pictures) if pictures else None
        for begin in range(0, len(ids), SWEEP_PART):
            stop = min(begin + SWEEP_PART, len(ids))
            here = pictured[begin:stop]
            rows = self.weights.embeddings.rows(ids[begin:stop].masked_fill(here, 0))
            if shown is not None:
                before, count = int(pictured[:begin].sum()), int(here.sum())
                rows[here] = shown[before : before + count]
            self.x[begin:stop] = rows

    def _norm(self, weight: Tensor, rows: slice) -> Tensor:
        out = self.normed[: rows.stop - rows.start]
        norm.rms_norm(self.x[rows], weight, self.weights.config.norm_eps, out)
        return out

    def _room(self, rows: slice, *widths: tuple[int, torch.dtype]) -> list[Tensor]:
        """Buffers [rows, width] side by side in `wide`."""
        count, start, found = rows.stop - rows.start, 0, []
        for width, dtype in widths:
            size_bytes = count * width * dtype.itemsize
            found.append(self.wide[start : start + size_bytes].view(dtype).view(count, width))
            start += size_bytes
        return found

    def _mamba(self, layer: MambaWeights, index: int, weight: Tensor, part: Part) -> None:
        sizes, pool = self.sizes, self.pool
        projected, mixed = self._room(part.rows, (sizes.rows, torch.float32), (sizes.inner, torch.float16))
        dense.linear(self._norm(weight, part.rows), layer.in_proj, projected)
        mamba.convolve(projected, sizes, layer.conv_weight, layer.conv_bias, pool.conv[:, index], part.scanned)
        y = projected[:, sizes.inner : 2 * sizes.inner]  # in place of x, which only this layer's scan reads
        mamba.scan(
            projected, sizes, layer.a, layer.d, layer.dt_bias, pool.ssm[:, index], part.scanned, self.workspace, y
        )
        group = sizes.inner // sizes.groups
        norm.gated_group_rms_norm(y, projected[:, : sizes.inner], layer.inner_norm, group, layer.norm.eps, mixed)
        dense.linear(mixed, layer.out_proj, self.x[part.rows], "add")

    def _attention(self, layer: AttentionWeights, index: int, weight: Tensor, part: Part) -> None:
        f32, bf16 = torch.float32, torch.bfloat16
        sizes = [projection.rows for projection in layer.qkv]
        query, key, value, mixed = self._room(part.rows, *((size, f32) for size in sizes), (sizes[0], bf16))
        normed = self._norm(weight, part.rows)
        for projection, out in zip(layer.qkv, (query, key, value), strict=True):
            dense.linear(normed, projection, out)
        pages = self.pool.pages_of(index, layer.key_scale, layer.value_scale)
        attention.store_kv(key, value, pages, self.tables, part.attended)
        attention.attend(query, pages, self.tables, part.attended, mixed)
        dense.linear(mixed, layer.o_proj, self.x[part.rows], "add")

    def _route(self, layer: MoeWeights, weight: Tensor, rows: slice) -> None:
        """Router, latent input and shared expert. The router's scores decide among near ties: they are made of 16 bits
        of the input rather than 11."""
        config, count = self.weights.config, rows.stop - rows.start
        normed, exact, scores = self._norm(weight, rows), self.normed32[:count], self.scores[:count]
        norm.rms_norm(self.x[rows], weight, config.norm_eps, exact)
        dense.linear(exact, layer.gate, scores, precise=True)
        choice = (config.experts_per_token, config.routed_scale, config.norm_topk)
        router.choose(scores, layer.bias, *choice, self.chosen[rows], self.chosen_weights[rows])
        dense.linear(normed, layer.fc1, self.latent[rows])
        (shared,) = self._room(rows, (config.shared_width, torch.float16))
        dense.linear(normed, layer.shared_up, shared, "relu2", gain=1 / SMALLER)
        dense.linear(shared, layer.shared_down, self.x[rows], "add", gain=SMALLER**2)

    def _logits(self, last: Tensor) -> Tensor:
        rows = to_octets(self.x[last.to(self.x.device)])
        logits = self.logits[: len(last)]
        decode_linear(rows, self.weights.lm_head, logits, norm=self.weights.final_norm)
        return logits.to("cpu", copy=True)
