"""The dense weights in a card's memory, in the checkpoint's own formats, and embedding rows from the host.

Owns the device tensors and how they are brought there. A linear's bytes are those of the file; norms and biases are
float32, what a linear reads in octet order. The embedding table (1 GB at the real shape) stays where it is: a token
needs one row of it.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from threading import Lock

import torch
from torch import Tensor

from kernels.elementary.reference import exp
from kernels.linear.gpu import Linear, Norm
from kernels.linear.octets import to_octets
from services.engine.errors import CheckpointError
from services.engine.model_config import Layer, ModelConfig
from services.engine.tensorfile import DTYPES, Entry
from services.engine.weights import DRAFT_ATTENTION, DRAFT_MOE, DenseWeights


@dataclass(frozen=True)
class MambaWeights:
    norm: Norm
    in_proj: Linear
    conv_weight: Tensor  # float32 [channels, taps]
    conv_bias: Tensor
    a: Tensor  # -e^A_log, float32 [heads]
    d: Tensor
    dt_bias: Tensor
    inner_norm: Tensor  # float32 [inner], plain order
    out_proj: Linear


@dataclass(frozen=True)
class AttentionWeights:
    norm: Norm
    qkv: tuple[Linear, Linear, Linear]
    o_proj: Linear
    key_scale: float  # of FP8 pages, from the checkpoint if it has them
    value_scale: float


@dataclass(frozen=True)
class MoeWeights:
    norm: Norm
    gate: Linear
    bias: Tensor
    fc1: Linear
    fc2: Linear
    shared_up: Linear
    shared_down: Linear


LOADERS = 4

LayerWeights = MambaWeights | AttentionWeights | MoeWeights


@dataclass(frozen=True)
class DeviceWeights:
    """All layers in order; of a multi-token-prediction block its two, with the network's lm_head and embeddings."""

    config: ModelConfig
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    lm_head: Linear
    embeddings: "EmbeddingRows"
    size_bytes: int

    @staticmethod
    def load(
        dense: DenseWeights, config: ModelConfig, device: torch.device, progress: Callable[[int], None] = lambda _: None
    ) -> "DeviceWeights":
        """Read every tensor once and send it to `device`; `progress` gets the bytes that are there so far.

        Raises CheckpointError for a tensor that the kernels cannot take.
        """
        loader = _Loader(dense, config, device, progress)
        with ThreadPoolExecutor(LOADERS) as threads:  # reading and sending of several layers overlap
            layers = tuple(threads.map(loader.layer, range(len(config.layers))))
        final_norm, lm_head = loader.norm("norm_f.weight"), loader.linear("lm_head")
        rows = EmbeddingRows(dense.entry("embeddings.weight"))
        return DeviceWeights(config, layers, final_norm, lm_head, rows, loader.sent_bytes)

    @property
    def moe_layers(self) -> list[MoeWeights]:
        return [layer for layer in self.layers if isinstance(layer, MoeWeights)]

    @property
    def next_gates(self) -> list[MoeWeights | None]:
        """For each MoE layer the one after it."""
        return [following for _, following in pairwise([*self.moe_layers, None])]


@dataclass(frozen=True)
class HeadWeights:
    """The multi-token-prediction block: `enorm` and `hnorm` of what it begins with, `before` the network's own final
    norm, and the rest as a network of two layers."""

    before: Norm
    enorm: Norm
    hnorm: Norm
    eh_proj: Linear
    network: DeviceWeights

    @staticmethod
    def load(draft: DenseWeights, weights: DeviceWeights, device: torch.device) -> "HeadWeights":
        """Raises CheckpointError for a tensor that the kernels cannot take."""
        loader = _Loader(draft, weights.config, device, lambda _: None)
        layers = loader.mixer(DRAFT_ATTENTION, "attention"), loader.mixer(DRAFT_MOE, "moe")
        enorm, hnorm = (loader.norm(f"{DRAFT_ATTENTION}.{name}.weight") for name in ("enorm", "hnorm"))
        eh_proj, final = loader.linear(f"{DRAFT_ATTENTION}.eh_proj"), loader.norm(f"{DRAFT_MOE}.final_layernorm.weight")
        network = replace(weights, layers=layers, final_norm=final, size_bytes=loader.sent_bytes)
        return HeadWeights(weights.final_norm, enorm, hnorm, eh_proj, network)


class EmbeddingRows:
    """Rows of the embedding table, read from the file when asked for: the system keeps what is used in its cache."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        rows, self.columns = entry.shape
        with entry.path.open(
            "rb"
        ) as file:  # a token must not wait for a slow disk: the system reads it in the background
            os.posix_fadvise(file.fileno(), entry.offset, entry.size_bytes, os.POSIX_FADV_WILLNEED)
        self._table = torch.from_file(
            str(entry.path), shared=False, size=entry.offset + entry.size_bytes, dtype=torch.uint8
        )[entry.offset :].view(rows, -1)

    def read_through(self) -> None:
        """The whole table once, so that the system has it in its cache."""
        for _ in self._entry.chunks():
            pass

    def row(self, id_: int) -> Tensor:
        """float32 [hidden], in plain order, on the host."""
        return self._table[id_].clone().view(DTYPES[self._entry.dtype]).to(torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        """float32 [len(ids), hidden]."""
        return self._table[ids].view(DTYPES[self._entry.dtype]).to(torch.float32)


class _Loader:
    def __init__(
        self, dense: DenseWeights, config: ModelConfig, device: torch.device, progress: Callable[[int], None]
    ) -> None:
        self.dense, self.config, self.device, self.progress = dense, config, device, progress
        self.sent_bytes = 0
        self.lock = Lock()  # guards sent_bytes and the calls of progress

    def layer(self, index: int) -> LayerWeights:
        return self.mixer(f"layers.{index}", self.config.layers[index])

    def mixer(self, name: str, kind: Layer) -> LayerWeights:
        mixer = f"{name}.mixer."
        norm = self.norm(f"{name}.norm.weight")
        match kind:
            case "mamba":
                return MambaWeights(
                    norm,
                    self.linear(mixer + "in_proj"),
                    self.plain(mixer + "conv1d.weight").squeeze(1).contiguous(),
                    self.plain(mixer + "conv1d.bias"),
                    self.send(-exp(self.dense.plain(mixer + "A_log"))),
                    self.plain(mixer + "D"),
                    self.plain(mixer + "dt_bias"),
                    self.plain(mixer + "norm.weight"),
                    self.linear(mixer + "out_proj"),
                )
            case "attention":
                q_proj, k_proj, v_proj = (self.linear(mixer + name) for name in ("q_proj", "k_proj", "v_proj"))
                scales = (self.dense.scalar(mixer + name, 1.0) for name in ("k_proj.k_scale", "v_proj.v_scale"))
                return AttentionWeights(norm, (q_proj, k_proj, v_proj), self.linear(mixer + "o_proj"), *scales)
            case "moe":
                return MoeWeights(
                    norm,
                    self.plain_linear(mixer + "gate.weight"),
                    self.plain(mixer + "gate.e_score_correction_bias"),
                    *(
                        self.linear(mixer + name)
                        for name in (
                            "fc1_latent_proj",
                            "fc2_latent_proj",
                            "shared_experts.up_proj",
                            "shared_experts.down_proj",
                        )
                    ),
                )

    def send(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self.device)
        with self.lock:
            self.sent_bytes += tensor.nbytes
            self.progress(self.sent_bytes)
        return there

    def plain(self, name: str) -> Tensor:
        return self.send(self.dense.plain(name))

    def norm(self, name: str) -> Norm:
        return Norm(self.send(to_octets(self.dense.plain(name))), self.config.norm_eps)

    def linear(self, name: str) -> Linear:
        stored = self.dense.linear(name)
        scale = stored.weight_scale
        if stored.format in ("NVFP4", "W4A16_NVFP4") and scale is not None:
            scale = self.send(scale)  # one for each 16 values; FP8's is a single number
        return self._pack(name, stored.format, self.send(stored.weight), scale, stored.weight_scale_2)

    def plain_linear(self, name: str) -> Linear:
        """A matrix that is never quantised, in the format of the file."""
        entry = self.dense.entry(name)
        return self._pack(name, entry.dtype, self.send(entry.read()))

    def _pack(self, name: str, form: str, *tensors: Tensor | None) -> Linear:
        try:
            return Linear.pack(form, *tensors)  # type: ignore[arg-type]
        except ValueError as error:
            raise CheckpointError(f"tensor {name}: {error}; the GPU engine cannot use it") from error
