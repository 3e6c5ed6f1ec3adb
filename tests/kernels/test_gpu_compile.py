"""Every Triton kernel compiles for sm_80, sm_90 and sm_120 with the pinned Triton, within a consumer card's limits."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_SHARED_BYTES = 99 * 1024  # what a block may have on sm_86 to sm_120 consumer cards


@pytest.mark.timeout(900)  # with an empty Triton cache and busy cores; seconds otherwise
def test_every_kernel_fits_every_card() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "tests/kernels/compile_all.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    printed = json.loads(run.stdout)
    results = printed["kernels"]
    assert {name: shared for name, shared, _ in results if shared > MOST_SHARED_BYTES} == {}
    assert {name: local for name, _, local in results if local} == {}, "kernels that spill registers"
    compiled = {name.split()[0] for name, _, _ in results}
    assert compiled == kernel_names(), "compile_all.py must name every kernel"
    orders: dict[str, set[str]] = {}
    for form, _, layouts in printed["sums"]:
        assert layouts, f"no sum was found in the code of {form}"
        orders.setdefault(form, set()).add(str(layouts))
    assert {form: found for form, found in orders.items() if len(found) > 1} == {}, "sums go by the number of tokens"


def kernel_names() -> set[str]:
    """Functions with a jit decorator whose name ends in _kernel."""
    names = set()
    for path in (ROOT / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel") and node.decorator_list:
                names.add(node.name)
    return names
