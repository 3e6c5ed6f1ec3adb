"""An engine whose GPU fails, for device.py: while the file THIMBLE_DRILL_FAILS is there, a step ends as one does on a
card that is gone, so many steps after its process began as that file says ("20 60": between those).

On a GPU that is an index out of bounds, which no later call of that process survives; on a CPU, what torch would say.
"""

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import services.engine.program as program
from services.engine.gpu.decoder import Decoder
from services.engine.model import Model

FILE = "THIMBLE_DRILL_FAILS"
run, forward = Decoder.run, Model.forward
left: list[int] = []  # steps


def due() -> bool:
    """Counts a step."""
    path = Path(os.environ[FILE])
    if not path.exists():
        return False
    if not left:
        least, most = map(int, path.read_text().split())
        left.append(random.Random(os.urandom(8)).randint(least, most))
    left[0] -= 1
    return left[0] == 0


def run_or_fail(self: Decoder, rows: Sequence[Any]) -> Any:
    if due():
        torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
    return run(self, rows)


def forward_or_fail(self: Model, *args: Any, **more: Any) -> Any:
    if due():
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")
    return forward(self, *args, **more)


if __name__ == "__main__":
    Decoder.run, Model.forward = run_or_fail, forward_or_fail  # type: ignore[method-assign]
    program.STEADY_S = 0.0  # these are not failures in a row: each is meant
    sys.exit(program.main())
