"""From an open store to a model that runs on the GPU: slots that it can read, rates, weights, states, graphs.

Owns the order, which keeps the peak of the card's memory low: what is only measured with is given back before the
weights come. Everything is taken here; nothing is allocated while tokens run.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.experts.device.rates import PIECE_BYTES, ReadRates
from kernels.experts.device.turns import HandoffError, SharedSlots
from services.engine.errors import DeviceError, MemoryPlanError, StepError
from services.engine.experts.store import Store
from services.engine.experts.streamer import Experts, HostExperts
from services.engine.gpu.decoder import Placement
from services.engine.gpu.ledger import Kv
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.usable import usable_device
from services.engine.gpu.weights import DeviceWeights, HeadWeights

MOST_UNTOLD_BYTES = 1 << 30
AWAKE_US = 2000  # workers stay awake between the layers of a token


@dataclass(frozen=True)
class Sizes:
    """`rows`: numbers of rows that a step can have, ascending from 1, as the ledger says; `pages` of KV for all
    sequences; `chunk_tokens` of prompts are read at once; `share` of a layer's experts for the GPU, None: found while
    running; `guesses`: the next layer's experts are guessed and prefetched; `drafts` can be tried; `kept_blocks` of
    experts stay in the card's memory."""

    sequences: int
    rows: tuple[int, ...]
    context_tokens: int
    pages: int
    chunk_tokens: int
    kv: Kv = "bf16"
    share: int | None = None
    guesses: bool = True
    drafts: bool = False
    head: bool = False  # the multi-token-prediction block
    kept_blocks: int = 0
    vision_bytes: int = 0  # what pictures are read with, in the model's `memory`


@dataclass(frozen=True)
class Device:
    """What runs on the card. Closed with the experts."""

    model: DeviceModel
    pool: DevicePool
    slots: SharedSlots
    name: str

    def close(self) -> None:
        try:
            self.model.close()
        finally:
            self.slots.close()


def open_device(store: Store, experts: Experts, sizes: Sizes, say: Callable[[str], None] = lambda _: None) -> Device:
    """Raises DeviceError if there is no usable GPU, MemoryPlanError if memory of either kind cannot be had."""
    device = usable_device()
    if not isinstance(experts, HostExperts):
        raise DeviceError("the GPU engine needs the compiled host library: install a C++ compiler (g++)")
    top_k = store.config.experts_per_token
    shared = None
    try:
        shared = SharedSlots(experts.host, least=top_k * sizes.rows[-1])
        if shared.notice:
            say(shared.notice)
        share = _first_share(shared, top_k)
        say(f"{torch.cuda.get_device_name(device)} takes {share:.1f} of {top_k} experts at first")
        weights = DeviceWeights.load(store.dense(), store.config, device, _Reporter(store, say))
        say(f"{weights.size_bytes / 1e9:.3f} GB of dense weights are on the GPU")
        draft = store.draft() if sizes.head else None
        pool = DevicePool(
            store.config, device, places=sizes.sequences, pages=sizes.pages, kv=sizes.kv, drafts=sizes.drafts,
            head=sizes.head,
        )  # fmt: skip
        if sizes.kept_blocks:
            shared.keep_in_vram(sizes.kept_blocks, device)
            assert shared.vram is not None
            experts.on_card = shared.vram.held
        model = DeviceModel(
            weights,
            pool,
            shared,
            rows=sizes.rows,
            context_tokens=sizes.context_tokens,
            chunk_tokens=sizes.chunk_tokens,
            shared_bytes=sizes.vision_bytes,
            placement=Placement(share=sizes.share, first_share=share, guesses=sizes.guesses),
            told=experts.told,
            head=HeadWeights.load(draft, weights, device) if draft is not None else None,
        )
    except BaseException as error:
        if shared is not None:
            shared.close()
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise MemoryPlanError(
                f"the GPU's memory ran out while the model was put there: {error}; close what else uses the card, or "
                "lower THIMBLE_ENGINE_MAX_SEQUENCES or THIMBLE_ENGINE_CONTEXT_TOKENS"
            ) from error
        if isinstance(error, HandoffError):
            kind = MemoryPlanError if shared is None else StepError
            raise kind(experts.told(str(error))) from error
        if isinstance(error, torch.AcceleratorError):
            raise DeviceError(f"the GPU failed while the model was loaded: {error}") from error
        raise
    opened = Device(model, pool, shared, torch.cuda.get_device_name(device))
    experts.closing.append(opened.close)
    return opened


class _Reporter:
    """Tells the log about long loads: every tenth of the way."""

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._say = say
        self._whole_bytes = store.dense_file.size_bytes
        self._tenths = 0
        self._begun = time.perf_counter()

    def __call__(self, sent_bytes: int) -> None:
        share = sent_bytes / self._whole_bytes
        if self._whole_bytes < MOST_UNTOLD_BYTES or int(10 * share) <= self._tenths:
            return
        self._tenths = int(10 * share)
        spent_s = time.perf_counter() - self._begun
        left_s = spent_s * (1 - share) / share
        self._say(
            f"weights: {sent_bytes / 1e9:.1f} GB are on the GPU after {spent_s:.1f} s, at most {left_s:.0f} s left"
        )


def _first_share(slots: SharedSlots, top_k: int) -> float:
    """From what both sides read at once; half, where the slots are too few to measure with."""
    if slots.host.memory()[1] < PIECE_BYTES:
        return top_k / 2
    share = ReadRates(slots).first_share(top_k)
    gc.collect()
    torch.cuda.empty_cache()
    return share
