"""A sweep: many tokens of one or several prompts go through the network layer by layer; an expert's block moves once.

Owns the buffers between the kernels and the order of work; the experts' part is expert_sweep.py's. Every buffer is made
at construction; the largest lie in a room that others use between two sweeps, some of them at the same place, since
one stream runs one layer at a time. A token's bits depend on its place, its
state and what came before it, neither on how its prompt was cut nor on what else is read with it: kernels/*/sweep.py
say why. They are not those of the decode path (token.py).

Everything is in plain order, but for the last row of each prompt, whose logits are made as decode makes them.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
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
from services.engine.gpu.ledger import MOST_SEQUENCES, sweep_part
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
    """Rows of a chunk, as many as the wide buffers hold at once, or fewer."""

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
        self.part = sweep_part(tokens)

        def new(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        f32 = torch.float32
        self.norms = [from_octets(layer.norm.weight) for layer in weights.layers]
        self.x = experts.room.take(tokens, config.hidden_size, dtype=f32)
        self.workspace = mamba.Workspace(self.part, self.sizes.heads, device)
        self.latent = new(tokens, config.latent_size)
        self.chosen = new(tokens, config.experts_per_token, dtype=torch.int32)
        self.chosen_weights = new(tokens, config.experts_per_token, dtype=f32)
        self.tables = new(MOST_SEQUENCES, pages_for(context_tokens), dtype=torch.int32)

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
                    routed = yield from self._experts(place, total, number / layers, 1 / layers)
                    for part in parts:
                        dense.linear(routed[part.rows], layer.fc2, self.x[part.rows], "add", precise=True)
        if tracing:
            tracing.end_sweep()
        return self._logits(torch.tensor(counts).cumsum(0) - 1)

    def _experts(self, layer: int, total: int, before: float, whole: float) -> Generator[float, None, Tensor]:
        """The MoE layer's routed experts. The shares that are yielded are of the whole network."""
        running = self.experts.run(layer, self.chosen[:total], self.chosen_weights[:total], self.latent[:total])
        with closing(running):
            try:
                while True:
                    yield before + next(running) * whole
            except StopIteration as end:
                routed: Tensor = end.value
                return routed

    def _parts(self, counts: Sequence[int], states: Sequence[DeviceState]) -> list[Part]:
        parts = []
        total = sum(counts)
        for begin in range(0, total, self.part):
            end = min(begin + self.part, total)
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
        for begin in range(0, len(ids), self.part):
            stop = min(begin + self.part, len(ids))
            here = pictured[begin:stop]
            rows = self.weights.embeddings.rows(ids[begin:stop].masked_fill(here, 0))
            if shown is not None:
                before, count = int(pictured[:begin].sum()), int(here.sum())
                rows[here] = shown[before : before + count]
            self.x[begin:stop] = rows

    def _room(self, rows: slice, *widths: tuple[int, torch.dtype]) -> list[Tensor]:
        """Buffers [rows, width] side by side, where the experts' products are at other times."""
        count, start, found = rows.stop - rows.start, 0, []
        for width, dtype in widths:
            size_bytes = count * width * dtype.itemsize
            found.append(self.experts.scratch[start : start + size_bytes].view(dtype).view(count, width))
            start += size_bytes
        return found

    def _normed(self, weight: Tensor, rows: slice, out: Tensor) -> Tensor:
        """Of the residual stream, in `out`, or in its first numbers."""
        hidden = self.weights.config.hidden_size
        normed = out.view(-1)[: (rows.stop - rows.start) * hidden].view(-1, hidden)
        norm.rms_norm(self.x[rows], weight, self.weights.config.norm_eps, normed)
        return normed

    def _mamba(self, layer: MambaWeights, index: int, weight: Tensor, part: Part) -> None:
        sizes, pool, f16 = self.sizes, self.pool, torch.float16
        wider = max(sizes.inner, self.weights.config.hidden_size)
        projected, both = self._room(part.rows, (sizes.rows, torch.float32), (wider, f16))
        mixed = both.view(-1)[: len(both) * sizes.inner].view(-1, sizes.inner)  # once in_proj has read what is normed
        dense.linear(self._normed(weight, part.rows, both), layer.in_proj, projected)
        mamba.convolve(projected, sizes, layer.conv_weight, layer.conv_bias, pool.conv[:, index], part.scanned)
        y = projected[:, sizes.inner : 2 * sizes.inner]  # in place of x, which only this layer's scan reads
        mamba.scan(
            projected, sizes, layer.a, layer.d, layer.dt_bias, pool.ssm[:, index], part.scanned, self.workspace, y
        )
        group = sizes.inner // sizes.groups
        norm.gated_group_rms_norm(y, projected[:, : sizes.inner], layer.inner_norm, group, layer.norm.eps, mixed)
        dense.linear(mixed, layer.out_proj, self.x[part.rows], "add")

    def _attention(self, layer: AttentionWeights, index: int, weight: Tensor, part: Part) -> None:
        f32 = torch.float32
        sizes = [projection.rows for projection in layer.qkv]
        wider = max(sizes[0], self.weights.config.hidden_size)
        query, key, value, both = self._room(part.rows, *((size, f32) for size in sizes), (wider, torch.float16))
        normed = self._normed(weight, part.rows, both)
        mixed = both.view(torch.bfloat16).view(-1)[: len(both) * sizes[0]].view(-1, sizes[0])  # once normed is read
        for projection, out in zip(layer.qkv, (query, key, value), strict=True):
            dense.linear(normed, projection, out)
        pages = self.pool.pages_of(index, layer.key_scale, layer.value_scale)
        attention.store_kv(key, value, pages, self.tables, part.attended)
        attention.attend(query, pages, self.tables, part.attended, mixed)
        dense.linear(mixed, layer.o_proj, self.x[part.rows], "add")

    def _route(self, layer: MoeWeights, weight: Tensor, rows: slice) -> None:
        """Router, latent input and shared expert. The router's scores decide among near ties: they are made of 16 bits
        of the input rather than 11."""
        config, f16, f32 = self.weights.config, torch.float16, torch.float32
        hidden = config.hidden_size
        exact, scores, normed, shared = self._room(
            rows, (hidden, f32), (config.experts, f32), (hidden, f16), (config.shared_width, f16)
        )
        self._normed(weight, rows, normed)
        self._normed(weight, rows, exact)
        dense.linear(exact, layer.gate, scores, precise=True)
        choice = (config.experts_per_token, config.routed_scale, config.norm_topk)
        router.choose(scores, layer.bias, *choice, self.chosen[rows], self.chosen_weights[rows])
        dense.linear(normed, layer.fc1, self.latent[rows])
        dense.linear(normed, layer.shared_up, shared, "relu2", gain=1 / SMALLER)
        dense.linear(shared, layer.shared_down, self.x[rows], "add", gain=SMALLER**2)

    def _logits(self, last: Tensor) -> Tensor:
        rows = to_octets(self.x[last.to(self.x.device)])
        (logits,) = self._room(slice(0, len(last)), (self.weights.config.vocab_size, torch.float32))
        decode_linear(rows, self.weights.lm_head, logits, norm=self.weights.final_norm)
        return logits.to("cpu", copy=True)
