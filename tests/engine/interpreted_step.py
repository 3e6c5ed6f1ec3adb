"""The GPU's path of a whole step in the interpreter: a small network of every kind of layer, sequences in mid-dialog.

The experts are a formula of what the routers chose; theirs is the hand-off's tests.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from kernels.linear.gpu import Linear, Norm, Tiling
from services.engine.gpu.decoder import Decoder
from services.engine.gpu.memory import DevicePool, DeviceState
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.token import Token
from services.engine.gpu.weights import AttentionWeights, DeviceWeights, LayerWeights, MambaWeights, MoeWeights
from services.engine.model import Segment
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    layers=("mamba", "moe", "attention", "mamba"),
    norm_eps=1e-5,
    context_tokens=1000,
    attention_heads=2,
    kv_heads=1,
    head_dim=16,
    mamba_heads=2,
    mamba_head_dim=4,
    mamba_state=3,
    mamba_groups=1,
    conv_kernel=4,
    experts=5,
    experts_per_token=2,
    expert_width=16,
    latent_size=32,
    shared_width=16,
    routed_scale=1.5,
    norm_topk=True,
)
BEFORE = [4 * PAGE_TOKENS - 2, 0, PAGE_TOKENS - 1, 7]  # tokens of each: over the end of a run of pages, none, a page's
IDS = [[3, 14, 15, 9], [26, 5, 35, 8], [9, 7, 9, 3], [23, 8, 46, 2]]


def weights() -> DeviceWeights:
    generator = torch.Generator().manual_seed(5)

    def randn(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(DEVICE)

    def linear(rows: int, columns: int) -> Linear:
        return Linear.pack("BF16", randn(rows, columns, scale=0.3).bfloat16())

    def norm() -> Norm:
        return Norm(randn(hidden) + 1.0, 1e-5)

    def layer(kind: str) -> LayerWeights:
        if kind == "mamba":
            inner, channels, heads = CONFIG.mamba_inner, CONFIG.conv_channels, CONFIG.mamba_heads
            return MambaWeights(
                norm(), linear(CONFIG.in_proj_rows, hidden), randn(channels, 4), randn(channels), -randn(heads).exp(),
                randn(heads), randn(heads), randn(inner) + 1.0, linear(hidden, inner),
            )  # fmt: skip
        if kind == "attention":
            return AttentionWeights(
                norm(), (linear(32, hidden), linear(16, hidden), linear(16, hidden)), linear(hidden, 32), 1.0, 1.0
            )
        shared = linear(CONFIG.shared_width, hidden), linear(hidden, CONFIG.shared_width)
        bias = randn(CONFIG.experts, scale=0.1)
        return MoeWeights(norm(), linear(CONFIG.experts, hidden), bias, linear(32, hidden), linear(hidden, 32), *shared)

    hidden = CONFIG.hidden_size
    layers = tuple(layer(kind) for kind in CONFIG.layers)
    embeddings = torch.randn(CONFIG.vocab_size, hidden, generator=generator)
    rows = cast(Any, SimpleNamespace(row=lambda id_: embeddings[id_]))
    return DeviceWeights(CONFIG, layers, norm(), linear(CONFIG.vocab_size, hidden), rows, 0)


class Experts:
    """Stands for the hand-off and the expert step: each row's own formula of ids, weights and input."""

    guesses = stopped = waited = 0
    x: Tensor
    weights: Tensor
    out: Tensor

    def __init__(self, rows: int) -> None:
        self.tokens, self.stop = rows, torch.zeros(1, dtype=torch.int32, device=DEVICE)

    def post(self, layer: int, ids: Tensor, x: Tensor) -> None:
        self.ids = ids[0]

    def launch_combine(self) -> None:
        first, second = (self.weights * (self.ids + 1)).unbind(1)
        self.out.copy_(self.x * (first - second)[:, None])

    def serve(self, turns: int) -> int:
        return turns

    def __getattr__(self, name: str) -> Any:
        return lambda *words: None


def decoder(dense: DeviceWeights, pool: DevicePool, rows: int, others: Experts | None = None) -> Decoder:
    made, experts = Decoder.__new__(Decoder), cast(Any, others or Experts(rows))
    made.weights, made.rows, made.layers, made.turns, made.spent = dense, rows, 1, experts, experts
    made.late = made._tokens = made._last_waits_ns = 0
    made.vram = None
    made.token = Token(dense, pool, experts, experts, 5 * PAGE_TOKENS)
    for buffer in ("projected", "y", "mixed", "query", "attended", "latent", "shared", "routed", "logits"):
        getattr(made.token, buffer).fill_(torch.nan)
    made.graph = cast(Any, SimpleNamespace(replay=made.token.launch))
    return made


class Sequences:
    """Four sequences in mid-dialog: random states and keys; pages beyond their ends are NaN."""

    def __init__(self, dense: DeviceWeights, rows: Sequence[int], drafts: bool = False) -> None:
        generator = torch.Generator().manual_seed(6)
        self.pool = DevicePool(CONFIG, DEVICE, places=4, pages=4 * 6, drafts=drafts)
        if self.pool.kept is not None:
            self.pool.kept.fill_(torch.nan)
        self.states = [DeviceState(CONFIG, self.pool) for _ in BEFORE]
        for half in (self.pool.keys, self.pool.values):
            half.fill_(torch.nan)
        for state, tokens in zip(self.states, BEFORE, strict=True):
            state.reserve(max(1, tokens))
            for half in (self.pool.keys, self.pool.values):
                known = torch.randn(1, len(state.pages), *half.shape[2:], generator=generator)
                half[:, state.pages] = known.to(half)
            for piece in (state.conv, state.ssm):
                piece.copy_(torch.randn(piece.shape, generator=generator))
            state.ids = [0] * tokens
        self.model = DeviceModel.__new__(DeviceModel)
        self.model.pool, self.model.sweep = self.pool, None
        self.model.weights, self.model.config = dense, CONFIG
        self.model.decoders = [decoder(dense, self.pool, each) for each in rows]

    def read(self, segments: Sequence[tuple[int, list[int]]]) -> Tensor:
        """Logits after every id."""
        return self.model.forward_all([Segment(self.states[number], ids) for number, ids in segments])

    def left(self, number: int) -> list[Tensor]:
        state = self.states[number]
        halves = [half[:, state.pages].flatten(1, 2)[:, : state.tokens] for half in (self.pool.keys, self.pool.values)]
        return [state.conv.clone(), state.ssm.clone(), *halves]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        for module in ("linear.gpu", "mamba.gpu", "attention.pages"):  # few programs: each takes its time there
            monkeypatch.setattr(f"kernels.{module}.tiling", lambda *words: Tiling(64, 1, False))
