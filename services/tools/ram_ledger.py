"""What a home server takes of a machine's RAM, line by line: the engine, every container, what the desktop keeps.

Owns the lines and the refusal of what does not fit. GB are 10^9 bytes. The expert slots get what the others leave.
"""

from dataclasses import dataclass, field

from services.engine.model_config import ModelConfig

GB = 1_000_000_000
# Stated, not computed. The engine without a card and the api were seen at 0.24 and 0.07 GB after their imports; the
# rest of the engine's line is CUDA's own memory on the host, of the api's its tokenizer and the dialogs under way.
ENGINE_GB = 1.6
API_GB = 0.3
PROMETHEUS_GB = 0.3
GRAFANA_GB = 0.2
SYSTEM_GB = 1.0  # kernel, drivers, what the firmware keeps
HANDOFF_GB = 0.1  # page-locked memory between GPU and host
WSL2_PINNED_SHARE = 0.5  # of the RAM that WSL2 has: more cannot be page-locked there


class PlanError(Exception):
    """What is asked for does not fit this machine, or the command cannot be run so. The message says what to change."""

    code = "plan"


@dataclass(frozen=True)
class RamWanted:
    """What an owner decides. `cache_gb` 0: as many expert slots as fit."""

    cache_gb: float = 0.0
    redis_gb: float = 2.0
    hot_states_gb: float = 1.0
    desktop_gb: float = 4.0
    monitoring: bool = True
    wsl2: bool = False


@dataclass(frozen=True)
class RamLedger:
    lines: tuple[tuple[str, float], ...]
    cache_gb: float
    ram_gb: float
    notes: tuple[str, ...] = field(default=())

    @property
    def total_gb(self) -> float:
        return sum(size for _, size in self.lines)

    def __str__(self) -> str:
        rows = [*self.lines, ("in all", self.total_gb), ("there is", self.ram_gb)]
        return "\n".join([*(f"  {size:8.2f} GB  {name}" for name, size in rows), *(f"  {note}" for note in self.notes)])


def ram_ledger(model: ModelConfig, blocks: int, ram_gb: float, wanted: RamWanted) -> RamLedger:
    """Raises PlanError if it does not fit: overcommitted memory is swapped memory."""
    block_gb = model.block.block_bytes / GB
    others = [
        ("engine: Python, torch, CUDA's part on the host (stated)", ENGINE_GB),
        ("input embeddings", 2 * model.vocab_size * model.hidden_size / GB),
        ("page-locked memory of the hand-off (stated)", HANDOFF_GB),
        ("hot states, THIMBLE_ENGINE_HOT_STATES_GB", wanted.hot_states_gb),
        ("api (stated)", API_GB),
        ("Redis, THIMBLE_REDIS_MEMORY", wanted.redis_gb),
    ]
    if wanted.monitoring:
        others += [("Prometheus (stated)", PROMETHEUS_GB), ("Grafana (stated)", GRAFANA_GB)]
    others += [("kernel and drivers (stated)", SYSTEM_GB), ("left for the desktop", wanted.desktop_gb)]
    taken_gb = sum(size for _, size in others)
    room_gb, notes = ram_gb - taken_gb, []
    if wanted.wsl2 and room_gb > WSL2_PINNED_SHARE * ram_gb:
        room_gb = WSL2_PINNED_SHARE * ram_gb
        notes.append(f"WSL2 page-locks at most about half of its RAM: {room_gb:.1f} GB")
    cache_gb = wanted.cache_gb or min(blocks * block_gb, max(0.0, room_gb))
    slots = min(blocks, int(cache_gb / block_gb))
    if slots < model.experts_per_token or cache_gb > room_gb + block_gb:
        asked = f"{cache_gb:.1f} GB of expert slots" if wanted.cache_gb else "the least number of expert slots"
        raise PlanError(
            f"{asked} and {taken_gb:.1f} GB for everything else do not fit {ram_gb:.1f} GB of RAM, "
            f"{max(0.0, room_gb):.1f} GB are left for the slots: lower --cache, --redis, --hot-states or --desktop, "
            "or leave out --monitoring's services with --no-monitoring"
        )
    experts = f"expert slots, page-locked: {slots} of {blocks} blocks, {100 * slots / blocks:.0f} %"
    return RamLedger(((experts, slots * block_gb), *others), slots * block_gb, ram_gb, tuple(notes))
