"""The network, top to bottom: Nemotron-H, Mamba-2 and attention layers between latent mixture-of-experts layers.

Owns the order of operations and the dense weights. The numerics are in kernels/, what a sequence remembers is in
state.py, where expert blocks lie and how they get there is behind `Experts`. Used by one thread only.

Every layer is x = x + mixer(rms_norm(x)). A call takes any mixture of sequences and of tokens per sequence; a token's
bits do not depend on how its prompt was cut or on what else was in the call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.reference import attend
from kernels.elementary.reference import exp
from kernels.linear.reference import linear
from kernels.mamba.reference import causal_conv, selective_scan
from kernels.norm.reference import gated_group_rms_norm, rms_norm
from kernels.router.reference import choose
from services.engine.errors import StoreError
from services.engine.experts.streamer import Experts
from services.engine.model_config import ModelConfig
from services.engine.state import State


@dataclass(frozen=True)
class Segment:
    """The next `ids` (at least one) of a sequence: one id when it decodes, many when a prompt is read."""

    state: State
    ids: Sequence[int]


Span = tuple[State, slice]  # a sequence and its rows in this call
Take = Callable[..., Tensor]  # (name, *shape) -> the layer's weight of that name


class Model:
    """All layers. `dense` maps canonical names (`layers.3.norm.weight`, `embeddings.weight`, ...) to float tensors.

    Weights are float32; the embedding alone may be of a smaller type. Raises StoreError for one that is missing or
    has another shape than `config` says.
    """

    def __init__(self, dense: Mapping[str, Tensor], config: ModelConfig, experts: Experts) -> None:
        self.config = config
        take = _taker(dense, "")
        self.embeddings = take("embeddings.weight", config.vocab_size, config.hidden_size)
        self.norms = [
            take(f"layers.{index}.norm.weight", config.hidden_size).float() for index in range(len(config.layers))
        ]
        self.norm_f = take("norm_f.weight", config.hidden_size).float()
        self.lm_head = take("lm_head.weight", config.vocab_size, config.hidden_size)
        self.mixers: list[Mamba | Attention | Moe] = []
        moe: Moe | None = None
        for index in reversed(range(len(config.layers))):
            mixer = _taker(dense, f"layers.{index}.mixer.")
            match config.layers[index]:
                case "mamba":
                    self.mixers.insert(0, Mamba(mixer, config, config.mamba_layers.index(index)))
                case "attention":
                    self.mixers.insert(0, Attention(mixer, config, config.attention_layers.index(index)))
                case "moe":
                    moe = Moe(mixer, config, config.moe_layers.index(index), experts, following=moe)
                    self.mixers.insert(0, moe)

    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Feed each segment's ids to its state -> logits after the last of them, [len(segments), vocab].

        Raises OutOfPagesError before anything has changed. Any later failure (a disk error) leaves the states
        half-way between two tokens: they are marked `spoiled` and can only be released.
        """
        hidden = self._run(segments)
        last = torch.tensor([len(segment.ids) for segment in segments]).cumsum(0) - 1
        return self._logits(hidden[last])

    def forward_all(self, segments: Sequence[Segment]) -> Tensor:
        """As `forward`, but logits after every id, [ids of all segments, vocab]: for perplexity and parity."""
        return self._logits(self._run(segments))

    @torch.inference_mode()
    def _run(self, segments: Sequence[Segment]) -> Tensor:
        states = [segment.state for segment in segments]
        assert states, "a call has segments"
        assert all(segment.ids for segment in segments), "a segment has ids"
        assert len(set(map(id, states))) == len(states), "a sequence is in a call once"
        assert not any(state.spoiled for state in states), "a spoiled or released state cannot go on"
        states[0].pool.require(sum(segment.state.pages_missing(len(segment.ids)) for segment in segments))
        for segment in segments:
            segment.state.reserve(len(segment.ids))
        try:
            hidden = self._layers(segments)
        except BaseException:
            for state in states:
                state.spoiled = True
            raise
        for segment in segments:
            segment.state.ids.extend(segment.ids)
        return hidden

    def _layers(self, segments: Sequence[Segment]) -> Tensor:
        ids = [id_ for segment in segments for id_ in segment.ids]
        spans, start = [], 0
        for segment in segments:
            spans.append((segment.state, slice(start, start + len(segment.ids))))
            start += len(segment.ids)
        x = self.embeddings[torch.tensor(ids)].float()
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(rms_norm(x, norm, self.config.norm_eps), spans)
        return x

    @torch.inference_mode()
    def _logits(self, hidden: Tensor) -> Tensor:
        return linear(rms_norm(hidden, self.norm_f, self.config.norm_eps), self.lm_head)


class Mamba:
    """A Mamba-2 mixer: one projection to z, x, B, C and dt; convolution; selective scan; gated norm; projection."""

    def __init__(self, take: Take, config: ModelConfig, index: int) -> None:
        self.config = config
        self.index = index  # among the Mamba layers
        heads, inner, channels = config.mamba_heads, config.mamba_inner, config.conv_channels
        self.in_proj = take("in_proj.weight", config.in_proj_rows, config.hidden_size)
        self.conv_weight = take("conv1d.weight", channels, 1, config.conv_kernel).float().squeeze(1)
        self.conv_bias = take("conv1d.bias", channels).float()
        self.a = -exp(take("A_log", heads))
        self.d = take("D", heads).float()
        self.dt_bias = take("dt_bias", heads).float()
        self.norm = take("norm.weight", inner).float()
        self.out_proj = take("out_proj.weight", config.hidden_size, inner)

    def __call__(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        config = self.config
        sizes = [config.mamba_inner, config.conv_channels, config.mamba_heads]
        z, xbc, dt = torch.split(linear(x, self.in_proj), sizes, dim=1)
        mixed = torch.cat([self._recur(state, xbc[rows], dt[rows]) for state, rows in spans])
        group = config.mamba_inner // config.mamba_groups
        return linear(gated_group_rms_norm(mixed, z, self.norm, group, config.norm_eps), self.out_proj)

    def _recur(self, state: State, xbc: Tensor, dt: Tensor) -> Tensor:
        config = self.config
        xbc = causal_conv(xbc, state.conv[self.index], self.conv_weight, self.conv_bias)
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
            state.ssm[self.index],
        )
        return y.flatten(1)


class Attention:
    """Grouped-query attention. The model has no positions: nothing is rotated."""

    def __init__(self, take: Take, config: ModelConfig, index: int) -> None:
        self.head_dim = config.head_dim
        self.index = index  # among the attention layers
        query_rows, kv_rows = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = take("q_proj.weight", query_rows, config.hidden_size)
        self.k_proj = take("k_proj.weight", kv_rows, config.hidden_size)
        self.v_proj = take("v_proj.weight", kv_rows, config.hidden_size)
        self.o_proj = take("o_proj.weight", config.hidden_size, query_rows)

    def __call__(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        query, key, value = (
            linear(x, weight).view(len(x), -1, self.head_dim) for weight in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = []
        for state, rows in spans:
            state.write_kv(self.index, key[rows], value[rows])
            keys, values = state.read_kv(self.index, state.tokens + len(key[rows]))
            mixed.append(attend(query[rows], keys, values, first=state.tokens))
        return linear(torch.cat(mixed).flatten(1), self.o_proj)


class Moe:
    """A latent mixture of experts beside a shared expert: the router and the shared expert read the full width."""

    def __init__(self, take: Take, config: ModelConfig, index: int, experts: Experts, following: "Moe | None") -> None:
        self.config = config
        self.index = index  # among the MoE layers
        self.experts = experts
        self.following = following
        self.gate = take("gate.weight", config.experts, config.hidden_size)
        self.bias = take("gate.e_score_correction_bias", config.experts).float()
        self.fc1 = take("fc1_latent_proj.weight", config.latent_size, config.hidden_size)
        self.fc2 = take("fc2_latent_proj.weight", config.hidden_size, config.latent_size)
        self.shared_up = take("shared_experts.up_proj.weight", config.shared_width, config.hidden_size)
        self.shared_down = take("shared_experts.down_proj.weight", config.hidden_size, config.shared_width)

    def __call__(self, x: Tensor, spans: Sequence[Span]) -> Tensor:
        ids, weights = self.route(x)
        if self.following is not None:
            # This layer's input is a good guess at the next one's: its router is often right two layers early.
            guessed, _ = self.following.route(x)
            likely = list(dict.fromkeys(guessed.T.flatten().tolist()))  # each once, first choices of all tokens first
            self.experts.prefetch(self.following.index, torch.tensor(likely, dtype=torch.int32))
        routed = linear(self.experts.step(self.index, ids, weights, linear(x, self.fc1)), self.fc2)
        alive = linear(x, self.shared_up).clamp(min=0.0)
        return routed + linear(alive * alive, self.shared_down)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [M, hidden] -> ids int32 and weights float32, both [M, k] in router rank."""
        config = self.config
        logits = linear(x, self.gate)
        return choose(logits, self.bias, config.experts_per_token, config.routed_scale, config.norm_topk)


def _taker(dense: Mapping[str, Tensor], prefix: str) -> Take:
    def take(name: str, *shape: int) -> Tensor:
        tensor = dense.get(prefix + name)
        found = "missing" if tensor is None else str(list(tensor.shape))
        if tensor is None or tuple(tensor.shape) != shape:
            raise StoreError(f"dense weight {prefix + name} is {found}, expected {list(shape)}: repack the checkpoint")
        return tensor

    return take
