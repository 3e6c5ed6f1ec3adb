"""From settings to the parts of an engine: opens the store, plans the memory, loads the weights, opens the experts.

Takes minutes for a large model and starts no engine thread, so that whoever calls it may give up waiting.
"""

import importlib.metadata
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from services.engine.config import EngineConfig
from services.engine.experts.copies import copies, folders_of
from services.engine.experts.store import Store
from services.engine.experts.streamer import Experts, open_experts
from services.engine.experts.trace import Header, Recorder
from services.engine.experts.warm import NAME, OFF, WarmSet
from services.engine.fingerprint import arithmetic_fingerprint
from services.engine.grammar import Grammars
from services.engine.metrics import Metrics
from services.engine.model import Model
from services.engine.pages import PagePool
from services.engine.plan import GB, Machine, make_plan
from services.engine.request import Info
from services.engine.scheduler import Scheduler
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import PayloadFormat
from services.engine.vision.cache import PictureCache
from services.engine.vision.sight import Sight

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Parts:
    """What an `Engine` is made of. `experts` must be closed by whoever does not make one."""

    info: Info
    scheduler: Scheduler
    experts: Experts
    grammars: Grammars
    sight: Sight | None


def load(config: EngineConfig, registry: CollectorRegistry, say: Callable[[str], None]) -> Parts:
    """Raises StoreError or MemoryPlanError, if it can before anything large is read. `say` gets lines for the log."""
    begin = time.perf_counter()
    store = Store.open(config.store)
    plan = make_plan(config, store, Machine.here())
    say(f"plan: {plan}")
    store.check_dense()
    info = Info(
        model=served_name(store, config.model_name),
        model_fingerprint=store.fingerprint,
        arithmetic_fingerprint=arithmetic_fingerprint(store.fingerprint, path="cpu"),
        vocab_size=store.config.vocab_size,
        context_tokens=plan.context_tokens,
        max_sequences=config.max_sequences,
        queue_limit=config.queue_limit,
        vision=store.vision_file is not None,
        device="cpu",
        version=importlib.metadata.version("thimble"),
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
        warm=_warm_set(config, store),
        prefetch=config.prefetch,
        trace=trace,
    )
    try:
        model = Model(store.dense(), store.config, experts, trace)
        # What torch still computes is small, and its waiting threads would spin on the cores of the worker pool.
        torch.set_num_threads(1)
        payloads = PayloadFormat(store.config, info.model_fingerprint, info.arithmetic_fingerprint)
        hot = HotStates(payloads, info.arithmetic_fingerprint, plan.hot_bytes, plan.transit_bytes)
        metrics = Metrics(info, experts, registry)
        pool = PagePool(store.config, plan.pages)
        weights = store.vision()
        sight = None
        if weights is not None:
            kept = PictureCache(int(config.picture_cache_gb * GB))
            sight = Sight(weights, kept, lambda result: metrics.pictures[result,].inc())
        scheduler = Scheduler(model, pool, hot, metrics, config.max_sequences, config.prefill_chunk_tokens)
    except BaseException:
        experts.close()
        raise
    say(f"loaded {info.model}, fingerprint {info.model_fingerprint}, in {time.perf_counter() - begin:.1f} s")
    tokenizer_file = store.folder / "tokenizer.json"
    grammars = Grammars(tokenizer_file, info.vocab_size, config.grammar_max_bytes, config.grammar_timeout_s)
    return Parts(info, scheduler, experts, grammars, sight)


def served_name(store: Store, chosen: str = "") -> str:
    """What was chosen, or the checkpoint's folder name made fit for an HTTP model id; random weights are named so."""
    name = chosen or re.sub(r"[^!-~]+", "-", str(store.source.get("folder", ""))).strip("-") or "model"
    return f"{SYNTHETIC}-{name}" if store.synthetic and SYNTHETIC not in name else name


def _warm_set(config: EngineConfig, store: Store) -> WarmSet | None:
    if config.warm_dir == OFF:
        return None
    folder = Path(config.warm_dir) if config.warm_dir else store.folder
    return WarmSet(folder / NAME, store.fingerprint, sum(map(len, store.blocks)))
