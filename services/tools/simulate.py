"""`thimble simulate TRACE`: a trace replayed through the shipped cache with other sizes of RAM, in one pass.

Prints hit rate, reads, and what a token would take on a machine of the given rates (predict.py has the formula,
replay.cpp the clock and the disk's queue). `--compare` sets every policy beside the shipped one and the optimum,
`--calibration` the generator beside the published figures, `--tried` what others found not to pay. Owns the command
and its table.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kernels.experts.host.replay import POLICIES, PREFETCH, SHIPPED, Clock, Counts, replay
from services.tools import figures
from services.tools.amounts import amount, amounts, nothing_or_more, whole
from services.tools.complaints import UsageError
from services.tools.predict import GB, Method, Rates, Shape, layer_of
from services.tools.traces import calibration, compare, tried
from services.tools.traces.generators import GENERATORS
from services.tools.traces.sources import Source, source

# A home PC: RTX 5060 8 GB on PCIe 5.0 x8, two channels of DDR5, a fast PCIe 5.0 drive.
HOME = Rates(vram_gb_s=448, pcie_gb_s=28, cpu_gb_s=50, dram_gb_s=65, disk_gb_s=12)


def clock_of(shape: Shape, rates: Rates, method: Method, prefetch: str) -> Clock:
    layer = layer_of(shape, rates, method)
    return Clock(layer.gap_ns, layer.expert_ns, layer.read_ns, layer.overlapped, prefetch, late_ns=layer.late_ns)


def slots_of(shape: Shape, ram_gb: float) -> int:
    """At least what one token needs of a layer, at most all."""
    return max(shape.experts_per_token, min(shape.blocks, int(ram_gb * GB / shape.block_bytes)))


def sizes_of(args: argparse.Namespace, shape: Shape) -> list[float]:
    """GB of RAM for experts: as given, as shares of all experts, or a range of shares."""
    if args.ram:
        return list(args.ram)
    shares = args.share or [0.12, 0.16, 0.24, 0.33, 0.5]
    return [share * shape.blocks * shape.block_bytes / GB for share in shares]


def table(found: Source, sizes: Sequence[float], counts: Sequence[Counts], clock: Clock) -> None:
    print(f"\n{found.name}: {found.size}")
    print(
        f"{'RAM GB':>8}{'slots':>8}{'share':>7}{'hits':>8}{'reads/token':>13}{'ms/token':>10}{'tok/s':>8}{'hidden':>8}"
    )
    for ram_gb, count in zip(sizes, counts, strict=True):
        slots, tokens = slots_of(found.shape, ram_gb), found.decoded_tokens
        ms = count.decode_ns / tokens / 1e6
        print(
            f"{ram_gb:>8.3g}{slots:>8}{slots / found.shape.blocks:>7.0%}{count.hit_rate:>8.1%}"
            f"{count.decode_reads / tokens:>13.2f}{ms:>10.2f}{1e3 / ms:>8.2f}{max(0.0, count.hidden(clock)):>8.0%}"
        )
    all_gb = found.shape.blocks * found.shape.block_bytes / GB
    if max(sizes) > all_gb:
        print(f"all experts take {all_gb:.3g} GB: more RAM than that changes nothing")
    if found.cut:
        print(
            "the recording did not end in order (engine killed, disk full, file damaged): this is what of it is whole"
        )
    if found.prompt_tokens:
        reads = ", ".join(f"{count.sweep_reads / found.prompt_tokens:.1f}" for count in counts)
        print(f"reads for a token of a prompt: {reads}")


def plot(path: Path, found: Source, sizes: Sequence[float], counts: Sequence[Counts]) -> None:
    """A PNG: hit rate and tokens a second over RAM."""
    try:
        import matplotlib  # a second of import, for this option alone
    except ImportError as error:
        how = f"{sys.executable} -m pip install 'thimble[tools]'"
        raise SystemExit(f"thimble simulate: --plot needs matplotlib: {how}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, hits = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    speed = hits.twinx()
    hits.plot(sizes, [100 * count.hit_rate for count in counts], "o-", color="tab:blue")
    speed.plot(sizes, [1e9 * found.decoded_tokens / count.decode_ns for count in counts], "s--", color="tab:orange")
    hits.set(xlabel="RAM for experts, GB", ylabel="hits, %", title=f"{found.name}: {found.size}")
    hits.yaxis.label.set_color("tab:blue")
    speed.set_ylabel("predicted tokens a second", color="tab:orange")
    hits.grid(alpha=0.3)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        why = f"cannot be written: {error.strerror}; give another --plot"
        raise SystemExit(f"thimble simulate: {path}: {why}") from error
    finally:
        pyplot.close(figure)


def live(found: Source) -> float | None:
    """Reads that the replay has more than the engine that was recorded, for each decoded token; None if not known."""
    if not found.note or found.note["warm"] or found.note["prefetch"] != "off":
        return None
    [count] = replay(found.routing, found.note["policy"], [found.note["slots_total"]])
    return (count.decode_reads + count.sweep_reads - int(found.note["misses"])) / found.decoded_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(GENERATORS)
    parser.add_argument("traces", nargs="*", metavar="TRACE", help=f"a recorded file, or one made up: {names}")
    parser.add_argument("--ram", type=amounts, help="GB for experts, with commas: 12,16,20,24")
    parser.add_argument("--share", type=amounts, help="the same as shares of all experts: 0.24,0.33")
    parser.add_argument("--tokens", type=whole, default=1000, help="decoded tokens of a trace that is made up")
    parser.add_argument(
        "--policy", choices=(SHIPPED, *POLICIES), default=SHIPPED, help="of the cache (default: what the engine runs)"
    )
    parser.add_argument("--prefetch", choices=PREFETCH, default="auto")
    parser.add_argument("--method", choices=[method.value for method in Method], default=Method.CPU.value)
    for name, value in vars(HOME).items():
        kind = amount if name.endswith("gb_s") else nothing_or_more
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value, help=f"(default {value:g})")
    parser.add_argument("--plot", type=Path, help="write hit rate and speed over RAM as a PNG")
    parser.add_argument("--compare", action="store_true", help="every policy on these traces, or on all made up")
    parser.add_argument("--calibration", action="store_true", help="the generator against what was published")
    parser.add_argument("--tried", action="store_true", help="what others tried and found not to pay, once more")
    parser.add_argument("--results", type=Path, help="append measured figures to this CSV file")


def run(args: argparse.Namespace) -> int:
    if args.calibration:
        return 0 if calibration.check() else 1
    rates = Rates(**{name: getattr(args, name) for name in vars(HOME)})
    found = (source(word, args.tokens) for word in args.traces or GENERATORS)
    if args.compare:
        compare.run(list(found), args.results)
        return 0
    if args.tried:
        tried.run(source("calibrated", args.tokens), source("dialogs", args.tokens), rates, args.results)
        return 0
    if not args.traces:
        raise UsageError("name a trace, or --compare, --calibration or --tried")
    if args.plot and len(args.traces) > 1:
        raise UsageError("--plot draws one trace")
    differences = []
    for one in found:
        sizes = sizes_of(args, one.shape)
        clock = clock_of(one.shape, rates, Method(args.method), args.prefetch)
        counts = replay(one.routing, args.policy, [slots_of(one.shape, ram_gb) for ram_gb in sizes], clock)
        table(one, sizes, counts, clock)
        if args.plot:
            plot(args.plot, one, sizes, counts)
        difference = live(one)
        if difference is not None:
            print(f"reads per decoded token, replayed less live: {difference:+.3f}")
            differences.append(abs(difference))
    if args.results and differences:
        note = (
            f"replay against what the live engine counted, worst of {len(differences)} traces of the model that it ran"
        )
        figures.append(args.results, "simulate.reads_error", max(differences), "reads per decoded token", note)
    return 0
