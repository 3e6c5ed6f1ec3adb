"""What the engine takes of a card, from the settings and what is free there. Owns the choices that were left automatic;
the arithmetic and the refusal are the ledger's.
"""

from dataclasses import dataclass, replace

from services.engine.config import EngineConfig
from services.engine.experts.store import DRAFT, Store
from services.engine.gpu.ledger import (
    CONTEXT_BYTES,
    GB,
    LOCKED_SHARE,
    MIB,
    MOST_SEQUENCES,
    VISION_KERNEL_BYTES,
    Kv,
    Layout,
    Ledger,
    Wanted,
    fp8_saves_bytes,
    head_weight_bytes,
    ledger,
    longest_context,
    read_layout,
    require,
    stored_layout,
)
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS, pages_for

COMFORTABLE_TOKENS = 16_384  # of context; fewer sequences rather than less of it
# What to be content with, one after the other: tokens of context, and of a chunk, at least. With short chunks, and even
# more without any, a longer context would take minutes to read.
CONTENT_WITH = ((COMFORTABLE_TOKENS, 512), (8192, 512), (4096, 1), (2048, 1))
MOST_TOKENS = 131_072  # of context, if nobody asks for more
CHUNKS = (2048, 1024, 512, 256, 0)  # tokens of prompts read at once; 0: one by one, as answers are
COMFORTABLE_CHUNK = 1024


@dataclass(frozen=True)
class DevicePlan:
    sequences: int
    context_tokens: int
    pages: int
    kv: Kv
    chunk_tokens: int
    ledger: Ledger
    budget_bytes: int
    hints: tuple[str, ...] = ()  # what would make more room
    blind_bytes: int = 0  # what reading pictures there would take, if that did not fit: the processor reads them

    @property
    def sees(self) -> bool:
        """Pictures are read on the card."""
        return self.ledger.wanted.vision_bytes > 0

    def __str__(self) -> str:
        pictures = (
            f"\npictures are read by the processor, which takes minutes for a large one: on the card they would take "
            f"{self.blind_bytes / MIB:.0f} MiB, which leaves no room for the context"
        )
        prompts = f"{self.chunk_tokens} tokens of prompts at once"
        if not self.chunk_tokens:
            prompts = "prompts token by token, many times slower than in chunks, for which there is no room"
        return (
            f"graphics memory: {self.sequences} sequences of up to {self.context_tokens} tokens, keys and values in "
            f"{self.kv}, {prompts}\n{self.ledger}\n"
            f"  {self.budget_bytes / MIB:9.1f} MiB  can be had{pictures if self.blind_bytes else ''}"
            + "".join(f"\nfor longer contexts or quicker prompts: {hint}" for hint in self.hints)
        )


def plan_device(
    config: EngineConfig, store: Store, free_bytes: int, locked_bytes: int = 0, locked_share: float = LOCKED_SHARE
) -> DevicePlan:
    """`free_bytes`: what the driver has left, this process's context taken; `locked_bytes` of RAM will be page-locked
    for the card, which takes `locked_share` of that. Raises MemoryPlanError.

    Pictures are read on the card if a comfortable context, or the one that is asked for, fits beside that.
    """
    model, layout = store.config, stored_layout(store.folder)
    budget = free_bytes + CONTEXT_BYTES  # which the ledger counts
    if config.vram_mib:
        budget = min(budget, config.vram_mib * MIB)
    kv: Kv = "fp8" if config.kv_format == "fp8" else "bf16"
    kept_blocks = min(int(config.vram_experts_gb * GB / model.block.block_bytes), len(model.moe_layers) * model.experts)

    comfortable = min(config.context_tokens or COMFORTABLE_TOKENS, model.context_tokens)
    chunks = (config.prefill_chunk_tokens,) if config.prefill_chunk_tokens else CHUNKS
    counts = (config.max_sequences,) if config.max_sequences else tuple(range(MOST_SEQUENCES, 0, -1))

    def choose(vision_bytes: int) -> Wanted:
        """A comfortable context matters most. Then that long prompts do not take for ever, since their time goes with
        the number of chunks; then a further user; then the largest chunk; then that short prompts are quick, and that
        one user's drafts can be tried, both of which take steps of several rows. Where that is too much, a modest
        context that is read in chunks is worth more than a longer one that is not."""

        def longest(wanted: Wanted) -> int:
            return longest_context(model, layout, wanted, budget)

        tried = [
            Wanted(
                sequences=count,
                kv=kv,
                chunk_tokens=chunk,
                vision_bytes=vision_bytes,
                joined=joined,
                drafts=config.speculation != "off" and (joined or count > 1),
            )
            for count in counts
            for chunk in chunks
            for joined in (True, False)
            if count == counts[-1] or chunk >= min(COMFORTABLE_CHUNK, chunks[0])
        ]
        tried = [
            replace(wanted, kept_blocks=kept_blocks, locked_bytes=locked_bytes, locked_share=locked_share)
            for wanted in tried
        ]
        chosen = tried[-1]
        for least, least_chunk in ((comfortable, 1),) if config.context_tokens else CONTENT_WITH:
            enough = (
                each
                for each in tried
                if each.chunk_tokens >= max(1, min(least_chunk, chunks[0])) and longest(each) >= min(least, comfortable)
            )
            if (found := next(enough, None)) is not None:
                chosen = found
                break
        context = config.context_tokens or min(longest(chosen), MOST_TOKENS) or PAGE_TOKENS
        return replace(chosen, context_tokens=context)

    def with_head(wanted: Wanted) -> Wanted:
        """And the multi-token-prediction block, where a comfortable context still fits."""
        if store.draft_file is None or not wanted.drafts:
            return wanted
        more = replace(wanted, head_bytes=head_weight_bytes(model, read_layout(store.folder / DRAFT)))
        longest = longest_context(model, layout, more, budget)
        if longest < comfortable:
            return wanted
        return replace(more, context_tokens=config.context_tokens or min(longest, MOST_TOKENS))

    from services.engine.vision.device import card_bytes, readable  # Triton's kernels: only who has a card needs them

    weights = store.vision()
    vision_bytes = card_bytes(weights) if weights and readable(weights.config) else 0
    chosen = choose(vision_bytes)
    fits = chosen.context_tokens >= comfortable and ledger(model, layout, chosen).total_bytes <= budget
    if vision_bytes and not fits:
        chosen = choose(0)
    chosen = with_head(chosen)
    made = require(model, layout, chosen, budget)
    pages = chosen.sequences * pages_for(chosen.context_tokens)
    hints = more_room(model, layout, made, budget, comfortable) if not config.context_tokens else ()
    blind_bytes = vision_bytes + VISION_KERNEL_BYTES if vision_bytes and not chosen.vision_bytes else 0
    return DevicePlan(
        chosen.sequences, chosen.context_tokens, pages, kv, chosen.chunk_tokens, made, budget, hints, blind_bytes
    )


def more_room(model: ModelConfig, dense: Layout, made: Ledger, budget: int, comfortable: int) -> tuple[str, ...]:
    """What can be changed where the context is not comfortable, or chunks are short."""
    wanted = made.wanted
    if wanted.context_tokens >= comfortable and wanted.chunk_tokens >= COMFORTABLE_CHUNK:
        return ()
    hints = []
    if wanted.kv != "fp8":
        tokens = longest_context(model, dense, replace(wanted, kv="fp8"), budget)
        hints.append(f"THIMBLE_ENGINE_KV_FORMAT=fp8 holds {tokens} tokens, less exactly")
    if saved := fp8_saves_bytes(model, dense):
        hints.append(f"thimble repack --dense fp8, which changes the weights, makes room of {saved / MIB:.0f} MiB")
    return tuple(hints)
