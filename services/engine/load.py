"""From settings to the parts of an engine: opens the store, plans the memory, loads the weights, opens the experts.

Takes minutes for a large model and starts no engine thread, so that whoever calls it may give up waiting.
"""

import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from prometheus_client import CollectorRegistry

from kernels.build import BuildError
from kernels.experts.host.drives import Drive
from kernels.workers.pool import SPIN_US, native
from services.engine.config import EngineConfig
from services.engine.drafts import Copying, Predicting, Source
from services.engine.errors import DeviceError, MemoryPlanError
from services.engine.exchange import mark
from services.engine.experts.copies import copies, folders_of
from services.engine.experts.store import Store
from services.engine.experts.streamer import Experts, HostExperts, open_experts
from services.engine.experts.trace import Header, Recorder
from services.engine.experts.warm import NAME, OFF, WarmSet
from services.engine.fingerprint import arithmetic_fingerprint
from services.engine.gpu import ranges
from services.engine.gpu.locking import measured_share
from services.engine.gpu.nvml import Card, CardFigures
from services.engine.gpu.usable import usable_device
from services.engine.grammar import Grammars
from services.engine.metrics import Metrics, owner
from services.engine.model import Model
from services.engine.model_config import ModelConfig
from services.engine.mtp import DraftHead
from services.engine.pages import PagePool
from services.engine.plan import GB, Machine, Plan, make_plan
from services.engine.request import Info
from services.engine.scheduler import Scheduler
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.memory import fresh
from services.engine.snapshots.payload import PayloadFormat
from services.engine.speculation import Speculation
from services.engine.state import State
from services.engine.vision.cache import PictureCache
from services.engine.vision.sight import Read, Sight
from services.engine.vision.weights import VisionWeights
from services.engine.vllm_names import VllmNames

if TYPE_CHECKING:
    from services.engine.gpu.model import DeviceModel

SYNTHETIC = "synthetic"
RESTARTS = "RESTARTED_ENGINE"  # in the environment of a process that follows one whose GPU failed: how many there were
CHUNK_TOKENS = 64  # of prompts, that a CPU reads together
ONE_BY_ONE_TOKENS = 8  # by a GPU without room for more


@dataclass(frozen=True)
class Parts:
    """What an `Engine` is made of. `experts` must be closed by whoever does not make one."""

    info: Info
    scheduler: Scheduler
    experts: Experts
    grammars: Grammars
    sight: Sight | None
    exchange_dir: Path | None


def load(
    config: EngineConfig,
    registry: CollectorRegistry,
    say: Callable[[str], None],
    drives: Sequence[Drive] | None = None,
) -> Parts:
    """Raises StoreError or MemoryPlanError, if it can before anything large is read. `say` gets lines for the log.
    `drives`: what stands for the disks in a benchmark."""
    begin = time.perf_counter()
    store = Store.open(config.store)
    on_gpu = _on_gpu(config, say)
    if on_gpu:  # Triton and all its kernels: half a second of the start that an engine on the CPU has no use for
        from services.engine.gpu.memory import DeviceState, page_locked
        from services.engine.gpu.model import arithmetic_path
        from services.engine.gpu.open import AWAKE_US, Sizes, open_device
    card = (torch.cuda.mem_get_info()[0], measured_share()) if on_gpu else ()
    plan = make_plan(config, store, Machine.here(), *card)
    say(f"plan: {plan}")
    store.check_dense()
    path = arithmetic_path(config.kv_format, plan.device.chunk_tokens > 0) if plan.device else "cpu"
    info = Info(
        model=served_name(store, config.model_name),
        model_fingerprint=store.fingerprint,
        arithmetic_fingerprint=arithmetic_fingerprint(store.fingerprint, path),
        vocab_size=store.config.vocab_size,
        context_tokens=plan.context_tokens,
        max_sequences=plan.sequences,
        queue_limit=config.queue_limit,
        vision=store.vision_file is not None,
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        version=importlib.metadata.version("thimble"),
        exchange=mark(Path(config.exchange_dir)) if config.exchange_dir else "",
    )
    trace = None
    if config.trace:
        trace = Recorder(Path(config.trace), Header.of(store, info.model), int(config.trace_mb * 1e6))
    experts = open_experts(
        store,
        slots=plan.slots,
        readers=plan.readers,
        workers=plan.workers,
        lock_memory=config.lock_memory,
        copies=copies(store, folders_of(config.copies)),
        warm=_warm_set(config, store, "mtp" in plan.drafts),
        prefetch=config.prefetch,
        trace=trace,
        drives=drives,
        spin_us=AWAKE_US if on_gpu else SPIN_US,
        drafts="mtp" in plan.drafts,
    )
    try:
        network: Model | DeviceModel
        sources: list[Source] = [Copying()] if plan.drafts else []
        new_state: Callable[[ModelConfig, Any], State] = State
        if plan.device is not None:
            ranges.switch(config.nvtx)
            guesses = config.prefetch != "off" and plan.slots < plan.blocks
            sizes = Sizes(
                plan.sequences, plan.device.ledger.wanted.step_rows, plan.context_tokens, plan.pages,
                plan.device.chunk_tokens, plan.device.kv, guesses=guesses, drafts=bool(plan.drafts),
                head="mtp" in plan.drafts,
                vision_bytes=plan.device.ledger.wanted.vision_bytes,
                kept_blocks=plan.device.ledger.wanted.kept_blocks,
            )  # fmt: skip
            device = open_device(store, experts, sizes, say)
            network, new_state = device.model, DeviceState
            if device.model.head is not None:
                sources.append(Predicting(device.model.head.logits))
            if trace is not None:
                device.model.trace(trace)
            pool: PagePool = device.pool
        else:
            network = Model(store.dense(), store.config, experts, trace)
            if (draft := store.draft()) is not None and "mtp" in plan.drafts:
                network.head = head = DraftHead(network, draft, experts)
                sources.append(Predicting(head.logits))
            pool = PagePool(store.config, plan.pages, drafts="mtp" in plan.drafts)
            pool.most_spares = plan.sequences
        # What torch still computes is small, and its waiting threads would spin on the cores of the worker pool.
        torch.set_num_threads(1)
        kv_number_bytes = pool.keys.element_size()
        payloads = PayloadFormat(store.config, info.model_fingerprint, info.arithmetic_fingerprint, kv_number_bytes)
        memory = fresh if plan.device is None else page_locked
        hot = HotStates(payloads, info.arithmetic_fingerprint, plan.hot_bytes, plan.transit_bytes, memory)
        counts = None if plan.device is None else device.model.counts
        metrics = Metrics(info, experts, registry, network.spent, counts, _planned(plan), _card(on_gpu))
        if config.vllm_names:
            registry.register(VllmNames(registry))
        weights = store.vision()
        sight, read = None, None
        if weights is not None:
            kept = PictureCache(int(config.picture_cache_gb * GB))
            read = _reader(weights, plan, network, experts, say)
            sight = Sight(weights, kept, lambda result: metrics.pictures[result,].inc(), read)
        chunk_tokens = config.prefill_chunk_tokens or CHUNK_TOKENS
        if plan.device is not None:  # one by one, a longer piece would hold up those that answer
            chunk_tokens = plan.device.chunk_tokens or ONE_BY_ONE_TOKENS
        speculation = None
        if sources:
            speculation = Speculation(sources, network.settle, metrics, always=config.speculation == "on")
        scheduler = Scheduler(
            network, pool, hot, metrics, plan.sequences, chunk_tokens, new_state, speculation=speculation
        )
        scheduler.in_turns = read is not None  # the card's memory for pictures is that of sweeps
        if isinstance(experts, HostExperts):
            experts.begin_warm()
    except BaseException:
        experts.close()
        raise
    say(f"loaded {info.model}, fingerprint {info.model_fingerprint}, in {time.perf_counter() - begin:.1f} s")
    tokenizer_file = store.folder / "tokenizer.json"
    grammars = Grammars(tokenizer_file, info.vocab_size, config.grammar_max_bytes, config.grammar_timeout_s)
    exchange_dir = Path(config.exchange_dir) if config.exchange_dir else None
    return Parts(info, scheduler, experts, grammars, sight, exchange_dir)


def _on_gpu(config: EngineConfig, say: Callable[[str], None]) -> bool:
    """Raises DeviceError if a GPU is asked for, or was used before this process replaced another, and there is none."""
    if config.device == "cpu":
        return False
    try:
        usable_device()
        native()
    except (DeviceError, BuildError) as error:
        if config.device == "cuda" or RESTARTS in os.environ:
            raise DeviceError(str(error)) from error
        say(f"the CPU computes: {error}")
        return False
    return True


def _reader(
    weights: VisionWeights, plan: Plan, network: "Model | DeviceModel", experts: Experts, say: Callable[[str], None]
) -> Read | None:
    """Reads pictures on the card, if the plan has room for that and the system gives it."""
    if plan.device is None or not plan.device.sees:
        return None
    from services.engine.gpu.model import DeviceModel
    from services.engine.vision.device import DeviceTower

    assert isinstance(experts, HostExperts)  # else the GPU would not run
    assert isinstance(network, DeviceModel)
    try:
        tower = DeviceTower(weights, network.memory.device, resident=plan.vision_resident, memory=network.memory)
    except MemoryPlanError as error:
        say(f"pictures are read by the processor: {error}")
        return None
    experts.closing.append(tower.close)
    return tower.embed


def served_name(store: Store, chosen: str = "") -> str:
    """What was chosen, or the checkpoint's folder name made fit for an HTTP model id; random weights are named so."""
    name = chosen or re.sub(r"[^!-~]+", "-", str(store.source.get("folder", ""))).strip("-") or "model"
    return f"{SYNTHETIC}-{name}" if store.synthetic and SYNTHETIC not in name else name


def _planned(plan: Plan) -> list[tuple[str, str, int]]:
    """Kind of memory, owner, bytes."""
    on_card = plan.device.ledger.lines if plan.device else ()
    return [(kind, owner(n), size) for kind, lines in (("ram", plan.ledger), ("vram", on_card)) for n, size in lines]


def _card(on_gpu: bool) -> Callable[[], CardFigures] | None:
    card = Card.open(f"GPU-{torch.cuda.get_device_properties().uuid}") if on_gpu else None
    return None if card is None else card.read


def _warm_set(config: EngineConfig, store: Store, drafts: bool) -> WarmSet | None:
    if config.warm_dir == OFF:
        return None
    folder = Path(config.warm_dir) if config.warm_dir else store.folder
    layers, name = (store.layers, f"mtp.{NAME}") if drafts else (store.blocks, NAME)  # others cannot read its blocks
    return WarmSet(folder / name, store.fingerprint, sum(map(len, layers)))
