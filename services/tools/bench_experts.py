"""`thimble bench experts`: one MoE layer's routed experts on this machine's GPU and CPU, all placements in one run.

Synthetic: random NVFP4 blocks at the real model's shape, larger than every cache of the processors, all of them in RAM,
the alive set different for every token and expert. A time is a layer's, averaged over a graph of many layers: router
result in, latent output out, hand-off included. Methods take turns within each round, so that drift touches all alike;
the table gives medians. Results are compared bit for bit before anything is timed.
"""

import argparse
import hashlib
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from kernels.block import GROUP, BlockLayout
from kernels.build import library
from kernels.experts import decode, handoff
from kernels.experts.decode_step import FINGERPRINT
from kernels.experts.device.rates import ReadRates
from kernels.experts.device.turns import Route, SharedSlots
from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers, available_isas, default_threads
from services.tools import figures
from services.tools.amounts import whole
from services.tools.expert_rig import Method, Rig
from services.tools.synthetic_blocks import SyntheticBlocks

LAYERS, EXPERTS, TOP_K = 40, 32, 22  # 1,280 blocks, 4 GB
SPIN_US = 2000  # workers stay awake between the layers of a token
LAYOUT = BlockLayout(1024, 2688)
# The published method at its best: whole groups are read fastest by fewer programs, one lane of copies is enough, and
# the link idles while the last wave's `up` is computed unless another wave's `down` is being read meanwhile.
PUBLISHED = [
    Method(
        f"published, waves of {'+'.join(map(str, waves))}, {lanes} lane(s){', apart' if apart else ''}",
        Route.COPY_UP, TOP_K, waves, True, splits=8, lanes=lanes, apart=apart,
    )
    for waves, lanes, apart in (((11, 11), 1, False), ((11, 11), 2, True), ((8, 8, 6), 2, True), ((16, 6), 2, True))
]  # fmt: skip
GPU_ONLY = [
    Method("copy whole blocks", Route.COPY_BLOCK, TOP_K, waves=(11, 11)),
    Method("copy up, alive rows of down", Route.COPY_UP, TOP_K, waves=(11, 11)),
    Method("GPU alone, read in place", share=TOP_K),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--rounds", type=whole, default=12, help="timed replays of each method (default 12)")
    parser.add_argument("--clustered", action="store_true", help="alive neurons keep together in groups")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print(
            "bench experts needs a CUDA device; thimble bench experts-cpu measures the processor alone", file=sys.stderr
        )
        return 2
    blocks = SyntheticBlocks(LAYOUT, LAYERS, EXPERTS, args.clustered)
    all_threads = default_threads()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        begun = time.monotonic()
        catalog = blocks.write(Path(folder) / "experts.bin")
        hosts, shared = {}, {}
        for threads in sorted({min(6, all_threads), min(8, all_threads), all_threads}):
            hosts[threads] = Host(catalog, Workers(threads, SPIN_US), slots=LAYERS * EXPERTS, readers=8)
            stack.callback(hosts[threads].close)
            fill_slots(hosts[threads])
            shared[threads] = SharedSlots(hosts[threads])
            stack.callback(shared[threads].close)
        print(f"{LAYERS * EXPERTS} blocks written, read and verified in {time.monotonic() - begun:.0f} s", flush=True)
        first_share = {threads: ReadRates(slots).first_share(TOP_K) for threads, slots in shared.items()}
        print(
            "the GPU's first share:",
            ", ".join(f"{n:.1f} of {TOP_K} beside {t} threads" for t, n in first_share.items()),
        )
        rigs = {}
        for threads, slots in shared.items():
            methods = [Method("CPU alone", share=0), Method("split")]
            for method in [*methods, *((*GPU_ONLY, *PUBLISHED) if threads == all_threads else ())]:
                name = method.name if method in (*GPU_ONLY, *PUBLISHED) else f"{method.name}, {threads} threads"
                rigs[name] = Rig(slots, LAYERS, 1, TOP_K, method, first_share[threads])
        print(f"graphs of {len(rigs)} methods ready after {time.monotonic() - begun:.0f} s", flush=True)
        report(args, blocks, rigs, ReadRates(shared[all_threads]), all_threads)
        for rig in reversed(rigs.values()):
            rig.close()
    return 0


def fill_slots(host: Host) -> None:
    ids = torch.arange(EXPERTS, dtype=torch.int32).view(1, -1)
    for layer in range(LAYERS):
        host.step(layer, ids, torch.ones(1, EXPERTS), torch.ones(1, LAYOUT.latent))


def inputs(blocks: SyntheticBlocks, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(LAYERS)]).int()
    weights = torch.rand(LAYERS, 1, TOP_K, generator=generator)
    return ids.view(LAYERS, 1, TOP_K), weights, blocks.inputs(LAYERS, seed).view(LAYERS, 1, -1)


def report(
    args: argparse.Namespace, blocks: SyntheticBlocks, rigs: dict[str, Rig], rates: ReadRates, threads: int
) -> None:
    check_bits(blocks, rigs)
    rig = rigs["GPU alone, read in place"]
    alive = float((rig.step.hq != 0).float().mean())
    touched = float(rig.step.touched_count.float().mean()) / (LAYOUT.width // GROUP)
    down_bytes = TOP_K * (alive * LAYOUT.width * LAYOUT.latent / 2 + touched * LAYOUT.width // GROUP * LAYOUT.latent)
    step_bytes = TOP_K * LAYOUT.down_values + down_bytes
    times: dict[str, list[float]] = {name: [] for name in rigs}
    for name in rigs:
        for warm in range(4):
            rigs[name].fill(*inputs(blocks, 100 + warm))
            rigs[name].replay()
    together = []
    for round_ in range(args.rounds):
        given = inputs(blocks, 1000 + round_)
        together.append(rates.together())
        for name, rig in rigs.items():
            rig.fill(*given)
            times[name].append(rig.replay() / LAYERS * 1e3)
    handoff_us = hand_off(rigs[f"CPU alone, {threads} threads"])
    medians = {name: statistics.median(values) for name, values in times.items()}
    aggregate = statistics.median(cpu + gpu for cpu, gpu in together)
    floor_us = step_bytes / aggregate / 1e3
    published = min(medians[method.name] for method in PUBLISHED)
    copy_rate = rates.copy()
    print(f"alive {alive:.3f}, groups touched {touched:.3f}, {step_bytes / 1e6:.1f} MB a layer (synthetic blocks)")
    print(f"copy engine {copy_rate:.1f} GB/s; CPU reading {rates.cpu():.1f}; both at once {aggregate:.1f} GB/s")
    print(f"kernels {fingerprint()}\n\n{'method':<36}{'us a layer':>11}{'x published':>13}{'x floor':>9}")
    for name, value in medians.items():
        share = rigs[name].turns.times()
        split = f"  GPU takes {share.gpu_experts / max(1, share.turns):.1f}" if name.startswith("split") else ""
        print(f"{name:<36}{value:>11.0f}{value / published:>13.2f}{value / floor_us:>9.2f}{split}")
    print(f"{'floor':<36}{floor_us:>11.0f}\nhand-off alone {handoff_us:.1f} us")
    best_bytes = TOP_K * (LAYOUT.down_values + touched * LAYOUT.width // GROUP * (GROUP + 2) * LAYOUT.latent / 2)
    rate = best_bytes / (published - handoff_us) / 1e3
    print(
        f"published method: {rate:.1f} GB/s over PCIe beside its hand-off, {rate / copy_rate:.2f} of the copy engine's"
    )
    if args.out:
        ours = medians[f"split, {threads} threads"]
        kind = "clustered" if args.clustered else "independent"
        note = f"synthetic blocks ({kind} neurons), 22 hits, {threads} threads, torch {torch.__version__}"
        rows = [("split_over_published", ours / published, "ratio"), ("split_over_floor", ours / floor_us, "ratio")]
        rows += [(name.replace(" ", "_").replace(",", ""), value, "us") for name, value in medians.items()]
        rows += [("published_over_copy", rate / copy_rate, "ratio")]
        rows += [("floor", floor_us, "us"), ("aggregate_read", aggregate, "GB/s"), ("copy_engine", copy_rate, "GB/s")]
        for name, value, unit in rows:
            figures.append(args.out, f"expert_step.{name}", value, unit, note)
        figures.append(
            args.out, "decode.handoff_us", handoff_us, "us", "no expert to compute; 40 hand-offs in one graph"
        )


def check_bits(blocks: SyntheticBlocks, rigs: dict[str, Rig]) -> None:
    """All methods agree on a token. The reference itself is compared in tests/kernels/test_device_turns.py."""
    outputs = {}
    for name, rig in rigs.items():
        rig.fill(*inputs(blocks, 7))
        rig.out.fill_(float("nan"))
        rig.replay()
        outputs[name] = rig.out.clone()
    first = next(iter(outputs.values()))
    wrong = [name for name, out in outputs.items() if not torch.equal(out, first)]
    if wrong or not bool(first.isfinite().all()):
        raise RuntimeError(f"not the same bits: {wrong or 'not finite'}")


def hand_off(rig: Rig) -> float:
    """Microseconds a layer when there is no expert to compute, since no input is finite."""
    ids, weights, x = rig.ids.cpu(), rig.weights.cpu(), torch.full(rig.x.shape, torch.nan)
    rig.fill(ids, weights, x)
    return statistics.median(rig.replay() for _ in range(20)) / LAYERS * 1e3


def fingerprint() -> str:
    """Of what was compiled: the C++ library's name holds a hash of its sources and flags; the Triton source, hashed."""
    sources = "".join(Path(str(module.__file__)).read_text() for module in (decode, handoff))
    triton_hash = hashlib.sha256(sources.encode()).hexdigest()[:16]
    return f"{library().stem} {available_isas()[-1]}; triton {triton_hash}; {FINGERPRINT}"
