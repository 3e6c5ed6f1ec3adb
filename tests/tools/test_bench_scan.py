"""The scan benchmark's checks find a wrong scan. In a process of its own: kernels in other tests may be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.tools import bench_scan, cli

SCRIPT = """
import quick_interpreter
quick_interpreter.install()
import torch
from kernels.mamba import chunk_scan
from kernels.mamba.gpu import Sizes
from services.tools import bench_scan
from services.tools.bench_convolution import Convolution
from services.tools.bench_scan import BOUND, Prompt, as_decode, by_chunks, line, sequential, verify

def forgetful(prompt, state, out, start, end):
    state.zero_() if start else None
    sequential(prompt, state, out, start, end)

def restless(prompt, state, out, start, end):
    sequential(Prompt(prompt.sizes, prompt.projected, 1.001 * prompt.a, prompt.d, prompt.dt_bias, prompt.state),
               state, out, start, end)

sizes = Sizes(heads=1, head_dim=5, state=4, groups=1)
class Careless(Convolution):
    def run(self, projected, state, segments):
        state.zero_() if segments[0, 0] else None
        Convolution.run(self, projected, state, segments)

prompt = Prompt.random(sizes, 131, torch.device("cpu"))
found = verify(sequential, prompt)
assert found.error < BOUND and found.at_chunk and found.anywhere, found
chunks = verify(by_chunks(chunk_scan.chunk_scan), prompt)
assert chunks.error < BOUND and chunks.at_chunk and not chunks.anywhere, chunks

short = Prompt.random(sizes, 9, torch.device("cpu"))
wrong = verify(forgetful, short)
assert wrong.error < BOUND and not wrong.anywhere
assert verify(restless, short).error > BOUND
assert as_decode(short)  # four states: a sum of four has one order, in NumPy too
bench_scan.sequential = restless
assert not as_decode(short)

layer = Convolution.random(sizes, 6, torch.device("cpu"))
error, same = layer.check((1, 3))
assert error < BOUND and same
assert not Careless(**vars(layer)).check((1, 3))[1]
assert layer.error(layer.projected) > 0.1
assert layer.error(layer.found(())[0] + 1.0) == float("inf"), "z is not the convolution's"

row = line("ours", 100, 2e-4, chunks, None).split()
assert row[:4] == ["ours", "100", "200", "2.000"] and row[5:] == ["equal", "differs", "-"], row
assert "WRONG" in line("ours", 100, None, wrong, False)
print("checked")
"""


def test_its_checks_pass_ours_and_catch_what_is_wrong() -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{root}{os.pathsep}{root / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "checked", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scan"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert bench_scan.BOUND < 1e-3
