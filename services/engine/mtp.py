"""The multi-token-prediction block on the CPU: from what the network made of a token, and the id that was chosen behind
it, to logits of the id after that. Owns the block's weights, and what it remembers of a sequence.

    x = eh_proj([enorm(embedding of the id) | hnorm(network's state behind its final norm)])
    x = x + attention(norm(x));  x = x + experts(norm(x));  logits = lm_head(final_layernorm(x))

Its attention reads what it made of every token before, prompt and answer, as in training. Keys and values are of x
alone: to follow the network costs one linear and two small ones a token, and no expert; all of the block is computed
only for drafts. They lie in the state's own pages, in one more layer, at the place of the id. They are of ids that are
certain, so that nothing is ever taken back.

Payloads do not hold them: a snapshot is the same with and without drafts, and an engine that does not draft may go on
with it. Behind a restored beginning the block knows only what was read since.
"""

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.attention.cpu import attend
from kernels.linear.cpu import linear
from kernels.norm.cpu import rms_norm
from services.engine.experts.streamer import Experts
from services.engine.model import Attention, LayerWeights, Model, Moe, Span
from services.engine.state import Drafting, State
from services.engine.weights import DRAFT_ATTENTION, DRAFT_MOE, DenseWeights


class DraftHead:
    """Its experts are the last layer of `experts`. Shares embeddings, lm_head and clocks with the model."""

    def __init__(self, model: Model, weights: DenseWeights, experts: Experts) -> None:
        config = model.config
        self.model, self.eps = model, config.norm_eps

        def norm(layer: str, name: str) -> Tensor:
            return weights.plain(f"{layer}.{name}.weight")

        self.enorm, self.hnorm = norm(DRAFT_ATTENTION, "enorm"), norm(DRAFT_ATTENTION, "hnorm")
        self.eh_proj = weights.linear(f"{DRAFT_ATTENTION}.eh_proj").dequantise()
        self.attention_norm, self.moe_norm = norm(DRAFT_ATTENTION, "norm"), norm(DRAFT_MOE, "norm")
        self.attention = Attention(LayerWeights(weights, DRAFT_ATTENTION), config, len(config.attention_layers))
        self.moe = Moe(LayerWeights(weights, DRAFT_MOE), config, len(config.moe_layers), experts, None, model.spent)
        self.final_norm = norm(DRAFT_MOE, "final_layernorm")

    def read(self, spans: Sequence[Span], embedded: Tensor, hidden: Tensor) -> None:
        """Follow what a call of the network feeds, but for its drafts."""
        for state, rows, drafts in spans:
            certain = slice(rows.start, rows.stop - drafts)
            self.follow(state, embedded[certain], hidden[certain])
            if state.pending is not None:
                state.pending.hidden = hidden[certain.stop : rows.stop].clone()

    def follow(self, state: State, embedded: Tensor, hidden: Tensor) -> None:
        """Ids come next in `state`: their embeddings and the network's states, both [M, hidden]."""
        known, skipped = state.drafting, 0
        if known is None:  # nothing is known of the token before
            known, skipped = Drafting(state.tokens + 1, hidden[0]), 1
        if len(embedded) > skipped:
            before = torch.cat([known.hidden[None], hidden[:-1]])[skipped:]
            x = rms_norm(self._joined(before, embedded[skipped:]), self.attention_norm, self.eps)
            key, value = self.attention.split(x, self.attention.k_proj, self.attention.v_proj)
            state.write_kv(self.attention.index, key, value, skipped)
        state.drafting = Drafting(known.begin, hidden[-1].clone())

    @torch.inference_mode()
    def logits(self, states: Sequence[State], ids: Sequence[int]) -> Tensor:
        """For each state, of the id behind `ids`: those were chosen, and are not fed yet. float32 [len(states), vocab].

        Raises OutOfPagesError before anything has changed, and StepError.
        """
        begun = time.perf_counter()
        states[0].pool.require(sum(state.pages_missing(1) for state in states))
        for state in states:
            state.reserve(1)
        hidden = torch.stack([state.drafting.hidden for state in states if state.drafting is not None])
        x = self._joined(hidden, self.model.embeddings[torch.tensor(ids)])
        x = x + self._attend(rms_norm(x, self.attention_norm, self.eps), states)
        spans = [Span(state, slice(row, row + 1)) for row, state in enumerate(states)]
        x = x + self.moe(rms_norm(x, self.moe_norm, self.eps), spans)
        logits = linear(rms_norm(x, self.final_norm, self.eps), self.model.lm_head)
        self.model.spent.dense_s += time.perf_counter() - begun
        return logits

    def _joined(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        both = (rms_norm(embedded, self.enorm, self.eps), rms_norm(hidden, self.hnorm, self.eps))
        return linear(torch.cat(both, dim=1), self.eh_proj)

    def _attend(self, x: Tensor, states: Sequence[State]) -> Tensor:
        layer = self.attention
        query, key, value = layer.split(x, layer.q_proj, layer.k_proj, layer.v_proj)
        mixed = []
        for row, state in enumerate(states):
            assert state.drafting is not None, "the block has followed what was fed"
            begin = state.drafting.begin
            state.write_kv(layer.index, key[row : row + 1], value[row : row + 1])
            keys, values = state.read_kv(layer.index, state.tokens + 1)
            mixed.append(attend(query[row : row + 1], keys[begin:], values[begin:], first=state.tokens - begin))
        return linear(torch.cat(mixed).flatten(1), layer.o_proj)
