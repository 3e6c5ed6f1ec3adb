"""What this engine will use of this machine, worked out before anything is loaded: threads, slots, pages, bytes.

Resolves every setting that was left automatic, prints the ledger, and refuses what does not fit. Owns no memory.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path

from services.engine.config import EngineConfig, variable
from services.engine.errors import MemoryPlanError
from services.engine.experts.store import Store
from services.engine.gpu import ledger
from services.engine.gpu.plan import DevicePlan, plan_device
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS, page_bytes, pages_for
from services.engine.state import state_bytes
from services.engine.vision.pieces import Pieces
from services.engine.vision.ring import ring_bytes
from services.engine.vision.sight import reading_bytes
from services.engine.weights import Expected, dense_tensors, draft_tensors

GB = 1_000_000_000
MIB = 1 << 20
SEQUENCES = 4  # on a CPU
VISION_RING = "ring of vision weights, page-locked"  # a line of the ledger
MEMINFO = Path("/proc/meminfo")
OSRELEASE = Path("/proc/sys/kernel/osrelease")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


@dataclass(frozen=True)
class Machine:
    """`available_bytes` of RAM that can be had without swapping; `cores` that this process may use; `pinned_bytes` that
    can be page-locked for a GPU, where the system is known to limit it."""

    available_bytes: int
    cores: int
    pinned_bytes: int | None = None

    @staticmethod
    def here() -> "Machine":
        available_bytes = _meminfo("MemAvailable")
        for limit_name, used_name in CGROUP_FILES:
            limit_bytes, used_bytes = _cgroup_number(limit_name), _cgroup_number(used_name)
            if limit_bytes is not None and used_bytes is not None:  # a container's own limit
                available_bytes = min(available_bytes, max(0, limit_bytes - used_bytes + _cgroup_cache()))
        wsl2 = "microsoft" in OSRELEASE.read_text().lower()
        pinned_bytes = _meminfo("MemTotal") // 2 if wsl2 else None  # more is refused there, whatever is free
        return Machine(available_bytes, len(os.sched_getaffinity(0)), pinned_bytes)


@dataclass(frozen=True)
class Plan:
    """The sizes in force. `slots` of the model's `blocks` have a place in RAM at a time."""

    workers: int
    readers: int
    sequences: int
    context_tokens: int
    slots: int
    blocks: int
    pages: int
    hot_bytes: int
    transit_bytes: int
    ledger: tuple[tuple[str, int], ...]  # what takes how many bytes of RAM
    available_bytes: int
    device: DevicePlan | None  # what runs on a card, if it does
    vision_resident: bool = False  # the tower's weights stay in RAM, page-locked for the card
    drafts: tuple[str, ...] = ()  # kinds that may be tried, as in drafts.py
    speculation: str = ""  # and what is to be said of them

    @property
    def rows(self) -> list[tuple[str, int]]:
        """The ledger, its sum, and what there is."""
        return [*self.ledger, ("in all", sum(size for _, size in self.ledger)), ("available", self.available_bytes)]

    def __str__(self) -> str:
        readers = f"{self.readers} readers" if self.readers else "as many readers as measure best"
        head = f"{self.workers} workers, {readers}, context of {self.context_tokens} tokens; RAM:"
        lines = [head, *(f"  {size / GB:9.3f} GB  {name}" for name, size in self.rows)]
        lines += [str(self.device)] if self.device else []
        return "\n".join([*lines, f"speculation: {self.speculation}"])


def make_plan(
    config: EngineConfig,
    store: Store,
    machine: Machine,
    card_free_bytes: int | None = None,
    locked_share: float = ledger.LOCKED_SHARE,
) -> Plan:
    """`card_free_bytes`: of the GPU that computes, if one does; `locked_share`: what it takes of its own memory for RAM
    that is page-locked for it. Raises MemoryPlanError, which says what to change, if the settings do not fit the model
    or the machine."""
    model = store.config
    device = None
    if card_free_bytes is not None:
        device = plan_device(config, store, card_free_bytes, _most_locked_bytes(config, store, machine), locked_share)
    sequences = device.sequences if device else config.max_sequences or SEQUENCES
    drafts, speculation = _drafts(config, store, device)
    heads = "mtp" in drafts
    context_tokens, pages = (
        (device.context_tokens, device.pages) if device else _context_and_pages(config, model, sequences, heads)
    )
    hot_bytes = int(config.hot_states_gb * GB)
    kv_page_bytes = ledger.page_bytes(model, device.kv) if device else page_bytes(model)
    # Enough that an answer's snapshots reach their store whatever is kept: two states and half of all keys and values.
    transit_bytes = max(hot_bytes, 2 * (state_bytes(model) + MIB) + pages * kv_page_bytes // 2)
    on_the_cpu = (
        ("dense weights, float32", dense_bytes(dense_tensors(model))),
        (f"KV, {pages} pages of {PAGE_TOKENS} tokens", pages * page_bytes(model, heads)),
        *([("multi-token-prediction block, float32", dense_bytes(draft_tensors(model)))] if heads else []),
        (f"states of {sequences} sequences", sequences * state_bytes(model)),
    )
    rest = (
        *(() if device else on_the_cpu),
        ("hot states and snapshots on their way, at most", transit_bytes),
        *_pictures(config, store, device is not None and device.sees),
    )
    room_bytes = machine.available_bytes - sum(size for _, size in rest)
    pinned_bytes = machine.pinned_bytes
    if pinned_bytes is not None:
        pinned_bytes -= sum(size for name, size in rest if name == VISION_RING)
    blocks = sum(map(len, store.layers if heads else store.blocks))
    slots = _slots(config, store, blocks, room_bytes, pinned_bytes)
    experts = (f"experts, {slots} of {blocks} blocks", slots * store.layout.block_bytes)
    resident_bytes = _resident_bytes(store, device, machine, experts[1] if slots == blocks else None, room_bytes)
    if resident_bytes:
        rest = (*rest, ("the rest of the vision weights, which stay", resident_bytes))
    plan = Plan(
        workers=config.workers or max(1, machine.cores - 2),
        readers=config.readers,
        sequences=sequences,
        context_tokens=context_tokens,
        slots=slots,
        blocks=blocks,
        pages=pages,
        hot_bytes=hot_bytes,
        transit_bytes=transit_bytes,
        ledger=(experts, *rest),
        available_bytes=machine.available_bytes,
        device=device,
        vision_resident=resident_bytes > 0,
        drafts=drafts,
        speculation=speculation,
    )
    if experts[1] > room_bytes:
        names = ", ".join(variable(name) for name in ("expert_cache_gb", "kv_gb", "hot_states_gb", "max_sequences"))
        sizes = ", ".join(f"{name} {size / GB:.3f} GB" for name, size in plan.rows)
        raise MemoryPlanError(f"the engine does not fit into this machine's memory: {sizes}; lower {names}")
    return plan


def _pictures(config: EngineConfig, store: Store, on_device: bool) -> tuple[tuple[str, int], ...]:
    weights = store.vision()
    if weights is None:
        return ()
    kept = ("embeddings of pictures, at most", int(config.picture_cache_gb * GB))
    reading = ("one picture being read, at most", reading_bytes(weights.config, on_device))
    ring = (VISION_RING, ring_bytes(Pieces.of(weights)) if on_device else 0)
    return (kept, reading, ring) if on_device else (kept, reading)


def _resident_bytes(
    store: Store, device: DevicePlan | None, machine: Machine, experts_bytes: int | None, room_bytes: int
) -> int:
    """What keeping all vision weights in RAM takes beyond their ring, where nothing else could use that: every expert
    has its slot already, and twice as much is left. 0: they are read from the file for each picture."""
    weights = store.vision() if device is not None and device.sees else None
    if weights is None or experts_bytes is None or machine.pinned_bytes is not None:
        return 0
    pieces = Pieces.of(weights)
    more_bytes = max(0, pieces.size_bytes - ring_bytes(pieces))
    return more_bytes if experts_bytes + 2 * more_bytes <= room_bytes else 0


def _drafts(config: EngineConfig, store: Store, device: DevicePlan | None) -> tuple[tuple[str, ...], str]:
    """Kinds of drafts, and what to say of them."""
    if config.speculation == "off":
        return (), "off"
    if device is not None and not device.ledger.wanted.drafts:
        return (), "off: the card has no room for steps of two tokens"
    if config.trace:
        return (), "off: a trace is of routing without drafts"
    kinds, head = ["ngram"], "the model's own"
    if store.draft_file is None:
        head = "the store has no multi-token-prediction block"
    elif device is not None and not device.ledger.wanted.head_bytes:
        head = "no room for the model's own beside a comfortable context on the card"
    else:
        kinds.append("mtp")
    when = "always" if config.speculation == "on" else "as long as they pay"
    return tuple(kinds), f"{config.speculation}: drafts are tried {when}: copies of what was read or said; {head}"


def dense_bytes(expected: Expected) -> int:
    """Of tensors that are no routed experts, as float32: what the CPU engine keeps."""
    return 4 * sum(math.prod(shape) for part in (expected.linears, expected.plain) for shape in part.values())


def _context_and_pages(config: EngineConfig, model: ModelConfig, sequences: int, heads: bool) -> tuple[int, int]:
    """Prompt and answer of one request must fit the pages; more pages than all sequences can use are not taken."""
    one_bytes = page_bytes(model, heads)
    pages = int(config.kv_gb * GB / max(1, one_bytes))
    held_tokens = pages * PAGE_TOKENS
    if config.context_tokens > held_tokens or not pages:
        needed_gb = pages_for(config.context_tokens or 1) * one_bytes / GB
        raise MemoryPlanError(
            f"{variable('kv_gb')}={config.kv_gb} holds {held_tokens} tokens, a context of {config.context_tokens or 1} "
            f"needs {needed_gb:.3f}: raise it or lower {variable('context_tokens')}"
        )
    context_tokens = config.context_tokens or min(model.context_tokens, held_tokens)
    return context_tokens, min(pages, sequences * pages_for(context_tokens))


def _slots(config: EngineConfig, store: Store, blocks: int, room_bytes: int, pinned_bytes: int | None) -> int:
    """At most one for every block, at least what one token needs of one layer."""
    block_bytes, least = store.layout.block_bytes, store.config.experts_per_token
    if not config.expert_slots and not config.expert_cache_gb:
        bytes_ = max(room_bytes // 2, room_bytes - int(config.memory_margin_gb * GB))
        return min(blocks, max(least, min(bytes_, bytes_ if pinned_bytes is None else pinned_bytes) // block_bytes))
    slots = config.expert_slots or int(config.expert_cache_gb * GB / block_bytes)
    if slots < least:
        chosen = "expert_slots" if config.expert_slots else "expert_cache_gb"
        raise MemoryPlanError(
            f"{variable(chosen)}={getattr(config, chosen)} holds {slots} expert blocks, a token needs {least} at once: "
            f"set it to at least {least if config.expert_slots else f'{least * block_bytes / GB:.6f}'}"
        )
    return min(slots, blocks)


def _most_locked_bytes(config: EngineConfig, store: Store, machine: Machine) -> int:
    """Of RAM that is page-locked for a card: all slots that there may be, and hot states."""
    hot_bytes = int(config.hot_states_gb * GB)
    room_bytes = machine.available_bytes - hot_bytes
    slots = _slots(config, store, sum(map(len, store.layers)), room_bytes, machine.pinned_bytes)
    return slots * store.layout.block_bytes + hot_bytes


def _cgroup_number(name: str) -> int | None:
    """None if there is no such limit ("max") or no control group."""
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cgroup_cache() -> int:
    """Bytes of files that a control group's use counts and that give way."""
    for name in ("memory.stat", "memory/memory.stat"):
        try:
            lines = (CGROUP / name).read_text().splitlines()
        except OSError:
            continue
        return next((int(line.split()[1]) for line in lines if line.split()[0] == "inactive_file"), 0)
    return 0


def _meminfo(name: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in MEMINFO.read_text().splitlines() if line.startswith(f"{name}:"))
