"""All dense launches of one decoded token, in order and with every layer's own weights, to be timed as one graph.

Synthetic: the real model's shapes and layer pattern, Mamba in FP8, shared experts and lm_head in NVFP4, the rest in
BF16, random values. The routed experts and the hand-offs to the host are left out.
"""

import torch

import kernels.attention.gpu as attention
import kernels.mamba.gpu as mamba
import kernels.router.gpu as router
from kernels.attention.pages import Pages, qkv
from kernels.linear.gpu import Finish, Linear, Norm, linear, linears
from kernels.sampling.gpu import Sampler
from services.tools.dense_cases import EPS, EXPERTS, HIDDEN, LATENT, SHARED, SIZES, VOCABULARY, Dense
from services.tools.dense_state_cases import HEAD_DIM, HEADS, KV_HEADS, PAGE_TOKENS, TAPS, TOP_K, make_pages

Tensor = torch.Tensor

PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
CONTEXT = 4096


class DenseToken:
    """Weights, states and buffers for `tokens` sequences of CONTEXT tokens; `launch` queues one token for all."""

    def __init__(self, dense: Dense, tokens: int) -> None:
        self.dense, self.tokens = dense, tokens
        self.size_bytes, self.launches = 0, 0

        def new(*shape: int) -> Tensor:
            return torch.zeros(tokens, *shape, device=dense.device)

        self.x, self.projected = dense.randn(tokens, HIDDEN), new(SIZES.rows)
        self.y, self.mixed = new(SIZES.inner), new(SIZES.inner)
        self.logits, self.next_logits, self.latent = new(EXPERTS), new(EXPERTS), new(LATENT)
        self.hidden, self.query, self.attended = new(SHARED), new(HEADS * HEAD_DIM), new(HEADS * HEAD_DIM)
        self.ids = new(TOP_K).int()
        self.weights = new(TOP_K)
        self.output = new(VOCABULARY)
        self.arrived = new(SIZES.groups).int()
        self.slots = torch.arange(tokens, dtype=torch.int32, device=dense.device)
        count = CONTEXT // PAGE_TOKENS
        self.tables = torch.arange(tokens * count, dtype=torch.int32, device=dense.device).view(tokens, count)
        self.lengths = torch.full((tokens,), CONTEXT, dtype=torch.int32, device=dense.device)
        self.workspace = attention.Workspace(tokens, HEADS, HEAD_DIM, CONTEXT, PAGE_TOKENS, dense.device)
        self.sampler = Sampler(tokens, VOCABULARY, dense.device)
        self.norm = Norm(dense.randn(HIDDEN, scale=0.2) + 1.0, EPS)
        heads = SIZES.heads
        self.scan = (-dense.randn(heads).exp(), dense.randn(heads), dense.randn(heads))
        self.conv = (dense.randn(SIZES.channels, TAPS, scale=0.5), dense.randn(SIZES.channels, scale=0.1))
        self.inner_norm = dense.randn(SIZES.inner, scale=0.2) + 1.0
        self.conv_states = dense.randn(PATTERN.count("M"), tokens, SIZES.channels, TAPS - 1)
        self.ssm_states = dense.randn(PATTERN.count("M"), tokens, heads, SIZES.head_dim, SIZES.state)
        self.pages: list[Pages] = []
        self.layers = [self._layer(kind) for kind in PATTERN]
        self.lm_head = self._linear("NVFP4", VOCABULARY, HIDDEN)
        self.size_bytes += 2 * self.ssm_states.nbytes + sum(p.keys.nbytes + p.values.nbytes for p in self.pages)

    def _linear(self, form: str, rows: int, columns: int) -> Linear:
        made, _ = self.dense.linear(form, rows, columns)
        self.size_bytes += made.size_bytes
        return made

    def _layer(self, kind: str) -> list[Linear]:
        if kind == "M":
            return [self._linear("FP8", SIZES.rows, HIDDEN), self._linear("FP8", HIDDEN, SIZES.inner)]
        if kind == "*":
            self.pages.append(make_pages(self.dense, self.tokens * CONTEXT // PAGE_TOKENS, torch.bfloat16))
            heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
            shapes = [(heads, HIDDEN), (kv, HIDDEN), (kv, HIDDEN), (HIDDEN, heads)]
            return [self._linear("BF16", rows, columns) for rows, columns in shapes]
        shapes = [(EXPERTS, HIDDEN), (LATENT, HIDDEN), (HIDDEN, LATENT)]
        plain = [self._linear("BF16", rows, columns) for rows, columns in shapes]
        return [*plain, self._linear("NVFP4", SHARED, HIDDEN), self._linear("NVFP4", HIDDEN, SHARED)]

    def launch(self) -> None:
        self.launches = 0
        mamba_layer = attention_layer = 0
        gates = [layer[0] for layer, kind in zip(self.layers, PATTERN, strict=True) if kind == "E"]
        for layer, kind in zip(self.layers, PATTERN, strict=True):
            if kind == "M":
                self._mamba(layer, mamba_layer)
                mamba_layer += 1
            elif kind == "*":
                self._attention(layer, self.pages[attention_layer])
                attention_layer += 1
            else:
                gates = gates[1:]
                self._moe(layer, gates[0] if gates else None)
        linear(self.x, self.lm_head, self.output, norm=self.norm)
        self.sampler.greedy(self.output)
        self.launches += 3

    def _mamba(self, layer: list[Linear], index: int) -> None:
        in_proj, out_proj = layer
        conv_state, ssm_state = self.conv_states[index], self.ssm_states[index]
        mamba.in_proj(self.x, self.norm, in_proj, SIZES, *self.conv, conv_state, self.slots, self.projected)
        mamba.update(
            self.projected, SIZES, *self.scan, ssm_state, self.slots, self.inner_norm, EPS, self.y, self.arrived,
            self.mixed,
        )  # fmt: skip
        linear(self.mixed, out_proj, self.x, "add")
        self.launches += 3

    def _attention(self, layer: list[Linear], pages: Pages) -> None:
        q_proj, k_proj, v_proj, o_proj = layer
        qkv(self.x, self.norm, (q_proj, k_proj, v_proj), pages, self.tables, self.lengths, self.query)
        attention.attend(self.query, pages, self.tables, self.lengths, self.workspace, self.attended)
        linear(self.attended, o_proj, self.x, "add")
        self.launches += 4

    def _moe(self, layer: list[Linear], next_gate: Linear | None) -> None:
        gate, fc1, fc2, up, down = layer
        parts: list[tuple[Linear, Tensor, Finish]] = [(gate, self.logits, "store"), (fc1, self.latent, "store")]
        if next_gate is not None:
            parts.append((next_gate, self.next_logits, "store"))
        linears(self.x, parts, self.norm)
        for logits in (self.logits, self.next_logits):
            router.choose(logits, self.logits[0], TOP_K, 5.0, True, self.ids, self.weights)
        linear(self.x, up, self.hidden, "relu2", self.norm)
        linear(self.hidden, down, self.x, "add")
        linear(self.latent, fc2, self.x, "add")  # here the routed experts' result would come in
        self.launches += 6
