"""`thimble train-demo`: the demo checkpoint from a corpus, stage by stage, in runs that stop and go on.

prepare    corpus -> RUN: tokenizer, rows (needs no GPU)
pretrain, chat, quantise    train, each for at most --minutes a run; a stage that is not done is gone on with
measure    what RUN has reached on held-out texts
curve      RUN/loss.csv as a picture
export     RUN -> a BF16 checkpoint, for `thimble quantize`

A stage with --from begins a run of its own, with the weights of another checkpoint, exported or quantized.
"""

import argparse
import csv
from pathlib import Path

from services.tools.amounts import amount, count, nothing_or_more, whole
from services.tools.complaints import UsageError
from services.tools.train_demo import shapes

STEPS = ("prepare", *shapes.STAGES, "measure", "curve", "export")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", choices=STEPS)
    parser.add_argument("run", type=Path, help="folder of this training, for everything")
    parser.add_argument("out", type=Path, nargs="?", help="export: folder of the checkpoint; curve: the PNG file")
    parser.add_argument(
        "--from", dest="start", type=Path, metavar="CHECKPOINT", help="begin with, measure or export its weights"
    )
    parser.add_argument(
        "--corpus", type=Path, help="prepare: folder with pretrain, pretrain_val, chat, chat_val .jsonl[.gz|.xz]"
    )
    parser.add_argument("--lessons", type=count, help="prepare: how many chats are made up (as mixture.json says)")
    parser.add_argument("--size", choices=tuple(shapes.RECIPES), default="demo", help="of the model; tiny is for tests")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(what there is)")
    parser.add_argument("--minutes", type=amount, default=9.0, help="of training in this run (9)")
    parser.add_argument(
        "--stage-minutes", type=amount, default=9.0, help="of the whole stage, if --steps is not given (9)"
    )
    parser.add_argument("--steps", type=whole, help="of the whole stage; a multiple of 16")
    parser.add_argument(
        "--sparsity", type=nothing_or_more, default=0.0, help="how much values behind relu are pushed to zero (0)"
    )


def run(args: argparse.Namespace) -> int:
    if args.step == "prepare":
        return _prepare(args)
    if args.step == "curve":
        return _curve(args)
    import torch

    from services.tools.train_demo.training import Training, TrainingError

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("there is no CUDA device: leave --device out, or give cpu, which takes many hours")
    if device == "cpu":
        torch.set_num_threads(1)  # torch's threads spin while they wait for one another
    training = Training(args.run, shapes.RECIPES[args.size], device, print)
    if args.start is not None:
        training.begin_from(args.start, args.step if args.step in shapes.STAGES else shapes.STAGES[0])
    if args.step in shapes.STAGES:
        training.stage(args.step, args.minutes, args.steps, args.stage_minutes, args.sparsity)
    elif args.step == "measure":
        from services.tools.train_demo.measuring import measure

        for name in ("books", "chats"):
            for rounded in (False, True):
                found = measure(training, name, rounded)
                print(
                    f"{name}, {'rounded' if rounded else 'as trained'}: perplexity {found.per_token:.3f} a token, "
                    f"{found.per_byte:.4f} a byte; drafts {found.drafts:.3f}, zeros {found.zeros:.3f}, "
                    f"busiest expert {found.busiest:.2f} of the mean"
                )
    else:
        if args.out is None or args.out.exists():
            raise TrainingError("export: give a folder that does not exist yet")
        from services.tools.train_demo.export import export

        files = export(training.network, args.run, args.out)
        print(
            f"{args.out}: a BF16 checkpoint in {files} files; next: thimble quantize {args.out} OUT --calibrate TEXT..."
        )
    return 0


def _prepare(args: argparse.Namespace) -> int:
    from services.tools.train_demo.prepare import prepare

    if args.corpus is None:
        raise UsageError("prepare: name the corpus with --corpus FOLDER")
    lessons = shapes.MIXTURE["lessons"] if args.lessons is None else args.lessons
    prepare(args.corpus, args.run, shapes.config(args.size)["vocab_size"], lessons, print)
    shapes.write_config(args.run, args.size)
    size = sum(path.stat().st_size for path in (args.run / "documents").iterdir())
    print(f"{args.run}: prepared, {size / 1e6:.1f} MB of documents")
    return 0


def _curve(args: argparse.Namespace) -> int:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from services.tools.train_demo.training import TrainingError

    try:
        with (args.run / "loss.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError as error:
        raise TrainingError(f"{args.run}: holds no loss.csv; run `thimble train-demo pretrain` first") from error
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for stage in shapes.STAGES:
        part = [row for row in rows if row["stage"] == stage]
        millions = [int(row["tokens"]) / 1e6 for row in part]
        for column, style in (("loss", "-"), ("draft_loss", ":")):
            axes.plot(millions, [float(row[column]) for row in part], style, label=f"{stage}, {column}", linewidth=1)
    axes.set_xlabel("tokens, millions")
    axes.set_ylabel("nats a token")
    axes.legend()
    out = args.out or args.run / "loss.png"
    figure.savefig(out, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    print(out)
    return 0
