"""`thimble bench WHAT`: finds a benchmark and runs it. Each is a module with `add_arguments` and `run`."""

import argparse
import importlib

BENCHMARKS = {
    "step": ("services.tools.bench_step", "a layer's routed experts on GPU and CPU, every placement in one run"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    choices = parser.add_subparsers(dest="benchmark", required=True, metavar="WHAT")
    for name, (module, summary) in BENCHMARKS.items():
        choice = choices.add_parser(name, help=summary, description=summary)
        choice.set_defaults(module=module)
        choice.add_argument("options", nargs=argparse.REMAINDER, help=f"see thimble bench {name} -- --help")


def run(args: argparse.Namespace) -> int:
    module = importlib.import_module(args.module)
    parser = argparse.ArgumentParser(prog=f"thimble bench {args.benchmark}", description=BENCHMARKS[args.benchmark][1])
    module.add_arguments(parser)
    return int(module.run(parser.parse_args([word for word in args.options if word != "--"])))
