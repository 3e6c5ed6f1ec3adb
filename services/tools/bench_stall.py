"""`thimble bench stall STORE`: how long an answer stands still while another's long prompt is read on the GPU.

The scheduler's own turn, a token and then a slice of reading, for a synthetic store; only clients and sampling are
missing. Beside it: the same answer alone, and the same prompt alone.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import triton

from services.engine.experts.store import Store
from services.engine.gpu.model import DeviceModel
from services.engine.model import Segment
from services.engine.reading import SLICE_S
from services.tools import figures
from services.tools.amounts import amount, count, nothing_or_more, whole
from services.tools.ballast import Ballast
from services.tools.bench_prefill import opened

SECONDS_MS = 1e3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` wrote")
    parser.add_argument("--tokens", type=whole, default=2048, help="of the prompt (default 2048)")
    parser.add_argument("--answered", type=whole, default=24, help="tokens of the answer that runs alone (default 24)")
    parser.add_argument("--share", type=nothing_or_more, default=1.0, help="of the experts in RAM (default 1)")
    parser.add_argument("--disk", type=amount, default=7.0, metavar="GB/S", help="of the emulated drive (default 7)")
    parser.add_argument(
        "--chunk", type=count, default=0, help="tokens read at once (default: as many as there is room for)"
    )
    parser.add_argument("--free-mib", type=count, default=8151, help="of the card, by ballast (default 8151; 0: all)")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="format of keys and values")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("bench stall needs a CUDA device", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    memory = np.fromfile(store.experts_path, np.uint8)
    with ExitStack() as stack:
        if args.free_mib:
            stack.enter_context(Ballast(args.free_mib))
        bench = stack.enter_context(opened(store, memory, args.share, args.tokens, args, places=2, rows=(1, 2)))
        alone = answer(bench.model, args.answered, store.config.vocab_size)
        prompt_s, _ = beside(bench.model, args, store.config.vocab_size, answers=False)
        shared_s, gaps = beside(bench.model, args, store.config.vocab_size, answers=True)
        chunk = bench.chunk
    note = (
        f"synthetic, a prompt of {args.tokens} tokens in chunks of {chunk} beside one answer, {args.share:.2f} of "
        f"{store.config.experts} experts a layer in RAM, slices of {SLICE_S:g} s, KV {args.kv}, "
        f"{f'ballast to {args.free_mib} MiB' if args.free_mib else 'no ballast'}; {len(gaps)} tokens meanwhile; "
        f"torch {torch.__version__}, triton {triton.__version__}"
    )
    rows = {
        "stall.alone_ms": (SECONDS_MS * float(np.median(alone)), "ms"),
        "stall.median_ms": (SECONDS_MS * float(np.median(gaps)), "ms"),
        "stall.longest_ms": (SECONDS_MS * max(gaps), "ms"),
        "stall.prompt_alone_s": (prompt_s, "s"),
        "stall.prompt_shared_s": (shared_s, "s"),
    }
    print(note)
    for name, (value, unit) in rows.items():
        print(f"{name:24}{value:>10.2f} {unit}")
        if args.out:
            figures.append(args.out, name, value, unit, note)
    return 0


def answer(model: DeviceModel, tokens: int, vocabulary: int) -> list[float]:
    """Seconds of each token of an answer that nothing else disturbs."""
    state = model.new_state(tokens + 1)
    ids = np.random.default_rng(2).integers(0, vocabulary, tokens + 1).tolist()
    took = []
    for id_ in ids:
        begun = time.perf_counter()
        model.forward([Segment(state, [id_])])
        took.append(time.perf_counter() - begun)
    state.release()
    return took[1:]


def beside(model: DeviceModel, args: argparse.Namespace, vocabulary: int, answers: bool) -> tuple[float, list[float]]:
    """Seconds until the prompt is read, and between the ends of an answer's tokens meanwhile if one `answers`."""
    random = np.random.default_rng(3)
    prompt, other = model.new_state(args.tokens), model.new_state(args.tokens)
    model.forward([Segment(other, random.integers(0, vocabulary, 1).tolist())])
    ids = random.integers(0, vocabulary, args.tokens).tolist()
    assert model.sweep
    chunk = model.sweep.tokens
    gaps: list[float] = []
    begun = last = slice_begun = time.perf_counter()
    for first in range(0, args.tokens, chunk):
        for _ in model.reading([Segment(prompt, ids[first : first + chunk], sweep=True)]):
            if not answers or time.perf_counter() - slice_begun < SLICE_S:
                continue
            model.forward([Segment(other, random.integers(0, vocabulary, 1).tolist())])
            slice_begun = time.perf_counter()
            gaps.append(slice_begun - last)
            last = slice_begun
    torch.cuda.synchronize()
    took = time.perf_counter() - begun
    prompt.release()
    other.release()
    return took, gaps
