"""Inputs made by what they reach in our code (atheris, libFuzzer): bodies of all flavours up to the chat, and the
model's own output up to tool calls. An input that ends in anything but an ApiError, or that the parsers read otherwise
when it comes in pieces, is a finding.

    pip install atheris
    PYTHONPATH=. python tests/drills/guided.py --minutes 10 --out FILE

Each target is a process of its own: libFuzzer ends it.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TARGETS = ("bodies", "output")
MOST_S, MOST_MB, MOST_LENGTH = 10, 1500, 4096
SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "\n")


def bodies() -> Any:
    """JSON of any flavour: read, checked, turned into a chat, and what form its answer has to have."""
    import json

    sys.path.insert(0, str(FOLDER.parent / "api"))
    from client_shapes import ANSWERED, CHAT, MESSAGES, RESPONSES, TEXT

    from services.api.anthropic_request import MessagesRequest
    from services.api.call_grammar import answer_form, tool_choice
    from services.api.errors import ApiError
    from services.api.model_folder import load_model_folder
    from services.api.pictures import take
    from services.api.responses_request import ResponseRequest
    from services.api.schemas import ChatRequest
    from services.api.text import CompletionRequest
    from services.api.validation import parse_json, validate

    added = load_model_folder(FOLDER.parents[1] / "demo").tokenizer.added

    def run(data: bytes) -> None:
        try:
            body = parse_json(data[1:])
            match data[:1]:
                case b"m":
                    chat = validate(MessagesRequest, body).chat()
                case b"r":
                    chat = validate(ResponseRequest, body).chat([])
                case b"t":
                    validate(CompletionRequest, body)
                    return
                case _:
                    chat = validate(ChatRequest, body)
            for message in chat.messages:
                take(message.for_template()["content"] or "")
            answer_form(chat.usable_tools, tool_choice(chat.tool_choice, chat.parallel_tool_calls), chat.form, added)
        except ApiError:
            pass

    letters = {CHAT: "c", MESSAGES: "m", RESPONSES: "r", TEXT: "t"}
    seeds = [
        letters[path.partition("?")[0]] + json.dumps({"model": "demo", **body}) for path, body in ANSWERED.values()
    ]
    return run, [seed.encode() for seed in seeds]


def output() -> Any:
    """Text of a model: the same whether it comes whole or in pieces."""
    from services.api.parsers.answer import AnswerParser, Content, Reasoning

    schemas = {"f": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}

    def read(pieces: list[str], thinks: bool) -> list[str]:
        parser = AnswerParser(thinks, schemas, ("STOP",))
        deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish(False)
        found = ["", "", ""]
        for delta in deltas:
            place = 0 if isinstance(delta, Reasoning) else 1 if isinstance(delta, Content) else 2
            found[place] += getattr(delta, "text", None) or getattr(delta, "json", None) or getattr(delta, "name", "")
        return found

    def run(data: bytes) -> None:
        if len(data) < 3:
            return
        text = re.sub("[\x01-\x08]", lambda match: SPECIAL[ord(match[0]) - 1], data[2:].decode("utf-8", "replace"))
        step = 1 + data[1] % 7
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        whole, cut = read([text], bool(data[0] & 1)), read(pieces, bool(data[0] & 1))
        if whole != cut:
            raise AssertionError(f"{whole!r} in one piece, {cut!r} in pieces of {step}")

    call = "hm\x02ok\x03\n\x05\n\x071\n</parameter>\n\x06\n\x04"
    return run, [f"\x00\x00{call}STOP".encode(), f"\x01\x03{call}{call}".encode()]


def fuzz(target: str, folder: Path, seconds: int) -> tuple[int, str]:
    """Runs, and the finding: the end of what it said, or nothing."""
    command = [sys.executable, __file__, "--target", target, "--minutes", str(seconds / 60), "--folder", str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    done = re.findall(r"^(?:#|Done )(\d+)", run.stderr, re.MULTILINE)
    return int(done[-1]) if done else 0, "" if run.returncode == 0 and done else (run.stdout + run.stderr)[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="each target (default: 10)")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--target", choices=TARGETS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        import atheris

        with atheris.instrument_imports(include=["services.api"]):
            run, seeds = globals()[args.target]()
        corpus = args.folder / args.target
        corpus.mkdir()
        for number, seed in enumerate(seeds):
            (corpus / str(number)).write_bytes(seed)
        limits = [f"-max_total_time={round(60 * args.minutes)}", f"-timeout={MOST_S}", f"-rss_limit_mb={MOST_MB}"]
        limits += [f"-max_len={MOST_LENGTH}", f"-artifact_prefix={args.folder}/"]
        atheris.Setup([sys.argv[0], *limits, str(corpus)], run)
        atheris.Fuzz()
    from services.tools import figures

    findings = 0
    counts = []
    for target in TARGETS:
        folder = Path(tempfile.mkdtemp(prefix="thimble-guided-"))
        runs, finding = fuzz(target, folder, round(60 * args.minutes))
        findings += bool(finding)
        counts.append(f"{target} {runs}")
        print(f"{target}: {runs} runs, {f'a finding, in {folder}' if finding else 'no finding'}\n{finding}", flush=True)
    if args.out:
        note = f"{args.minutes:g} minutes each; runs {', '.join(counts)}; findings {findings}"
        figures.append(args.out, "hostile.guided_findings", findings, "kinds", note)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
