"""`thimble profile STORE`: what the GPU does in one token, as a picture, a Chrome trace and a table.

The decoder is the engine's own; routing is replayed and everything hits, as in `thimble bench decode`. The trace opens
in chrome://tracing or ui.perfetto.dev. Owns the command; the timeline is timeline.py.
"""

import argparse
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from kernels.experts.device.rates import ReadRates
from kernels.experts.device.turns import SharedSlots
from kernels.workers.pool import default_threads
from services.engine.errors import DiskError
from services.engine.experts.store import Store
from services.engine.gpu import ranges
from services.engine.gpu.ledger import MOST_SEQUENCES
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.weights import DeviceWeights
from services.engine.pages import pages_for
from services.tools import replay, timeline
from services.tools.amounts import whole
from services.tools.bench_decode import METHODS, WARM, in_turns, warm
from services.tools.decode_rig import DecodeRig, filled_host, mid_dialog
from services.tools.token_parts import HEADING, line, parts

TOKENS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` or `thimble repack` wrote")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="folder for token.json and token.png")
    parser.add_argument("--method", choices=sorted(METHODS), default="split", help="placement (default split)")
    parser.add_argument(
        "--rows", type=whole, choices=range(1, MOST_SEQUENCES + 1), default=1, help="sequences of a step"
    )
    parser.add_argument("--threads", type=whole, default=default_threads(), help="host threads (default: all but two)")
    parser.add_argument("--resident", type=whole, default=64, help="experts a layer in RAM, that occur (default 64)")
    parser.add_argument("--context", type=whole, default=2048, help="tokens of each sequence (default 2048)")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("profile needs a CUDA device", file=sys.stderr)
        return 2
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskError(f"{args.out}: {error.strerror}; give another folder with --out") from error
    config, device, method = store.config, torch.device("cuda"), METHODS[args.method]
    trace = replay.make(config, WARM + TOKENS, args.rows, args.resident, seed=1)
    torch.set_num_threads(1)
    with ExitStack() as stack:
        ranges.switch(True)
        stack.callback(ranges.switch, False)
        host = filled_host(store, args.threads, args.resident)
        stack.callback(host.close)
        slots = SharedSlots(host)
        stack.callback(slots.close)
        share = ReadRates(slots).first_share(config.experts_per_token)
        weights = DeviceWeights.load(store.dense(), config, device)
        pages = args.rows * pages_for(args.context)
        pool = DevicePool(config, device, places=args.rows, pages=pages, kv="bf16")
        states = [mid_dialog(weights, pool, args.context) for _ in range(args.rows)]
        rig = DecodeRig(weights, states, slots, method, share, trace)
        stack.callback(rig.close)
        warm(rig)
        token_ms = statistics.median(in_turns({"it": rig}, WARM, TOKENS)["it"])
        events = rig.events(WARM, 1)
        if not events:
            print("nothing was recorded: this machine lets nobody profile its GPU", file=sys.stderr)
            return 1
        busy, disk_ms = rig.sums(WARM, TOKENS)
        idle, _ = rig.sums(WARM, TOKENS, nothing=True)
    kind = "synthetic weights, " if store.synthetic else ""
    title = f"{kind}{method.name}, {args.threads} threads, batch {args.rows}: {token_ms:.2f} ms without recording"
    timeline.write_trace(args.out / "token.json", events, config.layers, title)
    timeline.draw(events, config.layers, title).save(args.out / "token.png")
    print(f"{title}\n\n{timeline.table(events)}\n\n{HEADING}")
    print(line(method.name, parts(token_ms, busy, idle, disk_ms), args.rows))
    print(f"\n{args.out / 'token.png'}, {args.out / 'token.json'}")
    return 0
