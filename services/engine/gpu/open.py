"""From an open store to a model that runs on the GPU: slots that it can read, rates, weights, states, graphs.

Owns the order, which keeps the peak of the card's memory low: what is only measured with is given back before the
weights come. Everything is taken here; nothing is allocated while tokens run.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels.build import BuildError
from kernels.experts.device.rates import PIECE_BYTES, ReadRates
from kernels.experts.device.turns import HandoffError, SharedSlots
from kernels.workers.pool import Workers, default_threads
from services.engine.errors import DeviceError, MemoryPlanError
from services.engine.experts.store import Store
from services.engine.experts.streamer import HostExperts
from services.engine.gpu import ledger
from services.engine.gpu.decoder import Placement
from services.engine.gpu.memory import DevicePool, KvFormat
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.weights import DeviceWeights
from services.engine.pages import pages_for

SPIN_US = 2000  # workers stay awake between the layers of a token


@dataclass(frozen=True)
class Wanted:
    """`slots` expert blocks in page-locked RAM; `pages` of KV for all sequences; `workers` 0: cores less two."""

    slots: int
    sequences: int
    context_tokens: int
    pages: int = 0  # 0: enough for every sequence
    kv: KvFormat = "bf16"
    readers: int = 4
    workers: int = 0
    share: int | None = None
    guesses: bool = True


@dataclass(frozen=True)
class Device:
    """What runs on the card, and what it was found to be. `close` gives everything back."""

    model: DeviceModel
    pool: DevicePool
    experts: HostExperts
    slots: SharedSlots
    name: str
    first_share: float

    def close(self) -> None:
        self.model.close()
        self.slots.close()
        self.experts.close()


def open_device(store: Store, wanted: Wanted, say: Callable[[str], None] = lambda _: None) -> Device:
    """Raises DeviceError if there is no usable GPU, MemoryPlanError if memory of either kind cannot be had."""
    device = usable_device()
    say(check_memory(store, wanted, torch.cuda.mem_get_info(device)[0]))
    threads = wanted.workers or default_threads()
    try:
        workers = Workers(threads, SPIN_US)
    except BuildError as error:
        raise DeviceError(f"the GPU engine needs the compiled host library: {error}") from error
    experts = HostExperts(store, workers, slots=wanted.slots, readers=wanted.readers, lock_memory=False)
    shared = None
    try:
        shared = SharedSlots(experts.host)
        share = _first_share(shared, store.config.experts_per_token)
        say(f"{threads} threads; the GPU takes {share:.1f} of {store.config.experts_per_token} experts at first")
        weights = DeviceWeights.load(store.dense(), store.config, device)
        say(f"{weights.size_bytes / 1e9:.2f} GB of dense weights on the GPU")
        pages = wanted.pages or wanted.sequences * pages_for(wanted.context_tokens)
        pool = DevicePool(store.config, device, places=wanted.sequences, pages=pages, kv=wanted.kv)
        placement = Placement(share=wanted.share, first_share=share, guesses=wanted.guesses)
        model = DeviceModel(
            weights,
            pool,
            shared,
            sequences=wanted.sequences,
            context_tokens=wanted.context_tokens,
            placement=placement,
        )
    except BaseException as error:
        if shared is not None:
            torch.cuda.synchronize()
            shared.close()
        experts.close()
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise MemoryPlanError(
                f"the GPU's memory ran out while the model was put there: {error}; close what else uses the card, or "
                "lower THIMBLE_ENGINE_MAX_SEQUENCES or THIMBLE_ENGINE_CONTEXT_TOKENS"
            ) from error
        if isinstance(error, HandoffError):
            raise MemoryPlanError(str(error)) from error
        raise
    return Device(model, pool, experts, shared, torch.cuda.get_device_name(device), share)


def check_memory(store: Store, wanted: Wanted, free_bytes: int) -> str:
    """The ledger, for the log. Raises MemoryPlanError if it takes more than what is free beside our CUDA context."""
    asked = ledger.Wanted(wanted.sequences, wanted.context_tokens, wanted.kv, wanted.pages)
    budget_bytes = free_bytes + ledger.CONTEXT_BYTES
    made = ledger.require(store.config, ledger.stored_layout(store.folder), asked, budget_bytes)
    return f"graphics memory, {budget_bytes / ledger.MIB:.0f} MiB free with our CUDA context:\n{made}"


def usable_device() -> torch.device:
    """The current CUDA device. Raises DeviceError, which says what is missing."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = (
            "this PyTorch was built without CUDA: install the CUDA build of the same version"
            if built is None
            else f"no NVIDIA GPU or a driver too old for CUDA {built}: look at nvidia-smi"
        )
        raise DeviceError(f"no usable GPU: {reason}; or set THIMBLE_ENGINE_DEVICE=cpu")
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        raise DeviceError(
            f"{torch.cuda.get_device_name()} has compute capability {major}.{minor}; the kernels need 8.0 (RTX 30 "
            "series) or later; set THIMBLE_ENGINE_DEVICE=cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _first_share(slots: SharedSlots, top_k: int) -> float:
    """From what both sides read at once; half, where the slots are too few to measure with."""
    if slots.host.memory()[1] < PIECE_BYTES:
        return top_k / 2
    share = ReadRates(slots).first_share(top_k)
    gc.collect()
    torch.cuda.empty_cache()
    return share
