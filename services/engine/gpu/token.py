"""The launches of one step for a fixed number of rows, a token each: all layers, in order, on the current stream.

Rows are of different sequences, or next to each other and in order the consecutive tokens of one: in every layer a
row finds what the row before it left, so its bits are those of a step of its own. A row that is a draft, the last of
its sequence, leaves no more than what the pool keeps of it, and keys and values beyond the sequence's end.

Owns the buffers between the layers and what is copied to and from the host; weights, states and pages are given. Every
buffer is made at construction, so that `launch` can be captured. What a token changes for good is the residual stream
and the sequences' states; everything else is written again by the next one, or when the token goes on.

A token can go on from the middle: `launch(first, posted=True)` begins at MoE layer `first` behind its hand-off. For
that a layer's router weights and latent input are kept until the token's end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import kernels.attention.gpu as attention
import kernels.mamba.gpu as mamba
import kernels.router.gpu as router
from kernels.attention.pages import qkv
from kernels.experts.decode_step import ExpertStep
from kernels.experts.device.turns import Turns
from kernels.linear.gpu import Finish, Linear, linear, linears
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.weights import AttentionWeights, DeviceWeights, MambaWeights, MoeWeights
from services.engine.pages import PAGE_TOKENS


@dataclass(frozen=True)
class Replay:
    """For benchmarks on synthetic weights: what is posted instead of what the routers and projections found.

    ids int32 [MoE layers, rows, k], or with guesses at the next layer's behind them [MoE layers, 2, rows, k], and x
    float32 [MoE layers, rows, latent], on the device. The routers run anyway. `before_post` queues what each layer does
    before its hand-off.
    """

    ids: Tensor
    x: Tensor
    before_post: Callable[[], None] | None = None


class Place(Protocol):
    """Where the rows of a sequence go: its states' place, and behind how many tokens in which pages."""

    place: int
    pages: list[int]

    @property
    def tokens(self) -> int: ...


class TokenInputs:
    """What a token needs from the host, in page-locked memory, and its copy on the device."""

    def __init__(self, rows: int, hidden: int, most_pages: int, device: torch.device) -> None:
        def both(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
            return host, torch.zeros(shape, dtype=dtype, device=device)

        self.host_x, self.x = both(rows, hidden, dtype=torch.float32)
        self.host_numbers, numbers = both(rows * (3 + most_pages), dtype=torch.int32)
        self.numbers = numbers
        sizes = [rows, rows, rows, rows * most_pages]
        self.slots, self.lengths, self.drafts, self.tables = (part for part in torch.split(numbers, sizes))
        self.tables = self.tables.view(rows, most_pages)
        self.host_slots, self.host_lengths, self.host_drafts, tables = torch.split(self.host_numbers, sizes)
        self.host_tables = tables.view(rows, most_pages)

    def fill(self, states: Sequence[Place], drafts: Sequence[bool] = ()) -> None:
        """Of the token that each state takes next; a state that is there again takes the one behind that, and must
        follow itself. Their pages must be reserved. `drafts`: which rows are; none, if nothing is said. Embeddings are
        the caller's to fill."""
        self.host_drafts.copy_(torch.tensor(drafts or [False] * len(states)))
        for row, state in enumerate(states):
            again = row > 0 and states[row - 1] is state
            assert again or all(other is not state for other in states[:row]), "a sequence's rows are neighbours"
            assert not (again and self.host_drafts[row - 1]), "a draft is the last of its sequence"
            self.host_slots[row] = state.place
            self.host_lengths[row] = self.host_lengths[row - 1] + 1 if again else state.tokens + 1
            pages = state.pages[: self.host_tables.shape[1]]
            self.host_tables[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def launch(self) -> None:
        self.x.copy_(self.host_x, non_blocking=True)
        self.numbers.copy_(self.host_numbers, non_blocking=True)


class Token:
    """For `step.tokens` rows of sequences of at most `context_tokens` tokens; `turns` and `step` are the hand-off's."""

    first_attention = first_moe = 0  # of its layers, among the pool's and the host's

    def __init__(
        self,
        weights: DeviceWeights,
        pool: DevicePool,
        step: ExpertStep,
        turns: Turns,
        context_tokens: int,
        whole_groups: bool = False,
        replay: Replay | None = None,
    ) -> None:
        config, device, rows = weights.config, pool.conv.device, step.tokens
        self.weights, self.pool, self.step, self.turns = weights, pool, step, turns
        self.rows, self.whole_groups, self.replay = rows, whole_groups, replay
        self.sizes = mamba.Sizes(config.mamba_heads, config.mamba_head_dim, config.mamba_state, config.mamba_groups)

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.inputs = TokenInputs(rows, config.hidden_size, -(-context_tokens // PAGE_TOKENS), device)
        self.x = self.inputs.x
        self.drafts = [
            None if pool.kept is None else mamba.Drafts(self.inputs.drafts, pool.kept[:, layer])
            for layer in range(len(config.mamba_layers))
        ]
        self.projected, self.y = new(rows, self.sizes.rows), new(rows, self.sizes.inner)
        self.mixed = new(rows, self.sizes.inner)
        self.arrived = new(rows, self.sizes.groups, dtype=torch.int32)
        heads = config.attention_heads * config.head_dim
        self.query, self.attended = new(rows, heads), new(rows, heads)
        self.workspace = attention.Workspace(
            rows, config.attention_heads, config.head_dim, context_tokens, PAGE_TOKENS, device
        )
        layers, top_k = len(config.moe_layers), config.experts_per_token
        self.scores, self.next_scores = new(rows, config.experts), new(rows, config.experts)
        self.latent = new(layers, rows, config.latent_size)
        # What a layer's router chose, then guesses at the next layer's: kept until the token's end for who traces it.
        self.chosen = new(layers, 2 if turns.guesses else 1, rows, top_k, dtype=torch.int32)
        if turns.guesses:
            self.chosen[-1, 1] = -1  # behind the last layer nothing is guessed
        self.chosen_weights, self.guessed_weights = new(layers, rows, top_k), new(layers, rows, top_k)
        self.shared, self.routed = new(rows, config.shared_width), new(rows, config.latent_size)
        self.logits = new(rows, config.vocab_size)
        self.host_logits = torch.zeros(self.logits.shape, pin_memory=device.type == "cuda")

    def launch(self, first: int = 0, posted: bool = False) -> None:
        """Queue the token, or with `posted` what follows the hand-off of MoE layer `first`."""
        if not posted:
            self._begin()
        counts = {MambaWeights: 0, AttentionWeights: 0, MoeWeights: 0}
        for layer in self.weights.layers:
            index = counts[type(layer)]
            counts[type(layer)] += 1
            if posted and counts[MoeWeights] <= first:
                continue
            match layer:
                case MambaWeights():
                    self._mamba(layer, index)
                case AttentionWeights():
                    self._attention(layer, index)
                case MoeWeights():
                    if not (posted and index == first):
                        self._route(layer, index)
                    self._experts(layer, index)
        linear(self.x, self.weights.lm_head, self.logits, norm=self.weights.final_norm)
        self.host_logits.copy_(self.logits, non_blocking=True)

    def _begin(self) -> None:
        self.inputs.launch()

    def _mamba(self, layer: MambaWeights, index: int) -> None:
        pool, stop, slots = self.pool, self.turns.stop, self.inputs.slots
        mamba.in_proj(
            self.x, layer.norm, layer.in_proj, self.sizes, layer.conv_weight, layer.conv_bias, pool.conv[:, index],
            slots, self.projected, stop=stop, drafts=self.drafts[index],
        )  # fmt: skip
        mamba.update(
            self.projected, self.sizes, layer.a, layer.d, layer.dt_bias, pool.ssm[:, index], slots, layer.inner_norm,
            layer.norm.eps, self.y, self.arrived, self.mixed, stop=stop, drafts=self.drafts[index],
        )  # fmt: skip
        linear(self.mixed, layer.out_proj, self.x, "add", stop=stop)

    def _attention(self, layer: AttentionWeights, index: int) -> None:
        pages = self.pool.pages_of(self.first_attention + index, layer.key_scale, layer.value_scale)
        tables, lengths = self.inputs.tables, self.inputs.lengths
        qkv(self.x, layer.norm, layer.qkv, pages, tables, lengths, self.query)
        attention.attend(self.query, pages, tables, lengths, self.workspace, self.attended)
        linear(self.attended, layer.o_proj, self.x, "add", stop=self.turns.stop)

    def _route(self, layer: MoeWeights, index: int) -> None:
        """Up to the hand-off, and the shared expert behind it, which the host's answer need not wait for."""
        config, following = self.weights.config, self.weights.next_gates[index] if self.turns.guesses else None
        parts: list[tuple[Linear, Tensor, Finish]] = [
            (layer.gate, self.scores, "store"),
            (layer.fc1, self.latent[index], "store"),
        ]
        if following is not None:
            parts.append((following.gate, self.next_scores, "store"))
        linears(self.x, parts, layer.norm)
        choice = (config.experts_per_token, config.routed_scale, config.norm_topk)
        router.choose(self.scores, layer.bias, *choice, self.chosen[index, 0], self.chosen_weights[index])
        if following is not None:
            # This layer's input is a good guess at the next one's: its router is often right a layer early.
            guessed = self.chosen[index, 1], self.guessed_weights[index]
            router.choose(self.next_scores, following.bias, *choice, *guessed)
        if self.replay is None:
            self.turns.post(self.first_moe + index, self.chosen[index], self.latent[index])
        else:
            if self.replay.before_post is not None:
                self.replay.before_post()
            self.turns.post(self.first_moe + index, self.replay.ids[index], self.replay.x[index])
        linear(self.x, layer.shared_up, self.shared, "relu2", layer.norm)
        linear(self.shared, layer.shared_down, self.x, "add", stop=self.turns.stop)

    def _experts(self, layer: MoeWeights, index: int) -> None:
        step = self.step
        step.x = self.latent[index] if self.replay is None else self.replay.x[index]
        step.weights, step.out = self.chosen_weights[index], self.routed
        step.launch_quantise()
        self.turns.launch_waves(self.whole_groups)
        self.turns.wait_results()
        step.launch_combine()
        linear(self.routed, layer.fc2, self.x, "add", stop=self.turns.stop)
