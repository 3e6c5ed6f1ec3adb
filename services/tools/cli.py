"""The `thimble` command: finds the subcommand and runs it. Owns no work of its own.

A subcommand is a module with `add_arguments(parser)` and `run(args) -> int`. Its module is imported only when it is
asked for, so that `thimble chat` does not wait for torch.
"""

import argparse
import contextlib
import difflib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services import garbage
from services.tools.complaints import UsageError, refused


@dataclass(frozen=True)
class Subcommand:
    module: str
    summary: str


SUBCOMMANDS = {
    "up": Subcommand("services.tools.up", "start the product on this machine: store, engine and api"),
    "chat": Subcommand("services.tools.chat", "talk to a running api in the terminal"),
    "top": Subcommand("services.tools.top", "where a token's time goes, live, of a running engine and api"),
    "health": Subcommand("services.tools.health", "ask an engine or an api whether it is ready"),
    "settings": Subcommand("services.tools.settings", "list every setting with its default, unit and meaning"),
    "demo": Subcommand("services.tools.demo", "make the demo's store, unless it is there"),
    "fetch": Subcommand("services.tools.fetch", "download a checkpoint from a Hugging Face hub or a mirror; resumes"),
    "quantize": Subcommand("services.tools.quantize", "a BF16 checkpoint to the ModelOpt NVFP4/FP8 layout"),
    "repack": Subcommand("services.tools.repack", "a checkpoint to the store that the engine reads"),
    "synth": Subcommand("services.tools.synth", "a store of the real model's shape with random weights, to measure on"),
    "ballast": Subcommand("services.tools.ballast", "hold a card's memory, so that only so much of it is free"),
    "ledger": Subcommand("services.tools.ledger", "what a model takes of a graphics card's memory, and what fits"),
    "plan": Subcommand("services.tools.plan", "what a machine will do with the model: memory, speed, what would help"),
    "cards": Subcommand("services.tools.cards", "what plan says of the graphics cards that it knows, as a table"),
    "doctor": Subcommand("services.tools.doctor", "what is wrong with this machine, and what to do about it"),
    "report": Subcommand("services.tools.report", "one file about how this machine does, without private data"),
    "spread": Subcommand("services.tools.spread", "copy a store's blocks to a further disk, so that both are read"),
    "record": Subcommand("services.tools.record", "traces of routing of a few dialogs with a store's model"),
    "routing": Subcommand(
        "services.tools.routing", "a model's routing and zeros beside the real model's published ones"
    ),
    "simulate": Subcommand("services.tools.simulate", "a trace replayed with other sizes of RAM: hits, reads, speed"),
    "bench": Subcommand("services.tools.bench", "measure a part of the engine on this machine"),
    "profile": Subcommand("services.tools.profile", "a token's timeline on the GPU: picture, Chrome trace, table"),
    "verify": Subcommand("services.tools.verify", "is a store's model that of its checkpoint? against transformers"),
    "teach": Subcommand("services.tools.train_vision.command", "teach a small checkpoint to see drawings"),
    "see": Subcommand("services.tools.train_vision.exam", "show a running server drawings; how many it gets right"),
    "train-demo": Subcommand("services.tools.train_demo.command", "the demo checkpoint from a corpus, stage by stage"),
    "score": Subcommand("services.tools.score.command", "an exam of fixed questions for a server or a checkpoint"),
    "perplexity": Subcommand("services.tools.perplexity", "how well a checkpoint predicts given texts"),
}


INTERRUPTED = b"thimble: interrupted\n"
OURS = ("services", "kernels")
ALL = "'thimble[engine,api,embedded,checkpoint,tools]'"  # what a part of ours needs beside Python


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the process's exit status: 0 done, 1 failed, 2 wrong usage, 130 interrupted.

    A reader that has gone (`| head -1`) is a failure that is not worth a word.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whatever a terminal cannot show is no reason to end
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(words)
        finally:
            if sys.stdout:
                sys.stdout.flush()  # here, where a full disk still has a message
    except KeyboardInterrupt:
        print(INTERRUPTED.decode(), end="", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _forget_what_cannot_be_written()
        return 1
    except OSError as error:
        _forget_what_cannot_be_written()
        print(f"{_name(words)}: {refused(error)}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] in OURS:
            raise
        print(f"{_name(words)}: {error.name} is not installed: {sys.executable} -m pip install {ALL}", file=sys.stderr)
        return 1
    except Exception as error:
        # Only what our own trees name is a message for people; anything else is a bug and keeps its traceback.
        if not isinstance(getattr(error, "code", None), str):
            raise
        print(f"{_name(words)}: {error}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name = words[0]
    if name not in SUBCOMMANDS:
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        print(f"thimble: unknown command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    subcommand = SUBCOMMANDS[name]
    with garbage.not_looked_for(), _ended_at_once():
        module = importlib.import_module(subcommand.module)
    parser = argparse.ArgumentParser(prog=f"thimble {name}", description=subcommand.summary)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words[1:])))


@contextlib.contextmanager
def _ended_at_once() -> Iterator[None]:
    """Ctrl-C while modules come along ends the process: an exception in the midst of torch's C++ would abort it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: object) -> None:
    del number, frame
    os.write(2, INTERRUPTED)
    os._exit(130)


def _name(words: list[str]) -> str:
    return f"thimble {words[0]}" if words and words[0] in SUBCOMMANDS else "thimble"


def _forget_what_cannot_be_written() -> None:
    """Else Python tries it again when it ends, and complains of it in its own words."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def usage() -> str:
    lines = [f"  {name:<12}{subcommand.summary}" for name, subcommand in SUBCOMMANDS.items()]
    return "usage: thimble COMMAND [options]   (thimble COMMAND --help for its options)\n\n" + "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
