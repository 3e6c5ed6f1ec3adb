"""The scan benchmark's checks find a wrong scan. In a process of its own: kernels in other tests may be compiled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.tools import bench_scan, cli

SCRIPT = """
import torch
from kernels.mamba import chunk_scan
from kernels.mamba.gpu import Sizes
from services.tools.bench_scan import BOUND, Prompt, verify

def forgetful(x, dt, b, c, a, d, dt_bias, state, first, sizes, workspace, out):
    state.zero_() if first else None
    chunk_scan.chunk_scan(x, dt, b, c, a, d, dt_bias, state, first, sizes, workspace, out)

def restless(x, dt, b, c, a, d, dt_bias, state, first, sizes, workspace, out):
    chunk_scan.chunk_scan(x, dt, b, c, 1.001 * a, d, dt_bias, state, first, sizes, workspace, out)

prompt = Prompt.random(Sizes(heads=2, head_dim=5, state=7, groups=1), 150, torch.device("cpu"))
error, same = verify(chunk_scan.chunk_scan, prompt)
assert error < BOUND and same, (error, same)
assert not verify(forgetful, prompt)[1]
assert verify(restless, prompt)[0] > BOUND
print("checked")
"""


def test_its_checks_pass_ours_and_catch_what_is_wrong() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=root, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "checked", done.stderr[-2000:]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "scan"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
    assert bench_scan.BOUND < 1e-3
