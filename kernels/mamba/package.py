"""mamba-ssm's chunk scan on a GPU where that package is installed, else ours; and which of the two it is.

Only its Triton modules are used, which need no compiled extension: they are imported behind a parent package that is
empty, because the real one imports the extension. Nothing is tuned while it runs: each kernel has one configuration,
and its products of matrices take float32 in three TF32 parts, as ours do.
"""

import importlib
import importlib.metadata
import importlib.util
import logging
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.mamba import chunk_scan as ours
from kernels.mamba.chunks import CHUNK
from kernels.mamba.gpu import Sizes

NAME, MODULE = "mamba_ssm", "mamba_ssm.ops.triton.ssd_combined"
TILE = {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}
WARPS, STAGES = 4, 2
CONFIGURATIONS = {  # module and kernel -> its one configuration; all fit 99 KiB of shared memory
    ("ssd_chunk_state", "_chunk_cumsum_fwd_kernel"): {"BLOCK_SIZE_H": 8},
    ("ssd_chunk_state", "_chunk_state_fwd_kernel"): TILE,
    ("ssd_state_passing", "_state_passing_fwd_kernel"): {"BLOCK_SIZE": 256},
    ("ssd_bmm", "_bmm_chunk_fwd_kernel"): TILE,
    ("ssd_chunk_scan", "_chunk_scan_fwd_kernel"): TILE,
}

log = logging.getLogger(__name__)

Scan = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, Sizes, ours.Workspace, Tensor], None
]


@dataclass(frozen=True)
class ChunkScan:
    """`scan` takes what chunk_scan.chunk_scan takes. Equal fingerprints, equal bits on equal cards."""

    fingerprint: str
    scan: Scan


class PackageError(ImportError):
    """mamba-ssm is installed but of no use. The message says why."""


def choose(device: torch.device) -> ChunkScan:
    """Their scan if `device` is a GPU and the package is there and known, else ours. Says so if it is not known."""
    if device.type == "cuda" and (NAME in sys.modules or importlib.util.find_spec(NAME) is not None):
        try:
            return load()
        except PackageError as error:
            log.warning("mamba-ssm is installed but not used: %s", error)
    return ChunkScan(ours.FINGERPRINT, ours.chunk_scan)


def load() -> ChunkScan:
    """Their scan, configurations fixed. Raises PackageError."""
    module = _import()
    for (where, name), wanted in CONFIGURATIONS.items():
        kernel = getattr(sys.modules[f"{NAME}.ops.triton.{where}"], name, None)
        known = getattr(kernel, "configs", None)
        if kernel is None or not known or set(known[0].kwargs) != set(wanted):
            raise PackageError(f"its kernel {name} is not the one that is known; 2.3.2.post1 is")
        kernel.configs = [triton.Config(dict(wanted), num_warps=WARPS, num_stages=STAGES)]
    tile = "x".join(map(str, (*TILE.values(), WARPS, STAGES)))
    try:
        version = importlib.metadata.version("mamba-ssm")
    except importlib.metadata.PackageNotFoundError as error:
        raise PackageError("it has no metadata that tells its version") from error
    return ChunkScan(f"mamba-ssm {version} tf32x3 chunk{CHUNK} {tile}", _scan_with(module.mamba_chunk_scan_combined))


def _import() -> types.ModuleType:
    before = set(sys.modules)
    if NAME not in sys.modules:
        spec = importlib.util.find_spec(NAME)
        if spec is None or spec.submodule_search_locations is None:
            raise PackageError("there is no package of that name")
        parent = types.ModuleType(NAME)
        parent.__path__ = list(spec.submodule_search_locations)
        sys.modules[NAME] = parent
    try:
        return importlib.import_module(MODULE)
    except Exception as error:
        for name in set(sys.modules) - before:
            if name == NAME or name.startswith(f"{NAME}."):
                del sys.modules[name]
        raise PackageError(f"{MODULE} cannot be imported: {error}") from error


def _scan_with(combined: Callable[..., Any]) -> Scan:
    def scan(
        x: Tensor,
        dt: Tensor,
        b: Tensor,
        c: Tensor,
        a: Tensor,
        d: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        first: int,
        sizes: Sizes,
        workspace: ours.Workspace,
        out: Tensor,
    ) -> None:
        """Their chunks begin with a call: a first piece up to the next multiple of CHUNK is a call of its own."""
        rows, edge = len(x), -first % CHUNK
        for start, end in ((0, min(edge, rows)), (min(edge, rows), rows)):
            if start == end:
                continue
            tokens = end - start
            with torch.no_grad(), triton.knobs.language.scope():
                triton.knobs.language.fp32_default = "tf32x3"
                y, after = combined(
                    x[start:end].view(1, tokens, sizes.heads, sizes.head_dim),
                    dt[None, start:end],
                    a,
                    b[start:end].view(1, tokens, sizes.groups, sizes.state),
                    c[start:end].view(1, tokens, sizes.groups, sizes.state),
                    CHUNK,
                    D=d,
                    dt_bias=dt_bias,
                    initial_states=state[None],
                    dt_softplus=True,
                    dt_limit=(0.0, math.inf),
                    return_final_states=True,
                )
            out[start:end] = y[0].flatten(1)
            state.copy_(after[0])

    return scan
