"""What a ring leaves to streams and events: whatever order a GPU takes within them, every reader finds its block, its
table and no other's. A driver that is late in any way that it may be stands for the GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.build import compiler

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch would take the late driver for its GPU's own")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("late")
    command = [compiler()[0], "-std=c++17", "-O1", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*command, str(HERE / "late_driver.cpp")], check=True)
    return folder


def swept(late: Path, forgotten: int) -> tuple[int, int]:
    """Lookups read, and wrong ones."""
    environment = os.environ | {
        "LD_LIBRARY_PATH": str(late),
        "PYTHONPATH": os.pathsep.join(map(str, (HERE.parents[1], HERE))),
    }
    command = [sys.executable, str(HERE / "ring_under_late_driver.py"), "40", str(forgotten)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    read, wrong = map(int, done.stdout.split())
    return read, wrong


def test_in_any_order_that_streams_and_events_allow(late: Path) -> None:
    read, wrong = swept(late, 0)
    assert read > 10_000
    assert wrong == 0


def test_a_forgotten_wait_would_show(late: Path) -> None:
    assert swept(late, 8)[1] > 0
