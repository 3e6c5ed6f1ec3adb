"""A training step as one CUDA graph: the GPU gets its thousands of small kernels at once and never waits for Python to
launch them. Owns the batch that the graph reads and its memory; knows nothing of what a step does.

Nothing in the step may wait for the GPU, copy from the host or have a size that depends on values. A capture that
fails leaves torch's random numbers of the process unusable: that is raised, and the run goes on from its file without.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from services.tools.train_vision.batches import Batch

Step = Callable[[Batch], tuple[Tensor, Tensor]]
_WARM_STEPS = 3  # whatever is made when first used is made before


class CaptureError(Exception):
    """The step cannot be a graph here. The message says what to do."""

    code = "no_capture"


class Captured:
    def __init__(self, step: Step, batch: Batch) -> None:
        """Takes the step with `batch` a few times, then captures it. Raises CaptureError."""
        self._batch = Batch(*(part.clone() for part in batch.tensors()))
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_STEPS):
                step(self._batch)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._out = step(self._batch)
        except Exception as error:  # whatever is no part of a graph
            why = f"{type(error).__name__}: {str(error)[:300]}"
            raise CaptureError(f"the step is no CUDA graph here: {why}; go on with --no-graph") from error

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the step gives; overwritten by the next call. `batch` as large as the first one."""
        for kept, part in zip(self._batch.tensors(), batch.tensors(), strict=True):
            kept.copy_(part)
        self._graph.replay()
        return self._out
