"""`thimble cards`: what `thimble plan` says of the cards it knows, one line each: the table in README.md.

Owns the table: whose lines there are, and how they are written, as rows of the results and from them again. The figures
are the planner's; none is measured.
"""

import argparse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.engine.gpu import ledger as vram
from services.tools import figures
from services.tools.forecast import first_token, ours
from services.tools.hardware import CARDS, Box, Card, box
from services.tools.plan import GIB_IN_GB, shape_of, with_chunk, with_experts
from services.tools.predict import GB
from services.tools.ram_ledger import RamWanted, ram_ledger
from services.tools.synthetic_shapes import SUPER, dense_layout

RAM_GIB = (32, 64)
DRAM_GB_S, DISK_GB_S = 60.0, 7.0  # two channels of DDR5; a PCIe 4.0 drive
PROMPTS = (512, 2048)
CONTEXT_TOKENS = 16384  # of one sequence
TOK_S, TTFT_S = "plan.card_tok_s", "plan.card_ttft_s"  # the rows' names


@dataclass(frozen=True)
class Line:
    """Of one card and size of RAM. `ttft_s`: to the first token, for prompts of PROMPTS."""

    card: str
    ram_gib: int
    tok_s: float
    ttft_s: tuple[float, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--card", choices=sorted(CARDS), action="append", help="only this one; several times: these")
    parser.add_argument("--record", type=Path, metavar="CSV", help=f"append {TOK_S} and {TTFT_S} of each line")


def run(args: argparse.Namespace) -> int:
    lines = [line(CARDS[name], ram_gib) for name in args.card or CARDS for ram_gib in RAM_GIB]
    for text in table(lines):
        print(text)
    print(f"\nPredicted, not measured: {given()}.")
    if args.record:
        record(args.record, lines)
    return 0


def given() -> str:
    return (
        f"RAM read at {DRAM_GB_S:g} GB/s, a drive that reads {DISK_GB_S:g} GB/s, "
        f"one sequence of {CONTEXT_TOKENS} tokens, the card with nothing else on it"
    )


def line(card: Card, ram_gib: int) -> Line:
    """Raises what plan raises if the model does not fit."""
    dense = dense_layout(SUPER)
    shape = shape_of(SUPER, vram.dense_bytes(SUPER, dense))
    machine: Box = box(card, ram_gib * GIB_IN_GB, DRAM_GB_S, DISK_GB_S)
    ram = ram_ledger(SUPER, shape.blocks, machine.ram_gb, RamWanted())
    budget_bytes = card.vram_mib * vram.MIB
    asked = with_chunk(SUPER, dense, vram.Wanted(1, CONTEXT_TOKENS, locked_bytes=int(ram.cache_gb * GB)), budget_bytes)
    asked = with_experts(SUPER, dense, asked, shape.blocks, budget_bytes)
    vram.require(SUPER, dense, asked, budget_bytes)
    token = ours(shape, machine, ram.cache_gb, asked.kept_blocks * shape.block_bytes / GB).token
    share = ram.cache_gb * GB / (shape.blocks * shape.block_bytes)
    chunk = asked.chunk_tokens
    ttft_s = (
        first_token(shape, machine, tokens, share, chunk).total_s if chunk else tokens * token.total_ms / 1e3
        for tokens in PROMPTS
    )
    return Line(card.name, ram_gib, token.tok_s, tuple(ttft_s))


def table(lines: Iterable[Line]) -> Iterator[str]:
    """Markdown, the cards in the order in which they come."""
    prompts = " / ".join(map(str, PROMPTS))
    heads = [f"{gib} GB of RAM: tok/s | first token of {prompts}" for gib in RAM_GIB]
    yield f"| card | {' | '.join(heads)} |"
    yield "|" + "---|" * (1 + 2 * len(RAM_GIB))
    by_card: dict[str, dict[int, Line]] = {}
    for one in lines:
        by_card.setdefault(one.card, {})[one.ram_gib] = one
    for card, sizes in by_card.items():
        cells = [f"{sizes[gib].tok_s:.0f} | {_seconds(sizes[gib].ttft_s)}" for gib in RAM_GIB]
        yield f"| {card} | {' | '.join(cells)} |"


def _seconds(found: Iterable[float]) -> str:
    return " / ".join(f"{seconds:.1f}" for seconds in found) + " s"


def record(path: Path, lines: Iterable[Line]) -> None:
    for one in lines:
        note = f"predicted, not measured: {given()}"
        figures.append(path, TOK_S, one.tok_s, "tok/s", f"{_of(one.card, one.ram_gib)}; {note}")
        for tokens, seconds in zip(PROMPTS, one.ttft_s, strict=True):
            figures.append(path, TTFT_S, seconds, "s", f"{_of(one.card, one.ram_gib)}; {tokens} tokens; {note}")


def _of(card: str, ram_gib: int) -> str:
    return f"{card}, {ram_gib} GB of RAM"


def recorded(rows: Iterable[Mapping[str, str]]) -> list[Line]:
    """The newest lines among rows of the results, in the order in which they were recorded."""
    tok_s: dict[tuple[str, int], float] = {}
    ttft_s: dict[tuple[str, int], dict[int, float]] = {}
    for row in rows:
        if row["name"] not in (TOK_S, TTFT_S):
            continue
        of, *rest = row["note"].split("; ")
        card, ram = of.removesuffix(" GB of RAM").rsplit(", ", 1)
        if row["name"] == TOK_S:
            tok_s[card, int(ram)] = float(row["value"])
        else:
            ttft_s.setdefault((card, int(ram)), {})[int(rest[0].removesuffix(" tokens"))] = float(row["value"])
    return [Line(*of, speed, tuple(ttft_s[of][tokens] for tokens in PROMPTS)) for of, speed in tok_s.items()]
