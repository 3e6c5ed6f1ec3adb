"""What the engine takes of a card, from the settings and what is free there. Owns the choices that were left automatic;
the arithmetic and the refusal are the ledger's.
"""

from dataclasses import dataclass, replace

from services.engine.config import EngineConfig
from services.engine.experts.store import Store
from services.engine.gpu.ledger import (
    CONTEXT_BYTES,
    MIB,
    MOST_SEQUENCES,
    Kv,
    Ledger,
    Wanted,
    longest_context,
    require,
    stored_layout,
)
from services.engine.pages import PAGE_TOKENS, pages_for

COMFORTABLE_TOKENS = 16_384  # of context; fewer sequences rather than less of it
MOST_TOKENS = 131_072  # of context, if nobody asks for more


@dataclass(frozen=True)
class DevicePlan:
    sequences: int
    context_tokens: int
    pages: int
    kv: Kv
    ledger: Ledger
    budget_bytes: int

    def __str__(self) -> str:
        return (
            f"graphics memory: {self.sequences} sequences of up to {self.context_tokens} tokens, keys and values in "
            f"{self.kv}\n{self.ledger}\n  {self.budget_bytes / MIB:9.1f} MiB  can be had"
        )


def plan_device(config: EngineConfig, store: Store, free_bytes: int) -> DevicePlan:
    """`free_bytes`: what the driver has left, this process's context taken. Raises MemoryPlanError."""
    model, layout = store.config, stored_layout(store.folder)
    budget = free_bytes + CONTEXT_BYTES  # which the ledger counts
    if config.vram_mib:
        budget = min(budget, config.vram_mib * MIB)
    kv: Kv = "fp8" if config.kv_format == "fp8" else "bf16"

    def wanted(sequences: int, context_tokens: int = PAGE_TOKENS) -> Wanted:
        return Wanted(sequences=sequences, context_tokens=context_tokens, kv=kv)

    def longest(sequences: int) -> int:
        return longest_context(model, layout, wanted(sequences), budget)

    comfortable = min(config.context_tokens or COMFORTABLE_TOKENS, model.context_tokens)
    fitting = [count for count in range(1, MOST_SEQUENCES + 1) if longest(count) >= comfortable]
    sequences = config.max_sequences or (fitting[-1] if fitting else 1)
    context = config.context_tokens or min(longest(sequences), MOST_TOKENS) or PAGE_TOKENS
    made = require(model, layout, replace(wanted(sequences), context_tokens=context), budget)
    return DevicePlan(sequences, context, sequences * pages_for(context), kv, made, budget)
