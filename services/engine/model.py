"""The network, top to bottom: Nemotron-H, Mamba-2 and attention layers between latent mixture-of-experts layers.

Owns the order of operations and the dense weights. The numerics are in kernels/, what a sequence remembers is in
state.py, where expert blocks lie and how they get there is behind `Experts`. Used by one thread only.

Every layer is x = x + mixer(rms_norm(x)). A call takes any mixture of sequences and of tokens per sequence; a token's
bits do not depend on how its prompt was cut or on what else was in the call.
"""

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention.cpu import attend
from kernels.elementary.reference import exp
from kernels.experts.host.replay import hinted
from kernels.linear.cpu import linear
from kernels.mamba.cpu import causal_conv, selective_scan
from kernels.norm.cpu import gated_group_rms_norm, rms_norm
from kernels.router.cpu import choose
from services.engine.experts.streamer import Experts
from services.engine.experts.trace import Phases, Recorder, phases
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool, pages_for
from services.engine.spent import Spent
from services.engine.state import Pending, State
from services.engine.vision.ids import FIRST
from services.engine.weights import DenseWeights

# A piece of a prompt, from one cut to the next (where reading began, snapshot positions, the prompt's end), of at most
# so many tokens is read as an answer's tokens are. A GPU reads longer ones by other kernels, with other bits. The rule
# knows nothing of chunks, of batch mates or of time, so that one prompt with the same cuts always gives the same bits.
# A sweep moves most experts to the card, even for 32 tokens four of five; one by one the tokens take what lives of 22 a
# layer each. 40 tokens with all experts in RAM took as long either way on an H200 (bench prefill: 1.1 times). Where
# blocks are missing, sweeps of random routing were 2.4 times as fast; a dialog's tokens find nine of ten in RAM.
DECODED_TOKENS = 32


@dataclass(frozen=True)
class Segment:
    """The next `ids` (at least one) of a sequence: one id when it decodes, many when a prompt is read.

    `rows`, each float32 [some, hidden], are embeddings of those ids that stand for a picture's places, in order.
    `sweep`: the ids belong to a piece of more than DECODED_TOKENS. The CPU has one path, and takes no notice.

    `drafts` are guesses at the ids that come behind `ids`: there are logits after each of them, too, but the state is
    as if they had not been fed, until `settle` says how many of them were right.
    """

    state: State
    ids: Sequence[int]
    rows: Sequence[Tensor] = ()
    sweep: bool = False
    drafts: Sequence[int] = ()

    @property
    def all_ids(self) -> list[int]:
        return [*self.ids, *self.drafts]


LOOK_AHEAD = 2  # MoE layers for which a trace has guesses made before their own router has spoken


class Span(NamedTuple):
    """A sequence and its rows in this call, of which the last are drafts."""

    state: State
    rows: slice
    drafts: int = 0


class Head(Protocol):
    """What reads along, to draft: services/engine/mtp.py. Nothing that it does shows in what is said."""

    def read(self, spans: Sequence[Span], embedded: Tensor, hidden: Tensor) -> None:
        """A call's embeddings and states behind the final norm, both [rows, hidden], before its ids are the states'."""
        ...

    def follow(self, state: State, embedded: Tensor, hidden: Tensor) -> None:
        """The same of ids that come next in `state`."""
        ...


class GaveWay(Exception):
    """Something more important came while this was computed."""


class Model:
    """All layers, their weights as float32."""

    def __init__(
        self, dense: DenseWeights, config: ModelConfig, experts: Experts, trace: Recorder | None = None
    ) -> None:
        self.config = config
        self.trace = trace
        self.spent = Spent()
        self.embeddings = dense.plain("embeddings.weight")
        self.norms = [dense.plain(f"layers.{layer}.norm.weight") for layer in range(len(config.layers))]
        self.mixers: list[Mamba | Attention | Moe] = []
        for layer, kind in enumerate(config.layers):
            weights = LayerWeights(dense, f"layers.{layer}")
            match kind:
                case "mamba":
                    self.mixers.append(Mamba(weights, config, config.mamba_layers.index(layer)))
                case "attention":
                    self.mixers.append(Attention(weights, config, config.attention_layers.index(layer)))
                case "moe":
                    self.mixers.append(Moe(weights, config, config.moe_layers.index(layer), experts, trace, self.spent))
        moe = [mixer for mixer in self.mixers if isinstance(mixer, Moe)]
        for mixer in moe:
            mixer.following = moe[mixer.index + 1 : mixer.index + 1 + LOOK_AHEAD]
        self.norm_f = dense.plain("norm_f.weight")
        self.lm_head = dense.linear("lm_head").dequantise()
        self.head: Head | None = None

    def new_state(self, tokens: int) -> State:
        """A fresh state with pages of its own for so many tokens: for measurements, which share no pool."""
        return State(self.config, PagePool(self.config, pages_for(tokens), drafts=self.head is not None))

    def forward(self, segments: Sequence[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        """Feed each segment's ids to its state -> logits after the last of them, [len(segments), vocab]; where segments
        have drafts, each has one more row for every draft, behind its first.

        Raises OutOfPagesError before anything has changed. Any later failure (a disk error) leaves the states
        half-way between two tokens: they are marked `spoiled` and can only be released. So does GaveWay, which is
        raised before the next layer once `give_way` says so.
        """
        return self._logits(_last(self._run(segments, give_way), segments))

    @torch.inference_mode()
    def settle(self, state: State, accepted: int) -> None:
        """The first `accepted` drafts of the last call were right: the state is as if they had been among its ids. The
        others never were."""
        pending, state.pending = state.pending, None
        if pending is None or not accepted:
            return
        for mixer in self.mixers:
            if isinstance(mixer, Mamba):
                mixer.replay(state, pending, accepted)
        if self.head is not None:
            self.head.follow(state, self.embeddings[pending.ids[:accepted]], pending.hidden[:accepted])
        state.ids.extend(pending.ids[:accepted])

    def forward_all(self, segments: Sequence[Segment]) -> Tensor:
        """As `forward`, but logits after every id, [ids of all segments, vocab]: for perplexity and parity."""
        return self._logits(self._run(segments))

    def reading(self, segments: Sequence[Segment]) -> Generator[float, None, Tensor]:
        """As `forward`, layer by layer: before each it yields the share of the work that is done. Between two layers
        other sequences may be fed; those of `segments` are this call's until it returns. To close it early is a later
        failure. A trace has whole calls: while one is recorded nothing comes between two layers.
        """
        return self._logits(_last((yield from self._hidden(segments, self.trace is None)), segments))

    def _run(self, segments: Sequence[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        running = self._hidden(segments, give_way is not None)
        spent, begun = self.spent.dense_s + self.spent.experts_s, time.perf_counter()
        while True:
            try:
                next(running)
            except StopIteration as end:
                hidden: Tensor = end.value
                known_s = self.spent.dense_s + self.spent.experts_s - spent
                self.spent.dense_s += time.perf_counter() - begun - known_s  # the stops cost time, too
                return hidden
            if give_way is not None and give_way():
                running.close()
                raise GaveWay

    @torch.inference_mode()
    def _hidden(self, segments: Sequence[Segment], stops: bool) -> Generator[float, None, Tensor]:
        """What the last layer makes of every id. With `stops` it yields before each layer."""
        states = [segment.state for segment in segments]
        assert states, "a call has segments"
        assert all(segment.ids for segment in segments), "a segment has ids"
        assert len(set(map(id, states))) == len(states), "a sequence is in a call once"
        assert not any(state.spoiled for state in states), "a spoiled or released state cannot go on"
        assert not any(state.pending for state in states), "drafts are settled before the next call"
        states[0].pool.require(sum(segment.state.pages_missing(len(segment.all_ids)) for segment in segments))
        for segment in segments:
            segment.state.reserve(len(segment.all_ids))
        try:
            spans, start = [], 0
            for segment in segments:
                stop = start + len(segment.all_ids)
                spans.append(Span(segment.state, slice(start, stop), len(segment.drafts)))
                segment.state.pending = Pending(list(segment.drafts)) if segment.drafts else None
                start = stop
            begun = time.perf_counter()
            x = embedded = self._embedded(segments)
            for layer, (norm, mixer) in enumerate(zip(self.norms, self.mixers, strict=True)):
                if stops:
                    self.spent.dense_s += time.perf_counter() - begun
                    yield layer / len(self.mixers)
                    begun = time.perf_counter()
                x = x + mixer(rms_norm(x, norm, self.config.norm_eps), spans)
            if self.head is not None:
                self.head.read(spans, embedded, rms_norm(x, self.norm_f, self.config.norm_eps))
            self.spent.dense_s += time.perf_counter() - begun
        except BaseException:
            for state in states:
                state.spoiled = True
            raise
        for segment in segments:
            segment.state.ids.extend(segment.ids)
        return x

    def _embedded(self, segments: Sequence[Segment]) -> Tensor:
        ids = torch.tensor([id_ for segment in segments for id_ in segment.all_ids])
        pictured = ids >= FIRST
        x = self.embeddings[ids.masked_fill(pictured, 0)]
        rows = [some for segment in segments for some in segment.rows]
        assert sum(map(len, rows)) == int(pictured.sum()), "every place of a picture has its row"
        if rows:
            x[pictured] = torch.cat(rows)
        return x

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        begun = time.perf_counter()
        logits = linear(rms_norm(hidden, self.norm_f, self.config.norm_eps), self.lm_head)
        self.spent.dense_s += time.perf_counter() - begun
        return logits


def _last(hidden: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Of each segment, the row of its last id, and those of its drafts."""
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += len(segment.all_ids)
        rows += range(end - len(segment.drafts) - 1, end)
    return hidden[torch.tensor(rows)]


@dataclass(frozen=True)
class LayerWeights:
    """The mixer's weights of one layer, by the names they have in it, as float32. `layer` is its own name."""

    dense: DenseWeights
    layer: str

    def linear(self, name: str) -> Tensor:
        return self.dense.linear(f"{self.layer}.mixer.{name}").dequantise()

    def plain(self, name: str) -> Tensor:
        return self.dense.plain(f"{self.layer}.mixer.{name}")


class Mamba:
    """A Mamba-2 mixer: one projection to z, x, B, C and dt; convolution; selective scan; gated norm; projection."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, index: int) -> None:
        self.config = config
        self.index = index  # among the Mamba layers
        self.in_proj = weights.linear("in_proj")
        self.conv_weight = weights.plain("conv1d.weight").squeeze(1)
        self.conv_bias = weights.plain("conv1d.bias")
        self.a = -exp(weights.plain("A_log"))
        self.d = weights.plain("D")
        self.dt_bias = weights.plain("dt_bias")
        self.norm = weights.plain("norm.weight")
        self.out_proj = weights.linear("out_proj")

    def __call__(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        config = self.config
        sizes = [config.mamba_inner, config.conv_channels, config.mamba_heads]
        z, xbc, dt = torch.split(linear(x, self.in_proj), sizes, dim=1)
        mixed = torch.cat([self._recur(span, xbc[span.rows], dt[span.rows]) for span in spans])
        group = config.mamba_inner // config.mamba_groups
        return linear(gated_group_rms_norm(mixed, z, self.norm, group, config.norm_eps), self.out_proj)

    def _recur(self, span: Span, xbc: Tensor, dt: Tensor) -> Tensor:
        """Drafts run on a copy of this layer's state; their inputs are kept, so that they can run again."""
        state, known = span.state, len(xbc) - span.drafts
        conv, ssm = state.conv[self.index], state.ssm[self.index]
        mixed = self._step(xbc[:known], dt[:known], conv, ssm)
        if state.pending is None:
            return mixed
        state.pending.inputs.append((xbc[known:].clone(), dt[known:].clone()))
        return torch.cat([mixed, self._step(xbc[known:], dt[known:], conv.clone(), ssm.clone())])

    def replay(self, state: State, pending: Pending, count: int) -> None:
        """The first drafts once more, for good: the same bits, as tokens give the same in any cut."""
        xbc, dt = pending.inputs[self.index]
        self._step(xbc[:count], dt[:count], state.conv[self.index], state.ssm[self.index])

    def _step(self, xbc: Tensor, dt: Tensor, conv: Tensor, ssm: Tensor) -> Tensor:
        config = self.config
        xbc = causal_conv(xbc, conv, self.conv_weight, self.conv_bias)
        bc_size = config.mamba_groups * config.mamba_state
        x, b, c = torch.split(xbc, [config.mamba_inner, bc_size, bc_size], dim=1)
        y = selective_scan(
            x.view(-1, config.mamba_heads, config.mamba_head_dim),
            dt,
            b.view(-1, config.mamba_groups, config.mamba_state),
            c.view(-1, config.mamba_groups, config.mamba_state),
            self.a,
            self.d,
            self.dt_bias,
            ssm,
        )
        return y.flatten(1)


class Attention:
    """Grouped-query attention. The model has no positions: nothing is rotated."""

    def __init__(self, weights: LayerWeights, config: ModelConfig, index: int) -> None:
        self.head_dim = config.head_dim
        self.index = index  # among the attention layers
        self.q_proj = weights.linear("q_proj")
        self.k_proj = weights.linear("k_proj")
        self.v_proj = weights.linear("v_proj")
        self.o_proj = weights.linear("o_proj")

    def split(self, x: Tensor, *projections: Tensor) -> list[Tensor]:
        """Each [M, heads, head_dim]."""
        return [linear(x, weight).view(len(x), -1, self.head_dim) for weight in projections]

    def __call__(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        query, key, value = self.split(x, self.q_proj, self.k_proj, self.v_proj)
        mixed = []
        for state, rows, _ in spans:
            state.write_kv(self.index, key[rows], value[rows])
            keys, values = state.read_kv(self.index, state.tokens + len(key[rows]))
            mixed.append(attend(query[rows], keys, values, first=state.tokens))
        return linear(torch.cat(mixed).flatten(1), self.o_proj)


class Moe:
    """A latent mixture of experts beside a shared expert: the router and the shared expert read the full width."""

    def __init__(
        self,
        weights: LayerWeights,
        config: ModelConfig,
        index: int,
        experts: Experts,
        trace: Recorder | None,
        spent: Spent,
    ) -> None:
        self.config = config
        self.index = index  # among the MoE layers
        self.experts = experts
        self.trace = trace
        self.spent = spent
        self.following: list[Moe] = []  # the next MoE layers
        self.gate = weights.plain("gate.weight")
        self.bias = weights.plain("gate.e_score_correction_bias")
        self.fc1 = weights.linear("fc1_latent_proj")
        self.fc2 = weights.linear("fc2_latent_proj")
        self.shared_up = weights.linear("shared_experts.up_proj")
        self.shared_down = weights.linear("shared_experts.down_proj")

    def __call__(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        ids, weights = self.route(x)
        phase = phases([span.rows.stop - span.rows.start for span in spans])
        if self.trace is not None:
            self.trace.record(self.index, ids, weights, phase)
        if self.experts.prefetching or self.trace is not None:
            self.guess(x, phase)
        latent = linear(x, self.fc1)
        begun = time.perf_counter()
        computed = self.experts.step(self.index, ids, weights, latent)
        took_s = time.perf_counter() - begun
        self.spent.experts_s += took_s
        self.spent.dense_s -= took_s  # which has the whole layer
        routed = linear(computed, self.fc2)
        alive = linear(x, self.shared_up).clamp(min=0.0)
        return routed + linear(alive * alive, self.shared_down)

    def guess(self, x: Tensor, phase: Phases) -> None:
        """Hints for the next layer: this one's input is a good guess at its own, which its router ranks.

        Guesses two layers ahead are for traces only: reading those does not pay.
        """
        for ahead, following in enumerate(self.following, start=1):
            guessed, scores = following.route(x)
            if ahead == 1:
                first = guessed[:, : hinted(guessed.shape[1])]
                likely = list(dict.fromkeys(first.T.flatten().tolist()))  # each once, first choices of all tokens first
                self.experts.prefetch(following.index, torch.tensor(likely, dtype=torch.int32))
            if self.trace is None:
                break
            self.trace.record(following.index, guessed, scores, phase, ahead)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, hidden] -> ids int32 and weights float32, both [M, k] in router rank."""
        config = self.config
        logits = linear(x, self.gate)
        return choose(logits, self.bias, config.experts_per_token, config.routed_scale, config.norm_topk)
