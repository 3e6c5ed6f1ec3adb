"""Damaged pictures by the thousand through the decoder's process: each must come out as pixels or as a refusal.

    .venv/bin/python tests/vision/fuzz_decoder.py MINUTES [SEED]

A crash, a hang or memory above the limit is a finding; the bytes that led to it are kept in a temporary folder.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from drawn import corners, encoded, with_orientation
from PIL import Image

from services.engine.vision import decoder

BATCH = 40  # pictures a process: starting one takes longer than decoding a small picture
MOST_S = decoder.WALL_S  # for one; a batch of large ones may take longer, and is then tried one by one


HANG = "hang"


@dataclass
class Report:
    cases: int = 0
    decoded: int = 0
    refused: int = 0
    slowest_batch_s: float = 0.0
    findings: list[tuple[str, bytes]] = field(default_factory=list)


def seeds() -> list[bytes]:
    """One of every kind that is read, and of everything that is done with them."""
    colours = corners()
    frames = [Image.new("RGB", (24, 24), (40 * i, 0, 0)) for i in range(3)]
    noise = Image.effect_noise((61, 47), 90)
    return [
        encoded(colours),
        encoded(colours, "PNG", interlace=1, transparency=(255, 0, 0)),
        encoded(colours.quantize(4), "PNG", transparency=0),
        encoded(Image.new("I;16", (20, 20), 0x4080)),
        encoded(noise.convert("LA")),
        encoded(noise.convert("1")),
        encoded(noise.convert("RGBA"), "PNG"),
        encoded(noise.convert("RGB"), "JPEG"),
        encoded(noise, "JPEG", progressive=True),
        encoded(colours.convert("CMYK"), "JPEG"),
        with_orientation(6),
        with_orientation(7, "WEBP"),
        encoded(noise.convert("RGB"), "WEBP"),
        encoded(noise.convert("RGBA"), "WEBP", lossless=True),
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        encoded(noise, "GIF", interlace=1),
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
    ]


def damaged(choice: random.Random, files: list[bytes]) -> bytes:
    """One of the files, with something done to it."""
    data = bytearray(choice.choice(files))
    for _ in range(choice.choice((1, 1, 2, 4, 16))):
        at = choice.randrange(len(data))
        match choice.randrange(8):
            case 0:
                data[at] ^= 1 << choice.randrange(8)
            case 1:
                data[at] = choice.randrange(256)
            case 2:
                data[at : at + 4] = choice.choice(
                    (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\xff\xff")
                )
            case 3:
                del data[at : at + choice.randrange(1, 64)]
            case 4:
                data[at:at] = choice.randbytes(choice.randrange(1, 64))
            case 5:
                other = choice.choice(files)
                data[at:] = other[min(at, len(other) - 1) :]
            case 6:
                length = choice.randrange(1, 64)
                data[at:at] = data[at : at + length] * choice.randrange(1, 20)
            case _:
                data[choice.randrange(min(64, len(data)))] = choice.randrange(256)  # headers are where sizes are
        if not data:
            return b"\xff"
    if choice.random() < 0.1:
        del data[choice.randrange(1, len(data) + 1) :]
    return bytes(data)


def run(pictures: list[bytes], program: Path, most_s: float) -> tuple[str, list[dict[str, object]], float]:
    """What went wrong with the process ("" for nothing), what it said of each picture, and how long it took."""
    data = b"".join(part for p in pictures for part in (len(p).to_bytes(8, "little"), p))
    limits = (str(decoder.MEMORY_BYTES), str(decoder.CPU_S))
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [sys.executable, "-I", str(program), "pixels", *limits], input=data, capture_output=True, timeout=most_s
        )
    except subprocess.TimeoutExpired:
        return HANG, [], time.monotonic() - began
    said: list[dict[str, object]] = []
    out = ended.stdout
    while out:
        line, _, out = out.partition(b"\n")
        said.append(json.loads(line))
        out = out[3 * int(str(said[-1].get("width", 0))) * int(str(said[-1].get("height", 0))) :]
    trouble = f"exit status {ended.returncode}: {ended.stderr[-300:]!r}" if ended.returncode else ""
    return trouble or ("answers are missing" if len(said) != len(pictures) else ""), said, time.monotonic() - began


def fuzz(seconds: float, seed: int, program: Path = decoder.PROGRAM, most_s: float = MOST_S) -> Report:
    report, choice, files = Report(), random.Random(seed), seeds()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pictures = [damaged(choice, files) for _ in range(BATCH)]
        trouble, said, took = run(pictures, program, most_s)
        report.cases += len(pictures)
        report.refused += sum("refused" in one for one in said)
        report.decoded += sum("width" in one for one in said)
        report.slowest_batch_s = max(report.slowest_batch_s, took)
        if trouble:
            found = _narrowed(pictures, program, most_s)
            report.findings += found or ([] if trouble == HANG else [(f"only in a batch: {trouble}", b"")])
    return report


def _narrowed(pictures: list[bytes], program: Path, most_s: float) -> list[tuple[str, bytes]]:
    found = ((run([picture], program, most_s)[0], picture) for picture in pictures)
    return [(trouble, picture) for trouble, picture in found if trouble]


def main() -> int:
    parser = argparse.ArgumentParser(description="damaged pictures through the decoder's process")
    parser.add_argument("minutes", type=float)
    parser.add_argument("seed", type=int, nargs="?", default=0)
    given = parser.parse_args()
    minutes, seed = given.minutes, given.seed
    report = fuzz(60 * minutes, seed)
    peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024  # this process has no other children
    if peak_bytes > decoder.MEMORY_BYTES:
        report.findings.append((f"{peak_bytes} bytes of memory", b""))
    print(
        f"{report.cases} damaged pictures in {minutes:g} minutes, seed {seed}: {report.decoded} decoded, "
        f"{report.refused} refused, slowest batch of {BATCH} {report.slowest_batch_s:.1f} s, largest decoder "
        f"{peak_bytes / 1e6:.0f} MB, findings: {len(report.findings)}"
    )
    folder = Path(tempfile.mkdtemp(prefix="thimble-fuzz-")) if report.findings else Path()
    for number, (trouble, picture) in enumerate(report.findings):
        (folder / str(number)).write_bytes(picture)
        print(f"  {trouble}: {folder / str(number)}")
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
