"""`thimble ledger`: what a model takes of a graphics card's memory, and how many sequences and tokens fit.

Needs no card. For a store, or for a shape of which there is none yet. With --vram-mib it answers as the engine would at
start: the ledger, or a refusal that says what to change.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import get_args

from services.engine.errors import StoreError
from services.engine.experts.store import Store
from services.engine.gpu.ledger import (
    BUDGETS,
    GB,
    MIB,
    MOST_SEQUENCES,
    Kv,
    Layout,
    Wanted,
    ledger,
    longest_context,
    require,
    stored_layout,
)
from services.engine.model_config import ModelConfig
from services.engine.vision.device import card_bytes
from services.tools import synthetic_vision
from services.tools.amounts import count, nothing_or_more, whole
from services.tools.synthetic_shapes import RECIPES, SHAPES, dense_layout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("store", nargs="?", type=Path, help="folder that `thimble repack` wrote")
    what.add_argument("--shape", choices=sorted(SHAPES), help="instead of a store: a shape that is built in")
    parser.add_argument(
        "--recipe", choices=RECIPES, default="3.5", help="formats of --shape: as 3.5, or 3-Super after --dense fp8"
    )
    parser.add_argument("--sequences", type=whole, default=1, help="generated at once (default 1)")
    parser.add_argument("--context", type=whole, default=4096, metavar="TOKENS", help="of each (default 4096)")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="format of keys and values")
    parser.add_argument("--pictures", action="store_true", help="with what it takes to read pictures on the card")
    parser.add_argument("--chunk", type=count, default=0, help="tokens of prompts read at once (default 0: one by one)")
    parser.add_argument(
        "--locked",
        type=nothing_or_more,
        default=0.0,
        metavar="GB",
        help="RAM for experts, which the card reads (default 0)",
    )
    parser.add_argument(
        "--vram-mib", type=whole, metavar="N", help="refuse, with status 1, what does not fit into N MiB"
    )


def run(args: argparse.Namespace) -> int:
    vision_bytes = _vision_bytes(args.store) if args.pictures else 0
    wanted = Wanted(
        args.sequences, args.context, args.kv, vision_bytes=vision_bytes, chunk_tokens=args.chunk,
        locked_bytes=int(args.locked * GB),
    )  # fmt: skip
    dense: Layout
    if args.store:
        config, dense, name = Store.open(args.store).config, stored_layout(args.store), str(args.store)
    else:
        config = SHAPES[args.shape]
        dense, name = dense_layout(config, args.recipe), f"shape {args.shape}, formats {args.recipe}"
    if args.vram_mib is not None:
        require(config, dense, wanted, args.vram_mib * MIB)
    budgets = BUDGETS if args.vram_mib is None else {"as given": args.vram_mib}
    print(f"{name}\n{view(config, dense, wanted, budgets)}")
    return 0


def view(config: ModelConfig, dense: Layout, wanted: Wanted, budgets: Mapping[str, int] = BUDGETS) -> str:
    """The ledger of `wanted`, and for each budget (MiB by name) how long a context so many sequences can have."""
    made = ledger(config, dense, wanted)
    lines = [
        f"{wanted.sequences} sequences of {wanted.context_tokens} tokens, keys and values in {wanted.kv}:",
        str(made),
    ]
    for name, budget_mib in budgets.items():
        left = budget_mib - made.total_bytes / MIB
        verdict = f"fits, {left:.0f} MiB left" if left >= 0 else f"does not fit, {-left:.0f} MiB too much"
        lines += [
            "",
            f"{budget_mib} MiB, {name}: {verdict}",
            f"  {'sequences':<12}{'longest context of each, tokens':<34}",
        ]
        lines.append(f"  {'':<12}" + "".join(f"{kv:>12}" for kv in get_args(Kv)))
        for sequences in range(1, MOST_SEQUENCES + 1):
            longest = [
                longest_context(config, dense, replace(wanted, sequences=sequences, kv=kv), budget_mib * MIB)
                for kv in get_args(Kv)
            ]
            lines.append(f"  {sequences:<12}" + "".join(f"{tokens or '-':>12}" for tokens in longest))
    return "\n".join(lines)


def _vision_bytes(store: Path | None) -> int:
    """Of a store's tower, or of the released one."""
    if store is not None:
        weights = Store.open(store).vision()
        if weights is None:
            raise StoreError(f"{store}: this model does not see; leave --pictures out")
        return card_bytes(weights)
    with tempfile.TemporaryDirectory() as folder:
        return card_bytes(synthetic_vision.holes(Path(folder, "vision.safetensors")))
