"""What the engine will take of a card's memory, line by line, worked out before anything is loaded, and what fits.

Owns the arithmetic and the refusal. Touches no device and needs no torch.cuda, so that it answers on any machine. Sizes
are bytes, budgets MiB as drivers report them. Embeddings stay on the host: a token needs one row of them.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from kernels.block import GROUP, BlockLayout
from services.engine.errors import MemoryPlanError
from services.engine.experts.store import DENSE
from services.engine.gpu.room import aligned
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS, pages_for
from services.engine.state import state_bytes
from services.engine.tensorfile import DTYPES, read_header
from services.engine.weights import FLOATS, Shape, dense_tensors, draft_tensors

Kv = Literal["bf16", "fp8"]
Layout = Mapping[str, tuple[str, Shape]]  # of a dense file: name -> dtype as safetensors writes it, and shape

MIB = 1 << 20
GB = 1_000_000_000
CARD_MIB = 8151  # what the driver reports of an 8 GB card with nothing else on it
DESKTOP_MIB = 7550  # what a desktop leaves of it
BUDGETS = {"nothing else on the card": CARD_MIB, "with a desktop": DESKTOP_MIB}

MOST_SEQUENCES = 4  # rows of a step, by the kernels
MOST_ITEMS = 32  # experts that the GPU takes of one layer, if it keeps none
# What no tensor accounts for; `thimble bench decode` prints the driver's own figures. An empty context took 523 MiB on
# an H200, with its 132 multiprocessors, 325 with lower limits (limits.py); what a gaming card takes is not measured.
# The engine itself goes by what is free once its context exists: a wrong CONTEXT_BYTES cannot overfill a card.
CONTEXT_BYTES = 300 * MIB
KERNEL_BYTES = 168 * MIB  # loaded kernels and the first graph, on an H200: 181 MiB, of which 15 are LOCKED_SHARE's
GRAPH_BYTES = 8 * MIB  # of each further number of rows, kernels and a graph: 5 MiB there (decode.peak_vram_gb)
HEAD_ROWS = (1, 2)  # ids that the multi-token-prediction block takes at once: a graph each
HIDDEN_STATES = 4  # that it keeps of each sequence's newest tokens
JOINED_ROWS = (2, 4)  # of steps that a short prompt may take several tokens of
VISION_KERNEL_BYTES = 16 * MIB  # of the kernels that read pictures, assumed; `thimble bench vision` prints the driver's
# Of RAM that is page-locked for the card, what page tables take of the card's own: 8 bytes for each 4 KiB. On an H200
# 10 MiB for 5.3 GiB more (prefill.peak_vram_gb of 1db1690). The engine measures it at start (locking.py).
LOCKED_SHARE = 8 / 4096
MARGIN_BYTES = 32 * MIB  # an allocator's rounding (11 to 23 MiB), and what changes between driver versions

SWEEP_KERNEL_BYTES = 8 * MIB  # of the kernels that read prompts; less than can be told apart on an H200
SWEEP_PART = 512  # rows of a prompt's chunk that the widest buffers hold
RING_GROUPS = 3  # of blocks that are copied to the card together: in use, coming, and next


_KV_BYTES: dict[Kv, int] = {"bf16": 2, "fp8": 1}
_F32 = 4
_SPLITS = 16  # partial sums of `down`, kernels/experts/decode_step.py
_RUN_TOKENS = 4 * PAGE_TOKENS  # a run of kernels/attention/gpu.py
_TILE = 1024  # logits a program of kernels/sampling/gpu.py, with 16 steps of 16 digits


@dataclass(frozen=True)
class Wanted:
    """What is asked for. `sequences` have a state on the card, of which MOST_SEQUENCES are in a step; `context_tokens`
    is each one's longest prompt and answer. `joined`: steps of several rows even if there are fewer sequences, for
    short prompts. `drafts`: a step can try a draft behind a sequence's id. `head_bytes`: of the
    multi-token-prediction block's weights, 0: it is not there.

    `pages` of KV for all sequences, 0: enough for each. `staging_blocks`: expert blocks copied to the card at once;
    `kept_blocks`: those that stay there; `chunk_tokens`: of prompts, that are read together, layer by layer;
    `vision_bytes`: what pictures are read with. 0: not used. `locked_bytes` of RAM are page-locked for the card, which
    takes `locked_share` of that of its own memory.
    """

    sequences: int = 1
    context_tokens: int = 4096
    kv: Kv = "bf16"
    pages: int = 0
    staging_blocks: int = 0
    kept_blocks: int = 0
    chunk_tokens: int = 0
    vision_bytes: int = 0
    joined: bool = False
    drafts: bool = False
    head_bytes: int = 0
    locked_bytes: int = 0
    locked_share: float = LOCKED_SHARE

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise MemoryPlanError(f"{self.sequences} sequences: give at least 1")
        if self.context_tokens < 1:
            raise MemoryPlanError(f"a context of {self.context_tokens} tokens: give at least 1")
        if self.kv not in get_args(Kv):
            raise MemoryPlanError(f"KV format {self.kv!r}: give one of {', '.join(get_args(Kv))}")

    @property
    def step_rows(self) -> tuple[int, ...]:
        """Numbers of rows that a step can have, ascending; a graph each. More sequences take turns."""
        apart = range(1, min(self.sequences, MOST_SEQUENCES) + 1)
        return tuple(sorted({*apart, *(JOINED_ROWS if self.joined else ())}))


@dataclass(frozen=True)
class Ledger:
    """`lines`: what takes how many bytes, the largest share first only by the model's nature."""

    wanted: Wanted
    lines: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.lines)

    def __str__(self) -> str:
        rows = [*self.lines, ("in all", self.total_bytes)]
        return "\n".join(f"  {size / MIB:9.1f} MiB  {name}" for name, size in rows)


def ledger(config: ModelConfig, dense: Layout, wanted: Wanted) -> Ledger:
    """Every line, for a dense file of this layout (see `stored_layout`)."""
    sequences, tokens = wanted.sequences, wanted.context_tokens
    head = wanted.head_bytes > 0
    batches = (*wanted.step_rows, *(HEAD_ROWS if head else ()))
    pages = wanted.pages or sequences * pages_for(tokens)
    top_k, layout = config.experts_per_token, config.block
    lines = [
        ("dense weights in the checkpoint's formats, without embeddings", dense_bytes(config, dense)),
        ("CUDA context (assumed, not computed)", CONTEXT_BYTES),
        ("kernels and first graph (measured on an H200)", KERNEL_BYTES),
        (f"states of {sequences} sequences, SSM and convolution in float32", sequences * state_bytes(config)),
        (f"KV, {pages} pages of {PAGE_TOKENS} tokens in {wanted.kv}", pages * page_bytes(config, wanted.kv, head)),
        ("what Mamba layers keep of drafts", kept_bytes(config, sequences) if wanted.drafts else 0),
        ("multi-token-prediction block", wanted.head_bytes + head_bytes(config, sequences) if head else 0),
        ("a block of keys and values that comes back", page_bytes(config, wanted.kv, head)),
        ("page tables", sum(batches) * (3 + pages_for(tokens)) * 4),
        (f"attention workspaces for {len(batches)} batch sizes", attention_bytes(config, sum(batches), tokens)),
        (
            f"expert steps for {len(batches)} batch sizes",
            sum(step_bytes(layout, most_items(rows, top_k, wanted.kept_blocks), rows, top_k) for rows in batches),
        ),
        ("activations", sum(rows * row_bytes(config) for rows in batches)),
        ("logits, masks and sampling", sum(rows * sampling_bytes(config.vocab_size) for rows in batches)),
        (
            f"kernels and graphs of {len(batches) - 1} more batch sizes (measured there)",
            (len(batches) - 1) * GRAPH_BYTES,
        ),
        (f"staging, {wanted.staging_blocks} expert blocks", wanted.staging_blocks * layout.block_bytes),
        (f"experts, {wanted.kept_blocks} blocks that stay there", wanted.kept_blocks * layout.block_bytes),
        (f"reading {wanted.chunk_tokens} tokens of prompts at once", sweep_bytes(config, wanted.chunk_tokens, tokens)),
        (
            "vision ring and activations, beyond what reading prompts has in turns with them",
            max(0, wanted.vision_bytes - sweep_room_bytes(config, wanted.chunk_tokens)),
        ),
        ("kernels of vision (assumed, not computed)", VISION_KERNEL_BYTES if wanted.vision_bytes else 0),
        (
            f"page tables of {wanted.locked_bytes / GB:.1f} GB of RAM that the card reads",
            math.ceil(wanted.locked_bytes * wanted.locked_share),
        ),
        ("margin", MARGIN_BYTES),
    ]
    return Ledger(wanted, tuple((name, size) for name, size in lines if size))


def require(config: ModelConfig, dense: Layout, wanted: Wanted, budget_bytes: int) -> Ledger:
    """The ledger of what is wanted. Raises MemoryPlanError, with the numbers and what to change, if it does not fit."""
    made = ledger(config, dense, wanted)
    if made.total_bytes <= budget_bytes:
        return made
    numbers = ", ".join(f"{name} {size / MIB:.1f}" for name, size in made.lines)
    raise MemoryPlanError(
        f"this does not fit into {budget_bytes / MIB:.0f} MiB of graphics memory, it takes "
        f"{made.total_bytes / MIB:.1f} MiB ({numbers}); {'; or '.join(remedies(config, dense, wanted, budget_bytes))}"
    )


def remedies(config: ModelConfig, dense: Layout, wanted: Wanted, budget_bytes: int) -> list[str]:
    """What would make it fit: each by itself, said only where it is true."""
    found = []
    fp8 = replace(wanted, kv="fp8")
    if wanted.kv != "fp8" and ledger(config, dense, fp8).total_bytes <= budget_bytes:
        found.append("keep keys and values in FP8")
    fewer_kept = replace(wanted, kept_blocks=0)
    if wanted.kept_blocks and ledger(config, dense, fewer_kept).total_bytes <= budget_bytes:
        found.append("keep fewer experts on the card (THIMBLE_ENGINE_VRAM_EXPERTS_GB)")
    shortest = longest_context(config, dense, wanted, budget_bytes)
    if shortest:
        found.append(f"lower the context to {shortest} tokens")
    for sequences in range(wanted.sequences - 1, 0, -1):
        fewer = replace(wanted, sequences=sequences)
        if ledger(config, dense, fewer).total_bytes <= budget_bytes:
            found.append(f"lower the sequences to {sequences}")
            break
    if (
        not found
        and wanted.sequences > 1
        and (held := longest_context(config, dense, replace(fp8, sequences=1), budget_bytes))
    ):
        found.append(f"lower the sequences to 1 and the context to {held} tokens, with keys and values in FP8")
    saved = fp8_saves_bytes(config, dense)
    least = wanted if found else replace(fp8, sequences=1, context_tokens=1)
    if saved and ledger(config, dense, least).total_bytes - saved <= budget_bytes:
        beside = "" if found else ", enough for one sequence with keys and values in FP8"
        found.append(f"thimble repack --dense fp8, which changes the weights, saves {saved / MIB:.0f} MiB{beside}")
    if not found:
        found.append("free memory on the card, or use a larger one: nothing that can be set makes it fit")
    return found


def longest_context(config: ModelConfig, dense: Layout, wanted: Wanted, budget_bytes: int) -> int:
    """Tokens that each of `wanted`'s sequences can have: whole pages, at most the model's own; 0: not even a page."""

    def fits(pages: int) -> bool:
        return (
            ledger(config, dense, replace(wanted, context_tokens=pages * PAGE_TOKENS, pages=0)).total_bytes
            <= budget_bytes
        )

    low, high = 0, pages_for(config.context_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return min(low * PAGE_TOKENS, config.context_tokens)


def stored_layout(store: Path) -> dict[str, tuple[str, Shape]]:
    """Of a store's dense file; only its header is read. Raises CheckpointError."""
    return read_layout(store / DENSE)


def read_layout(path: Path) -> dict[str, tuple[str, Shape]]:
    return {name: (entry.dtype, entry.shape) for name, entry in read_header(path).items()}


def dense_bytes(config: ModelConfig, dense: Layout) -> int:
    """On the card: linears and gates as they are in the file, other tensors as float32, no embeddings, no scalars."""
    return _dense_bytes(config, tuple(dense.items()))


@lru_cache(maxsize=4)
def _dense_bytes(config: ModelConfig, dense: tuple[tuple[str, tuple[str, Shape]], ...]) -> int:
    """A plan asks a thousand times, always of the same file."""
    there = {name: entry for name, entry in dense if name != "embeddings.weight"}
    return _card_bytes(there, dense_tensors(config).plain)


def _card_bytes(stored: Layout, plain: Iterable[str]) -> int:
    """`plain`: those that are no linears. Gates stay as they are stored; scalars are no tensors there."""
    widened = {name for name in plain if not name.endswith(".gate.weight")}
    return sum(
        math.prod(shape) * (_F32 if name in widened else DTYPES[dtype].itemsize)
        for name, (dtype, shape) in stored.items()
        if shape not in ((), (1,))
    )


def fp8_saves_bytes(config: ModelConfig, dense: Layout) -> int:
    """What `repack --dense fp8` makes smaller: every large linear but attention's that is still in a float format."""
    saved = 0
    for name in dense_tensors(config).linears:
        dtype, shape = dense[f"{name}.weight"]
        if dtype in FLOATS and not name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            saved += math.prod(shape) * (DTYPES[dtype].itemsize - 1)
    return saved


def page_bytes(config: ModelConfig, kv: Kv, head: bool = False) -> int:
    """Keys and values of one page in all attention layers, and in that of the multi-token-prediction block."""
    return 2 * (len(config.attention_layers) + head) * PAGE_TOKENS * config.kv_heads * config.head_dim * _KV_BYTES[kv]


def kept_bytes(config: ModelConfig, sequences: int) -> int:
    """Of memory.py's `kept`, and of the two small tensors of model.py that settling a draft reads."""
    one = 2 * config.conv_channels + config.mamba_heads
    return _F32 * len(config.mamba_layers) * (sequences * one + 2 * config.mamba_heads)


def head_weight_bytes(config: ModelConfig, draft: Layout) -> int:
    """Of the multi-token-prediction block, whose file is of this layout, on the card: as `dense_bytes`."""
    return _card_bytes(draft, draft_tensors(config).plain)


def head_bytes(config: ModelConfig, sequences: int) -> int:
    """Of head.py's states and head_token.py's own buffers."""
    return _F32 * config.hidden_size * (HIDDEN_STATES * sequences + 5 * sum(HEAD_ROWS))


def attention_bytes(config: ModelConfig, sequences: int, tokens: int) -> int:
    """Of kernels/attention/gpu.py's Workspace."""
    return sequences * config.attention_heads * -(-tokens // _RUN_TOKENS) * (config.head_dim + 2) * _F32


def most_items(rows: int, top_k: int, kept_blocks: int) -> int:
    """How many experts of one layer the GPU takes at most: all of them where it keeps blocks, since one of its own that
    it left to others they would look for in RAM, where nobody has used it for long."""
    return rows * top_k if kept_blocks else min(rows * top_k, MOST_ITEMS)


def step_bytes(layout: BlockLayout, items: int, rows: int, top_k: int) -> int:
    """Of kernels/experts/decode_step.py's ExpertStep, its part of the plan included."""
    latent, width, lookups = layout.latent, layout.width, rows * top_k
    plan = 8 * (1 + 3 * items + -(-lookups // 2))
    row = (
        2 * _F32 * latent + 2 * latent + _F32 + top_k * _F32 + top_k * _F32 * latent
    )  # x, out, xq, factor, weights, host_y
    item = _F32 * (width // GROUP + 1)
    item_row = 6 * width + _F32 + _F32 * latent + 8 * _SPLITS * latent  # h and hq, factor, y, partial
    return plan + rows * row + items * (item + rows * item_row)


def row_bytes(config: ModelConfig) -> int:
    """Of one sequence in token.py's Token, all 4 bytes an element, without logits, page table and workspace."""
    layers, top_k = len(config.moe_layers), config.experts_per_token
    mamba = config.in_proj_rows + 2 * config.mamba_inner + config.mamba_groups
    attention = 2 * config.attention_heads * config.head_dim
    moe = 2 * config.experts + (layers + 1) * config.latent_size + 4 * layers * top_k + config.shared_width
    return _F32 * (config.hidden_size + mamba + attention + moe)


def ring_group(chunk_tokens: int) -> int:
    """How many blocks are copied to the card together. Fewer for short chunks, which are for cards with little room."""
    return next(blocks for blocks, least in ((8, 2048), (4, 1024), (2, 512), (1, 0)) if chunk_tokens >= least)


def sweep_part(chunk_tokens: int) -> int:
    """Rows of a chunk that go through a layer's wide buffers together: these are then no larger than the experts'."""
    return min(SWEEP_PART, -(-chunk_tokens // 2))


def sweep_bytes(config: ModelConfig, chunk_tokens: int, context_tokens: int) -> int:
    """Of sweep.py's Sweep and expert_sweep.py's ExpertSweep, their kernels included; none for chunks of no token."""
    if not chunk_tokens:
        return 0
    top_k = config.experts_per_token
    row = 2 * config.latent_size + top_k * (_F32 + _F32 + 3 * 8 + _F32)  # and what sorting the ids takes for a while
    fixed = MOST_SEQUENCES * pages_for(context_tokens) * _F32
    fixed += len(config.moe_layers) * config.experts * 2 * _F32 + len(config.layers) * config.hidden_size * _F32
    fixed += sweep_part(chunk_tokens) * 2 * _F32 * config.mamba_heads
    return chunk_tokens * row + fixed + sweep_room_bytes(config, chunk_tokens) + SWEEP_KERNEL_BYTES


def sweep_room_bytes(config: ModelConfig, chunk_tokens: int) -> int:
    """What means something to a sweep only while it runs, so that others may use it between two."""
    if not chunk_tokens:
        return 0
    ring = RING_GROUPS * ring_group(chunk_tokens) * config.block.block_bytes
    rows = aligned(_F32 * chunk_tokens * config.hidden_size)
    return aligned(ring) + rows + sweep_scratch_bytes(config, chunk_tokens)


def sweep_scratch_bytes(config: ModelConfig, chunk_tokens: int) -> int:
    """Of the experts' products, the wide rows of other layers, or logits: nobody needs two of them at a time."""
    products = products_bytes(config.block, config.experts_per_token, chunk_tokens)
    logits = MOST_SEQUENCES * config.vocab_size * _F32
    return aligned(max(products, sweep_part(chunk_tokens) * wide_bytes(config), logits))


def products_bytes(layout: BlockLayout, top_k: int, chunk_tokens: int) -> int:
    """Of what a chunk's experts make: h, which their sum replaces, and y."""
    made = max(2 * layout.width, _F32 * layout.latent)
    return aligned(chunk_tokens * made) + aligned(2 * chunk_tokens * top_k * layout.latent)


def wide_bytes(config: ModelConfig) -> int:
    """Of a row's values inside a layer, of the kind that has most: sweep.py's `_room`s."""
    attended, kv = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    hidden = config.hidden_size
    return max(
        _F32 * config.in_proj_rows + 2 * max(hidden, config.mamba_inner),
        _F32 * (attended + 2 * kv) + 2 * max(hidden, attended),
        (2 + _F32) * hidden + _F32 * config.experts + 2 * config.shared_width,
    )


def sampling_bytes(vocabulary: int) -> int:
    """Of one row: logits, a mask, counts for penalties, and kernels/sampling/gpu.py's Sampler."""
    tiles = -(-vocabulary // _TILE)
    sampler = 8 * (2 + 2 + tiles + 17 * 3 + 16 * tiles * 16) + 4 * tiles + 4
    return _F32 * vocabulary + 4 * -(-vocabulary // 32) + 4 * vocabulary + sampler
