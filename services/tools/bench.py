"""`thimble bench WHAT`: finds a benchmark and runs it. Each is a module with `add_arguments` and `run`."""

import argparse
import importlib

BENCHMARKS = {
    "api": ("services.tools.bench_api", "what the api adds to a streamed token, and what idle streams cost"),
    "arithmetic": ("services.tools.bench_arithmetic", "the error of the experts' 16-bit inputs, beside 8 bits"),
    "experts-cpu": (
        "services.tools.bench_experts_cpu",
        "the routed experts on the processor, every instruction set it has",
    ),
    "disk": ("services.tools.bench_disk", "random expert blocks from a disk, by reads in flight; or an emulated drive"),
    "misses": (
        "services.tools.bench_misses",
        "expert layers with a cache that misses, from an emulated drive or the disk, against the plan",
    ),
    "restart": ("services.tools.bench_restart", "how long after a restart replies are as quick as before it"),
    "experts": ("services.tools.bench_experts", "a layer's routed experts on GPU and CPU, every placement in one run"),
    "metrics": ("services.tools.bench_metrics", "what counting costs a token"),
    "sampling": ("services.tools.bench_sampling", "from logits to an id, beside the definition"),
    "decode": ("services.tools.bench_decode", "whole tokens on GPU and CPU: the published method, ours, and the floor"),
    "snapshots": ("services.tools.bench_snapshots", "a dialog's state from Redis and from memory, beside a raw read"),
    "speculation": ("services.tools.bench_speculation", "answers with and without drafts, on the processor"),
    "drafts": ("services.tools.bench_drafts", "answers on the GPU with and without drafts, against the plan"),
    "scan": ("services.tools.bench_scan", "the Mamba scan of a prompt on the GPU, token by token and by chunks"),
    "vram": ("services.tools.bench_vram", "what takes a card's memory beside tensors, against what the ledger counts"),
    "stall": ("services.tools.bench_stall", "an answer on the GPU while a long prompt is read beside it"),
    "prefill": ("services.tools.bench_prefill", "prompts on the GPU, by length and by the share of experts in RAM"),
    "decode-disk": ("services.tools.bench_decode_disk", "whole tokens while a part of the experts is on a drive"),
    "vision": ("services.tools.bench_vision", "pictures through the tower on the GPU, against copy and compute"),
    "sweep-kernels": (
        "services.tools.bench_sweep_kernels",
        "linears and norms of a prompt's sweep on the GPU, beside cuBLAS",
    ),
    "dense": ("services.tools.bench_dense", "every dense kernel of a decoded token on the GPU, against its bytes"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    summaries = "; ".join(f"{name}: {summary}" for name, (_, summary) in BENCHMARKS.items())
    parser.add_argument("benchmark", choices=sorted(BENCHMARKS), metavar="WHAT", help=summaries)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the benchmark: thimble bench WHAT --help")


def run(args: argparse.Namespace) -> int:
    module, summary = BENCHMARKS[args.benchmark]
    benchmark = importlib.import_module(module)
    parser = argparse.ArgumentParser(prog=f"thimble bench {args.benchmark}", description=summary)
    benchmark.add_arguments(parser)
    return int(benchmark.run(parser.parse_args([word for word in args.options if word != "--"])))
