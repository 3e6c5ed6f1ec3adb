"""The network as it is trained: the arithmetic of transformers' NemotronHForCausalLM for packed rows of documents.

Parameters have the canonical names, but that a layer's experts are one tensor. Weights are float32; on a GPU
matrix products run in BF16 by autocast, norms, router and decays in float32. `rounding` given, weights are used as the
quantised checkpoint will have them. Owns no loop, no text.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, rms_norm, scaled_dot_product_attention

from services.engine.model_config import ModelConfig
from services.tools.train_demo import experts, scan
from services.tools.train_demo.fused import Fused
from services.tools.train_demo.rounding import FP8, NVFP4, Rounding


@dataclass
class Pass:
    """What one forward pass needs beside its input, and what it leaves for the loop."""

    documents: Tensor  # int [rows, tokens], equal within a document, never used again
    seen: Tensor  # bool [rows, 1, tokens, tokens]: what attention may read
    rounding: Rounding | None
    loads: dict[str, Tensor]  # tokens per expert, by the layer's name
    watch: bool  # fill the two below
    sparsity: list[Tensor]  # of each expert layer: sum|r| / (sqrt(n) |r|_2) behind relu, 1 = nothing is zero
    zeros: list[Tensor]  # of each expert layer: share of values behind relu that are exactly zero
    fused: Fused | None = None
    wants_sparsity: bool = False  # of the fused parts
    drop: float = 0.0  # share of what each layer adds that is left out, by torch's own random numbers


class Linear(nn.Module):
    """Without a bias; `form` is what it is quantised to, if it is."""

    def __init__(self, name: str, rows: int, columns: int, form: str | None, scale: float = 1.0) -> None:
        super().__init__()
        self.name, self.form = name, form
        self.weight = nn.Parameter(torch.randn(rows, columns) * (0.02 * scale))

    def value(self, rounding: Rounding | None) -> Tensor:
        if rounding is None or self.form is None:
            return self.weight
        return rounding(self.name, self.weight, self.form)

    def forward(self, x: Tensor, rounding: Rounding | None) -> Tensor:
        return linear(x, self.value(rounding))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, name: str, config: ModelConfig, form: str | None, scale: float) -> None:
        super().__init__()
        heads, kv, size = config.attention_heads, config.kv_heads, config.head_dim
        self.heads, self.kv, self.size = heads, kv, size
        hidden = config.hidden_size
        self.q_proj = Linear(f"{name}.q_proj", heads * size, hidden, None)
        self.k_proj = Linear(f"{name}.k_proj", kv * size, hidden, None)
        self.v_proj = Linear(f"{name}.v_proj", kv * size, hidden, None)
        self.o_proj = Linear(f"{name}.o_proj", hidden, heads * size, None, scale)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        query, key, value = (
            torch.unflatten(one(x, run.rounding), -1, (-1, self.size)).transpose(1, 2)
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in (key, value))
        attended = scaled_dot_product_attention(query, key, value, attn_mask=run.seen)
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2), run.rounding)
        return out

    def fused(self, x: Tensor, norm: Norm, run: Pass, fused: Fused) -> Tensor | None:
        if fused.attention is None:
            return None
        weights = (one.value(run.rounding) for one in (self.q_proj, self.k_proj, self.v_proj, self.o_proj))
        return fused.attention(x, norm.weight, *weights, run.seen, self.heads, norm.eps, fused.kind)


class Convolution(nn.Module):
    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.rand(channels, 1, taps) * 2 - 1) * taps**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels))


class Mamba(nn.Module):
    def __init__(self, name: str, config: ModelConfig, form: str | None, scale: float) -> None:
        super().__init__()
        self.config = config
        self.inner, heads = config.mamba_heads * config.mamba_head_dim, config.mamba_heads
        self.shared = config.mamba_groups * config.mamba_state
        channels = self.inner + 2 * self.shared
        self.in_proj = Linear(f"{name}.in_proj", self.inner + channels + heads, config.hidden_size, form)
        self.conv1d = Convolution(channels, config.conv_kernel)
        step = torch.exp(torch.rand(heads) * math.log(100) + math.log(0.001)).clamp(min=1e-4)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        self.A_log = nn.Parameter(torch.log(torch.arange(1, heads + 1, dtype=torch.float32)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = Norm(self.inner, config.norm_eps)
        self.out_proj = Linear(f"{name}.out_proj", config.hidden_size, self.inner, form, scale)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        sizes = [self.inner, self.inner + 2 * self.shared, self.config.mamba_heads]
        gate, mixed, dt = torch.split(self.in_proj(x, run.rounding), sizes, dim=-1)
        y = scan.mix(gate, mixed, dt, *self.own(), run.documents, *self.fixed(x))
        out: Tensor = self.out_proj(y, run.rounding)
        return out

    def own(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.conv1d.weight, self.conv1d.bias, self.dt_bias, self.A_log, self.D, self.norm.weight

    def fixed(self, x: Tensor) -> tuple[int, float, int]:
        return self.config.mamba_groups, self.config.norm_eps, 64 if x.is_cuda else 32

    def fused(self, x: Tensor, norm: Norm, run: Pass, fused: Fused) -> Tensor | None:
        """The whole layer; None where that is not fused. So of every mixer."""
        if fused.mamba is None:
            return None
        weights = (norm.weight, self.in_proj.value(run.rounding), self.out_proj.value(run.rounding))
        return fused.mamba(x, *weights, *self.own(), run.documents, *self.fixed(x), fused.kind)


class Gate(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.experts, config.hidden_size) * 0.02)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.experts))


class Shared(nn.Module):
    def __init__(self, name: str, config: ModelConfig, form: str | None, scale: float) -> None:
        super().__init__()
        self.up_proj = Linear(f"{name}.up_proj", config.shared_width, config.hidden_size, form)
        self.down_proj = Linear(f"{name}.down_proj", config.hidden_size, config.shared_width, form, scale)


class Experts(nn.Module):
    def __init__(self, config: ModelConfig, scale: float) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(config.experts, config.expert_width, config.latent_size) * 0.05)
        self.down_proj = nn.Parameter(
            torch.randn(config.experts, config.latent_size, config.expert_width) * (0.05 * scale)
        )


class Mixture(nn.Module):
    """The latent mixture of experts. The router never sees a gradient through what it chose, only through weights."""

    def __init__(self, name: str, config: ModelConfig, form: str | None, scale: float) -> None:
        super().__init__()
        self.name, self.config, self.form = name, config, form
        self.gate = Gate(config)
        self.fc1_latent_proj = Linear(f"{name}.fc1_latent_proj", config.latent_size, config.hidden_size, None)
        self.fc2_latent_proj = Linear(f"{name}.fc2_latent_proj", config.hidden_size, config.latent_size, None)
        self.experts = Experts(config, scale)
        self.shared_experts = Shared(f"{name}.shared_experts", config, form, scale)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        config, tokens = self.config, x.flatten(0, 1)
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(linear(tokens.float(), self.gate.weight))
            choice = scores.detach() + self.gate.e_score_correction_bias
            ids = choice.topk(config.experts_per_token, dim=-1).indices
            weights = scores.gather(1, ids)
            if config.norm_topk:
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            weights = weights * config.routed_scale
        latent = self.fc1_latent_proj(tokens, run.rounding)
        up, down = self.values(run.rounding)
        up, down = up.to(latent.dtype), down.to(latent.dtype)
        routed, counts, active = experts.run(latent, ids, weights, up, down)
        run.loads[self.name] = counts
        if run.watch:
            size = active.float().norm(dim=-1)
            run.sparsity.append((active.float().sum(-1) / (size + 1e-6) * active.shape[-1] ** -0.5).sum() / ids.numel())
            run.zeros.append(1 - torch.count_nonzero(active.detach()) / (ids.numel() * active.shape[-1]))
        shared = torch.relu(self.shared_experts.up_proj(tokens, run.rounding)).square()
        out: Tensor = self.fc2_latent_proj(routed, run.rounding) + self.shared_experts.down_proj(shared, run.rounding)
        return out.view(x.shape)

    def values(self, rounding: Rounding | None) -> tuple[Tensor, Tensor]:
        up: Tensor = self.experts.up_proj
        down: Tensor = self.experts.down_proj
        if rounding is None or self.form is None:
            return up, down
        return (
            rounding(f"{self.name}.experts.up", up, self.form),
            rounding(f"{self.name}.experts.down", down, self.form),
        )

    def fused(self, x: Tensor, norm: Norm, run: Pass, fused: Fused) -> Tensor | None:
        if fused.moe is None:
            return None
        config, rounding, both = self.config, run.rounding, self.shared_experts
        projections = (self.fc1_latent_proj.value(rounding), self.fc2_latent_proj.value(rounding))
        shared = (both.up_proj.value(rounding), both.down_proj.value(rounding))
        fixed = (config.experts_per_token, config.norm_topk, config.routed_scale, norm.eps)
        gate = (self.gate.weight, self.gate.e_score_correction_bias)
        weights = (norm.weight, *gate, *projections, *self.values(rounding), *shared)
        out, run.loads[self.name], zeros, sparsity = fused.moe(x, *weights, *fixed, fused.kind, run.wants_sparsity)
        run.zeros.append(zeros)
        run.sparsity.append(sparsity)
        return out


MIXERS: dict[str, type[Attention] | type[Mamba] | type[Mixture]] = {
    "mamba": Mamba,
    "attention": Attention,
    "moe": Mixture,
}
FORMS = {"mamba": FP8, "moe": NVFP4, "attention": None}


class Layer(nn.Module):
    def __init__(self, name: str, kind: str, config: ModelConfig, quantised: bool, depth: int) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.mixer = MIXERS[kind](f"{name}.mixer", config, FORMS[kind] if quantised else None, depth**-0.5)

    def forward(self, x: Tensor, run: Pass) -> Tensor:
        if run.fused is not None:
            with torch.autocast(x.device.type, enabled=False):  # fused parts say themselves what is in which dtype
                whole: Tensor | None = self.mixer.fused(x, self.norm, run, run.fused)
            if whole is not None:
                return x + dropout(whole - x, run.drop) if run.drop else whole
        added: Tensor = self.mixer(self.norm(x), run)
        return x + (dropout(added, run.drop) if run.drop else added)


class Draft(nn.Module):
    """The multi-token-prediction block: from what the model made of a token and the embedding of the one that followed
    to the one after that. Reads the model's last hidden state behind its final norm. It learns from the model, never
    the other way round: nothing it reads gets a gradient of its loss.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.norm_eps
        first, second = (
            Layer(f"mtp.layers.{i}", kind, config, False, 2) for i, kind in enumerate(("attention", "moe"))
        )
        for name in ("enorm", "hnorm"):
            first.add_module(name, Norm(hidden, eps))
        first.add_module("eh_proj", Linear("mtp.layers.0.eh_proj", hidden, 2 * hidden, None))
        second.add_module("final_layernorm", Norm(hidden, eps))
        self.layers = nn.ModuleList((first, second))

    def forward(self, hidden: Tensor, following: Tensor, run: Pass) -> Tensor:
        """hidden, following (embeddings of the next ids): [rows, tokens, hidden] -> states for lm_head."""
        first, second = self.layers
        enorm, hnorm, joined = (first.get_submodule(name) for name in ("enorm", "hnorm", "eh_proj"))
        x = joined(torch.cat((enorm(following), hnorm(hidden)), dim=-1), None)
        out: Tensor = second.get_submodule("final_layernorm")(second(first(x.float(), run), run))
        return out


class Network(nn.Module):
    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
            nn.init.normal_(self.embeddings.weight, std=0.02)
            depth = len(config.layers)
            self.layers = nn.ModuleList(
                Layer(f"layers.{i}", kind, config, True, depth) for i, kind in enumerate(config.layers)
            )
            self.norm_f = Norm(config.hidden_size, config.norm_eps)
            self.lm_head = Linear("lm_head", config.vocab_size, config.hidden_size, NVFP4)
            self.mtp = Draft(config)

    def forward(
        self,
        ids: Tensor,
        documents: Tensor,
        rounding: Rounding | None = None,
        watch: bool = False,
        fused: Fused | None = None,
        wants_sparsity: bool = False,
        drop: float = 0.0,
    ) -> tuple[Tensor, Pass]:
        """Hidden states behind the final norm, float32 [rows, tokens, hidden], of ids int64 [rows, tokens]."""
        run = start(documents, rounding, watch)
        run.fused, run.wants_sparsity, run.drop = fused, wants_sparsity, drop
        x = self.embeddings(ids).float()
        for layer in self.layers:
            x = layer(x, run)
        return self.norm_f(x), run

    def logits(self, hidden: Tensor, rounding: Rounding | None = None) -> Tensor:
        out: Tensor = self.lm_head(hidden, rounding)
        return out.float()

    def draft(self, hidden: Tensor, ids: Tensor, run: Pass) -> Tensor:
        """States for `draft_logits`, [rows, tokens, hidden]: place i is of ids[i + 2], from hidden[i] and ids[i + 1].

        A row's last place has no following id and means nothing.
        """
        following = self.embeddings.weight.detach()[ids.roll(-1, dims=1)]
        out: Tensor = self.mtp(hidden.detach(), following, run)
        return out

    def draft_logits(self, states: Tensor, rounding: Rounding | None = None) -> Tensor:
        return linear(states, self.lm_head.value(rounding).detach()).float()

    def mixtures(self) -> list[Mixture]:
        return [module for module in self.modules() if isinstance(module, Mixture)]


def start(documents: Tensor, rounding: Rounding | None, watch: bool) -> Pass:
    tokens = documents.shape[1]
    causal = torch.ones(tokens, tokens, dtype=torch.bool, device=documents.device).tril()
    seen = (documents.unsqueeze(2) == documents.unsqueeze(1)) & causal
    return Pass(documents, seen.unsqueeze(1), rounding, {}, watch, [], [])
