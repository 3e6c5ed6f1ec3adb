"""The interpreter's product of matrices: a row's bits wherever it is, by every kernel of OpenBLAS, and what it is."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import dot_by_rows
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

CUT = """
import numpy as np
from dot_by_rows import dot

draw = np.random.default_rng(0).standard_normal
for product in (dot, lambda a, b: (a @ b)):
    same = True
    for inner in (16, 48, 64, 128):
        for columns in (16, 64, 80):
            a, b = draw((128, inner), np.float32), draw((inner, columns), np.float32)
            whole = product(a, b)
            for rows in (1, 3, 16, 64):
                parts = [product(a[first : first + rows], b) for first in range(0, 128, rows)]
                same &= np.array_equal(whole, np.concatenate(parts))
    print(same)
"""


def cut(**environment: str) -> list[str]:
    """Whether rows were the same however they were cut: of ours, of numpy's."""
    path = os.pathsep.join((str(Path(dot_by_rows.__file__).parent), *sys.path))
    return subprocess.run(
        [sys.executable, "-c", CUT],
        env={**os.environ, "PYTHONPATH": path, **environment},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout.split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the name of one of OpenBLAS' kernels for x86")
def test_rows_do_not_depend_on_one_another() -> None:
    ours, numpys = cut(OPENBLAS_CORETYPE="Nehalem")  # every x86 runs that one
    assert ours == "True"
    assert numpys == "False", "not needed any more"


def test_rows_do_not_depend_on_one_another_by_this_machine_s_kernel() -> None:
    assert cut()[0] == "True"


def test_it_is_the_product() -> None:
    draw = np.random.default_rng(1).standard_normal
    a, b = draw((3, 16, 40), np.float32), draw((3, 40, 24), np.float32)
    wanted = np.einsum("bmk,bkn->bmn", a.astype(np.float64), b.astype(np.float64))
    assert np.abs(dot_by_rows.dot(a, b) - wanted).max() < 1e-12
    assert dot_by_rows.dot(a[0], b[0]).shape == (16, 24)


@triton.jit
def product(a, b, onto, out, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)
    start = tl.load(onto + at)
    if WHOLE:
        tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), start, out_dtype=tl.int32))
    else:
        tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), start))


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled, not interpreted")
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
def test_a_kernel_s_dot_is_it(kind: torch.dtype) -> None:
    made = torch.Generator().manual_seed(2)

    def drawn() -> Tensor:
        return (torch.randn(16, 16, generator=made) * 4).to(kind)

    sums = torch.float32 if kind.is_floating_point else torch.int32
    a, b, onto, out = drawn(), drawn(), torch.arange(256, dtype=sums).view(16, 16), torch.empty(16, 16, dtype=sums)
    product[1,](a, b, onto, out, WHOLE=not kind.is_floating_point)
    wanted = (a.double() @ b.double()).to(sums) + onto
    assert torch.equal(out, wanted) if kind != torch.float32 else torch.allclose(out, wanted, rtol=1e-6)
