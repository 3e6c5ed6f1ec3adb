"""`thimble bench scan`: the Mamba scan of a prompt at the real model's shape on a GPU: token by token, and by chunks.

Three are compared: the sweep's own, which goes through a prompt token by token, the chunk scan, and mamba-ssm's if its
Triton modules are there. Random inputs. Each is first held against the recurrence in float64, and against itself with
the prompt cut at a chunk and at odd places; the first also against decode, bit for bit. Only then it is timed, through
its launches: a prompt's layers are not replayed from a graph. `--sweep` times the first in other configurations.
"""

import argparse
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels.mamba import chunk_scan, package, sweep
from kernels.mamba.chunks import CHUNK
from kernels.mamba.gpu import Sizes, update
from services.tools import figures
from services.tools.amounts import whole
from services.tools.bench_convolution import Convolution
from services.tools.bench_dense import timed
from services.tools.dense_cases import SIZES, relative_error

BOUND = 1e-5  # most relative root mean square error
ODD = (1, 77, 130)  # where a prompt is cut that may be cut anywhere
DECODED = 40  # tokens that are compared with decode
AT_ONCE = 10  # calls that are queued and timed together
CONFIGURATIONS = [(p, w, s) for p, w, s in itertools.product((8, 16, 32, 64), (1, 2, 4), (3, 6, 10)) if p // w >= 8]

# prompt, state, out, first and behind the last token: scans those, the state in place
Scan = Callable[["Prompt", Tensor, Tensor, int, int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--tokens", type=whole, nargs="+", default=[128, 512, 2048], help="of a prompt (128 512 2048)")
    parser.add_argument("--sweep", action="store_true", help="time other configurations of the sequential scan instead")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench scan needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    if args.sweep:
        return try_configurations(Prompt.random(SIZES, max(args.tokens), device))
    candidates = [
        Candidate("sequential", sweep.FINGERPRINT, sequential, anywhere=True),
        Candidate("ours", chunk_scan.FINGERPRINT, by_chunks(chunk_scan.chunk_scan), anywhere=False),
    ]
    chosen = package.choose(device)
    if chosen.fingerprint != chunk_scan.FINGERPRINT:
        candidates.append(Candidate("mamba_ssm", chosen.fingerprint, by_chunks(chosen.scan), anywhere=False))
    for one in candidates:
        print(f"{one.name}: {one.fingerprint}")
    print(HEADING, flush=True)
    wrong = False
    for tokens in args.tokens:
        prompt = Prompt.random(SIZES, tokens, device)
        for one in candidates:
            found = verify(one.scan, prompt)
            decode = as_decode(prompt) if one.anywhere else None
            ok = found.error < BOUND and found.at_chunk and (not one.anywhere or (found.anywhere and decode is True))
            seconds = time_scan(one.scan, prompt) if ok else None
            print(line(one.name, tokens, seconds, found, decode), flush=True)
            wrong |= not ok
            if args.out and seconds is not None:
                note = f"random inputs, {tokens} tokens, {one.fingerprint}, {versions}"
                figures.append(args.out, f"scan.{one.name}_us", seconds * 1e6, "us", note)
                figures.append(args.out, f"scan.{one.name}_error", found.error, "ratio", f"{note}, against float64")
        layer = Convolution.random(SIZES, tokens, device)
        error, same = layer.check(ODD)
        ok = error < BOUND and same
        wrong |= not ok
        seconds = time_convolution(layer) if ok else None
        print(line("convolution", tokens, seconds, Found(error, same, same), None), flush=True)
        if args.out and seconds is not None:
            note = f"random inputs, {tokens} tokens, {sweep.FINGERPRINT}, {versions}"
            figures.append(args.out, "scan.convolve_us", seconds * 1e6, "us", note)
    return int(wrong)


@dataclass(frozen=True)
class Prompt:
    """What a scan takes, on a device: `projected` [tokens, rows] as the convolution leaves it, weights and a state."""

    sizes: Sizes
    projected: Tensor
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    state: Tensor

    @classmethod
    def random(cls, sizes: Sizes, tokens: int, device: torch.device) -> "Prompt":
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        projected = randn(tokens, sizes.rows)
        projected[:, -sizes.heads :] -= 3.0  # dt: most steps are small, as trained ones are
        a, d, dt_bias = -randn(sizes.heads).exp(), randn(sizes.heads), randn(sizes.heads)
        return cls(sizes, projected, a, d, dt_bias, randn(sizes.heads, sizes.head_dim, sizes.state))

    def parts(self, start: int, end: int) -> list[Tensor]:
        """x, B, C and dt of the tokens, columns of `projected`."""
        inner, group = self.sizes.inner, self.sizes.groups * self.sizes.state
        return list(torch.split(self.projected[start:end], [inner, inner, group, group, self.sizes.heads], dim=1)[1:])

    def exact(self) -> tuple[Tensor, Tensor]:
        """y [tokens, inner] and the state behind it by the recurrence, float64."""
        sizes, state, outputs = self.sizes, self.state.double(), []
        group = sizes.groups * sizes.state
        for row in self.projected.double():
            _, x, b, c, dt = torch.split(row, [sizes.inner, sizes.inner, group, group, sizes.heads])
            step = torch.logaddexp(dt + self.dt_bias, torch.zeros_like(dt))
            x = x.view(sizes.heads, sizes.head_dim)
            b, c = (each.view(sizes.groups, 1, -1).repeat_interleave(sizes.heads // sizes.groups, 0) for each in (b, c))
            state = state * (step * self.a).exp()[:, None, None] + (step[:, None] * x).unsqueeze(2) * b
            outputs.append(((state * c).sum(2) + self.d[:, None] * x).flatten())
        return torch.stack(outputs), state


@cache
def one_segment(rows: int, device: torch.device) -> Tensor:
    """Kept, since a copy to the device would stand in the measured time."""
    return torch.tensor([[0, rows, 0]], dtype=torch.int32, device=device)


def sequential(
    prompt: Prompt,
    state: Tensor,
    out: Tensor,
    start: int,
    end: int,
    part: int = sweep.PART,
    warps: int = sweep.WARPS,
    stages: int = sweep.STAGES,
) -> None:
    segments = one_segment(end - start, state.device)
    workspace = sweep.Workspace(end - start, prompt.sizes.heads, state.device)
    rows, weights = prompt.projected[start:end], (prompt.a, prompt.d, prompt.dt_bias)
    sweep.scan(rows, prompt.sizes, *weights, state[None], segments, workspace, out[start:end], part, warps, stages)


def by_chunks(scan: package.Scan) -> Scan:
    def scanned(prompt: Prompt, state: Tensor, out: Tensor, start: int, end: int) -> None:
        x, b, c, dt = prompt.parts(start, end)
        workspace = chunk_scan.Workspace(end - start, prompt.sizes.heads, state.device)
        weights = prompt.a, prompt.d, prompt.dt_bias
        scan(x, dt, b, c, *weights, state, start, prompt.sizes, workspace, out[start:end])

    return scanned


@dataclass(frozen=True)
class Candidate:
    name: str
    fingerprint: str
    scan: Scan
    anywhere: bool  # a cut of the prompt must keep the bits wherever it is, not only at a chunk


@dataclass(frozen=True)
class Found:
    """error against float64; whether a prompt cut at a chunk, and one cut at odd places, has the bits of the whole."""

    error: float
    at_chunk: bool
    anywhere: bool


def verify(scan: Scan, prompt: Prompt) -> Found:
    tokens, results = len(prompt.projected), []
    for cuts in ((), (CHUNK,), ODD):
        state, out = prompt.state.clone(), prompt.projected.new_full((tokens, prompt.sizes.inner), torch.nan)
        for start, end in itertools.pairwise([0, *(cut for cut in cuts if cut < tokens), tokens]):
            scan(prompt, state, out, start, end)
        results.append((out, state))
    error = max(relative_error(found, exact) for found, exact in zip(results[0], prompt.exact(), strict=True))
    at_chunk, anywhere = (
        all(torch.equal(whole, cut) for whole, cut in zip(results[0], other, strict=True)) for other in results[1:]
    )
    return Found(error, at_chunk, anywhere)


def as_decode(prompt: Prompt) -> bool:
    """Whether the sequential scan of the first tokens has the bits of decode's update, outputs and state."""
    sizes, device = prompt.sizes, prompt.state.device
    tokens = min(DECODED, len(prompt.projected))
    state, out = prompt.state.clone(), prompt.projected.new_full((tokens, sizes.inner), torch.nan)
    sequential(prompt, state, out, 0, tokens)
    decoded, y, normed = prompt.state[None].clone(), torch.full_like(out, torch.nan), torch.empty_like(out[:1])
    arrived = torch.zeros(1, sizes.groups, dtype=torch.int32, device=device)
    slots, norm_weight = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(sizes.inner, device=device)
    weights = prompt.a, prompt.d, prompt.dt_bias
    for token in range(tokens):
        row = slice(token, token + 1)
        update(prompt.projected[row], sizes, *weights, decoded, slots, norm_weight, 1e-5, y[row], arrived, normed)
    return torch.equal(out, y) and torch.equal(state, decoded[0])


def time_scan(scan: Scan, prompt: Prompt) -> float:
    """Seconds of a scan of the whole prompt."""
    tokens = len(prompt.projected)
    state, out = prompt.state.clone(), prompt.projected.new_empty(tokens, prompt.sizes.inner)

    def several() -> None:
        for _ in range(AT_ONCE):
            scan(prompt, state, out, 0, tokens)

    return timed(several) / AT_ONCE


def time_convolution(layer: Convolution) -> float:
    """Seconds for the whole prompt. It convolves in place, so from the second time on it convolves what it made."""
    projected, state = layer.projected.clone(), layer.state.clone()
    segments = one_segment(len(projected), state.device)

    def several() -> None:
        for _ in range(AT_ONCE):
            layer.run(projected, state, segments)

    return timed(several) / AT_ONCE


HEADING = (
    f"{'':<12}{'tokens':>7}{'us a layer':>12}{'us a token':>12}{'error':>10}{'cut at 128':>12}{'cut at odd':>12}"
    f"{'decode':>9}"
)


def line(name: str, tokens: int, seconds: float | None, found: Found, decode: bool | None) -> str:
    times = f"{'WRONG':>12}{'-':>12}" if seconds is None else f"{seconds * 1e6:>12.0f}{seconds / tokens * 1e6:>12.3f}"
    words = {True: "equal", False: "differs", None: "-"}
    cuts = f"{words[found.at_chunk]:>12}{words[found.anywhere]:>12}{words[decode]:>9}"
    return f"{name:<12}{tokens:>7}{times}{found.error:>10.1e}{cuts}"


def try_configurations(prompt: Prompt) -> int:
    tokens = len(prompt.projected)
    usual, wrong = time_scan(sequential, prompt), False
    now = f"{sweep.PART} rows, {sweep.WARPS} warps, {sweep.STAGES} stages"
    print(f"{tokens} tokens; as it is, {now}: {usual * 1e6:.0f} us")
    expected = prompt.state.clone(), prompt.projected.new_empty(tokens, prompt.sizes.inner)
    sequential(prompt, *expected, 0, tokens)
    results = []
    for part, warps, stages in CONFIGURATIONS:
        chosen = partial(sequential, part=part, warps=warps, stages=stages)
        found = prompt.state.clone(), torch.full_like(expected[1], torch.nan)
        try:
            chosen(prompt, *found, 0, tokens)
            same = all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
            results.append((time_scan(chosen, prompt), same, part, warps, stages))
        except Exception as failure:  # a configuration that this card cannot run is a result, too
            print(f"    {part} rows, {warps} warps, {stages} stages: {type(failure).__name__} {str(failure)[:80]}")
    for seconds, same, part, warps, stages in sorted(results):
        wrong |= not same
        bits = "" if same else "  OTHER BITS"
        print(f"    {part:>2} rows, {warps} warps, {stages:>2} stages: {seconds * 1e6:>6.0f} us{bits}")
    return int(wrong)
