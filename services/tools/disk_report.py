"""What `thimble bench decode-disk` found, as lines and as rows. Owns arithmetic and words, no clock."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from services.tools import figures
from services.tools.disk_tokens import HOME, THEIRS, VRAM, Way
from services.tools.drive_reads import DriveReads
from services.tools.measure import Reads

HEADING = (
    f"{'method':<20}{'in RAM':>7}{'GB/s':>6}{'idle':>7}{'all hits':>9}{'a read':>8}{'late us':>8}{'planned':>9}"
    f"{'wrong':>7}{'ms':>8}{'tok/s':>7}{'misses':>8}{'needed':>8}{'waited':>8}{'hidden':>8}{'missing':>8}{'at most':>9}"
    f"{'late':>6}"
)
REPLY_TOKENS = 16  # after a restart


@dataclass(frozen=True)
class Found:
    """Of a token, on average, in milliseconds. `idle_ms`: one that computes no expert; `hits_ms`: one without a miss;
    `planned_ms`: from both and `reads`; `waited_ms`: of it the host had nothing to compute, while the GPU may have."""

    idle_ms: float
    hits_ms: float
    reads: Reads
    planned_ms: float
    token_ms: float
    drive: DriveReads
    waited_ms: float
    late: int

    @property
    def exposed_ms(self) -> float:
        """What the token takes longer, for whatever reason that comes with its reads."""
        return max(0.0, self.token_ms - self.hits_ms)

    @property
    def hidden(self) -> float:
        return self.drive.hidden(self.exposed_ms)

    @property
    def hidden_of_missing(self) -> float:
        return self.drive.hidden_of_missing(self.exposed_ms)

    @property
    def most_hidden(self) -> float:
        """Were the drive never idle, and never waited for but for what it takes longer than the rest of a token."""
        return min(1.0, self.hits_ms / self.drive.needed_ms) if self.drive.needed else 1.0

    @property
    def error(self) -> float:
        return abs(self.planned_ms / self.token_ms - 1)


def drive_name(args: argparse.Namespace, disk: float) -> str:
    return f"{'the drive of the store, ' if args.own else 'emulated drive of '}{disk:.3g} GB/s"


def tell(args: argparse.Namespace, way: Way, share: float, disk: float, found: Found) -> None:
    rate, drive = 1e3 / found.token_ms, found.drive
    print(
        f"{way.name:<20}{share:>7.2f}{disk:>6.1f}{found.idle_ms:>7.2f}{found.hits_ms:>9.2f}"
        f"{found.reads.read_ns / 1e6:>8.3f}{found.reads.late_ns / 1e3:>8.0f}{found.planned_ms:>9.2f}{found.error:>7.1%}"
        f"{found.token_ms:>8.2f}{rate:>7.2f}{drive.missing:>8.1f}{drive.needed:>8.1f}{found.waited_ms:>8.2f}"
        f"{found.hidden:>8.0%}{found.hidden_of_missing:>8.0%}{found.most_hidden:>9.0%}{found.late:>6}",
        flush=True,
    )
    if not args.out:
        return
    note = (
        f"synthetic, {args.trace} routing, {way.name}, {args.threads} threads, {drive_name(args, disk)}, "
        f"{drive.missing:.1f} misses a token, {found.hits_ms:.1f} ms without any, of which {found.idle_ms:.1f} "
        f"{'slowed to an RTX 5060 and ' if way.home else ''}not experts, {drive.needed_ms:.1f} ms of needed reading, "
        f"a read {found.reads.read_ns / 1e6:.3f} ms, late {found.reads.late_ns / 1e3:.0f} us, "
        f"planned {found.planned_ms:.1f} ms, at most {found.most_hidden:.2f} could be hidden, "
        f"{f'{way.placement.hints} guesses read ahead, ' if way.placement.hints else ''}"
        f"{f'{args.vram:g} GB of experts in graphics memory, ' if way is VRAM else ''}"
        f"torch {torch.__version__}, triton {triton.__version__}"
    )
    ram, whose = f"ram{round(100 * share)}", {"published": "published_", HOME.name: "home_"}.get(way.name, "")
    figures.append(args.out, f"decode.{whose}tok_s_{ram}", rate, "tok/s", note)
    figures.append(args.out, f"decode.{whose}plan_error_{ram}", found.error, "", note)
    if way is not THEIRS:
        figures.append(args.out, f"decode.{whose}hidden_{ram}", found.hidden, "", note)
        figures.append(args.out, f"decode.{whose}hidden_of_missing_{ram}", found.hidden_of_missing, "", note)


def tell_errors(args: argparse.Namespace, done: Sequence[tuple[Way, float]]) -> None:
    """Of all cases that are done, by runs before this one too."""
    if not done:
        return
    found = [f"{100 * max(each):.1f} % in {len(each)} of {name}" for name, each in by_way(done)]
    worst = max(error for _, error in done)
    print(f"the plan was wrong by at most {100 * worst:.1f} % in {len(done)} cases: {', '.join(found)}")
    if args.out:
        note = (
            f"synthetic, whole tokens on the GPU, {'own' if args.own else 'emulated'} drive, {args.trace} routing, "
            f"{len(done)} cases: {', '.join(found)}, torch {torch.__version__}, triton {triton.__version__}"
        )
        figures.append(args.out, "plan.error_max", worst, "", note)


def by_way(errors: Sequence[tuple[Way, float]]) -> list[tuple[str, list[float]]]:
    names = dict.fromkeys(way.name for way, _ in errors)
    return [(name, [error for way, error in errors if way.name == name]) for name in names]


def tell_restart(args: argparse.Namespace, way: Way, share: float, disk: float, found: Found, reply_ms: float) -> None:
    ratio = reply_ms / found.token_ms
    print(
        f"{args.restart:g} s after a restart, {way.name}, {share:g} in RAM, {disk:g} GB/s: {REPLY_TOKENS} tokens take "
        f"{ratio:.2f} times as long as before",
        flush=True,
    )
    if args.out:
        note = (
            f"{args.restart:g} s after what was in RAM began to be read again, the dialog goes on for {REPLY_TOKENS} "
            f"tokens, {way.name}, {share:.2f} of the experts in RAM, {drive_name(args, disk)}, synthetic, whole "
            f"tokens on the GPU, full shape, {args.trace} routing, {found.token_ms:.1f} ms before"
        )
        figures.append(args.out, "restart.first_reply_over_steady", ratio, "ratio", note)
