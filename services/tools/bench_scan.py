"""`thimble bench scan`: the chunk scan of a prompt at the real model's shape on a GPU, ours and mamba-ssm's.

Random inputs. Each scan is first held against the recurrence on the CPU, and against itself with the prompt cut at a
chunk; only then timed, through its launches: a prompt's layers are not replayed from a graph.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from torch import Tensor

from kernels.mamba import chunk_scan, package
from kernels.mamba.chunks import CHUNK
from kernels.mamba.cpu import selective_scan
from kernels.mamba.gpu import Sizes
from services.tools import figures
from services.tools.bench_dense import timed
from services.tools.dense_cases import SIZES, relative_error

BOUND = 1e-5  # most relative root mean square error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of a prompt (default: 512 2048)")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("bench scan needs a CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    scans = {"ours": package.ChunkScan(chunk_scan.FINGERPRINT, chunk_scan.chunk_scan)}
    chosen = package.choose(device)
    if chosen not in scans.values():
        scans["mamba_ssm"] = chosen
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    wrong = False
    for tokens in args.tokens:
        prompt = Prompt.random(SIZES, tokens, device)
        for name, one in scans.items():
            error, same = verify(one.scan, prompt)
            ok = error < BOUND and same
            wrong |= not ok
            cut = "equal" if same else "DIFFERS"
            print(f"{one.fingerprint}, {tokens} tokens: error {error:.1e}, cut at a chunk {cut}")
            if not ok:
                continue
            state, out = prompt.state.clone(), torch.empty_like(prompt.x)
            seconds = timed(partial(prompt.run, one.scan, state, out))
            print(f"    {seconds * 1e6:.0f} us a layer, {seconds / tokens * 1e6:.2f} us a token and layer")
            if args.out:
                note = f"random inputs, {tokens} tokens, {one.fingerprint}, {versions}"
                figures.append(args.out, f"scan.{name}_us", seconds * 1e6, "us", note)
    return int(wrong)


@dataclass(frozen=True)
class Prompt:
    """What a scan takes, on a device."""

    sizes: Sizes
    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    state: Tensor
    workspace: chunk_scan.Workspace

    @classmethod
    def random(cls, sizes: Sizes, tokens: int, device: torch.device) -> "Prompt":
        generator = torch.Generator().manual_seed(1)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        group = sizes.groups * sizes.state
        return cls(
            sizes,
            randn(tokens, sizes.inner),
            randn(tokens, sizes.heads) - 3.0,
            randn(tokens, group),
            randn(tokens, group),
            -randn(sizes.heads).exp(),
            randn(sizes.heads),
            randn(sizes.heads),
            randn(sizes.heads, sizes.head_dim, sizes.state),
            chunk_scan.Workspace(tokens, sizes.heads, device),
        )

    def run(self, scan: package.Scan, state: Tensor, out: Tensor, start: int = 0, end: int | None = None) -> None:
        """Scan the tokens from `start` to `end`, the first of them at that absolute position."""
        x, dt, b, c = (tensor[start:end] for tensor in (self.x, self.dt, self.b, self.c))
        weights = self.a, self.d, self.dt_bias
        scan(x, dt, b, c, *weights, state, start, self.sizes, self.workspace, out[start:end])

    def exact(self) -> tuple[Tensor, Tensor]:
        """out and the state behind it by the recurrence, on the CPU."""
        sizes, state = self.sizes, self.state.cpu().clone()
        shape = (len(self.x), sizes.groups, sizes.state)
        x, b, c = self.x.cpu().view(-1, sizes.heads, sizes.head_dim), self.b.cpu().view(shape), self.c.cpu().view(shape)
        y = selective_scan(x, self.dt.cpu(), b, c, self.a.cpu(), self.d.cpu(), self.dt_bias.cpu(), state)
        return y.flatten(1), state


def verify(scan: package.Scan, prompt: Prompt) -> tuple[float, bool]:
    """The error against the recurrence; whether a prompt that is cut at a chunk, if it is that long, is the same."""
    tokens, results = len(prompt.x), []
    for edge in (tokens, min(CHUNK, tokens)):
        state, out = prompt.state.clone(), torch.full_like(prompt.x, torch.nan)
        prompt.run(scan, state, out, 0, edge)
        if edge < tokens:
            prompt.run(scan, state, out, edge, tokens)
        results.append((out, state))
    errors = [relative_error(found, exact) for found, exact in zip(results[0], prompt.exact(), strict=True)]
    same = all(torch.equal(whole, cut) for whole, cut in zip(*results, strict=True))
    return max(errors), same
