"""Which chunk scan is used: ours, or mamba-ssm's where it is installed; loaded, configured and cut as it must be."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from gpu_checks import here, poisoned, relative_error
from odd_memory import randn
from test_chunk_scan import CHUNK_BOUND, SMALL, Inputs, recurrence

from kernels.mamba import chunk_scan, package
from kernels.mamba.chunks import CHUNK

CUDA = torch.device("cuda")
INSTALLED = importlib.util.find_spec(package.NAME) is not None

# What a distribution without the compiled extension looks like: the parent cannot be imported, the modules can.
PARENT = "import selective_scan_cuda"
COMBINED = """
import torch
from kernels.mamba.reference import selective_scan
from mamba_ssm.ops.triton import ssd_bmm, ssd_chunk_scan, ssd_chunk_state, ssd_state_passing
calls = []
def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, dt_bias, initial_states, dt_softplus, dt_limit,
                              return_final_states):
    assert dt_softplus and return_final_states and dt_limit == (0.0, float("inf"))
    import triton
    calls.append((x.shape[1], chunk_size, triton.knobs.language.fp32_default))
    state = initial_states[0].clone()
    return selective_scan(x[0], dt[0], B[0], C[0], A, D, dt_bias, state)[None], state[None]
"""
KERNELS = {
    "ssd_bmm": {"_bmm_chunk_fwd_kernel": package.TILE},
    "ssd_chunk_scan": {"_chunk_scan_fwd_kernel": package.TILE},
    "ssd_chunk_state": {"_chunk_cumsum_fwd_kernel": {"BLOCK_SIZE_H": 1}, "_chunk_state_fwd_kernel": package.TILE},
    "ssd_state_passing": {"_state_passing_fwd_kernel": {"BLOCK_SIZE": 64}},
}


@pytest.fixture
def other_modules(monkeypatch: pytest.MonkeyPatch):
    """Whatever is imported under the package's name goes again."""
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == package.NAME}
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == package.NAME]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other_modules) -> Path:
    """A package of that name on the path, with kernels that have two configurations each and a scan that counts."""
    folder = tmp_path / "mamba_ssm/ops/triton"
    folder.mkdir(parents=True)
    (tmp_path / "mamba_ssm/__init__.py").write_text(PARENT)
    for parent in (folder, folder.parent):
        (parent / "__init__.py").touch()
    (folder / "ssd_combined.py").write_text(COMBINED)
    for name, kernels in KERNELS.items():
        lines = ["import types, triton"]
        for kernel, keys in kernels.items():
            two = f"[triton.Config({keys!r}), triton.Config({keys!r})]"
            lines.append(f"{kernel} = types.SimpleNamespace(configs={two})")
        (folder / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", {"mamba-ssm": "9.9"}.__getitem__)
    return folder


def test_without_a_gpu_or_the_package_ours_is_used() -> None:
    ours = package.ChunkScan(chunk_scan.FINGERPRINT, chunk_scan.chunk_scan)
    assert package.choose(torch.device("cpu")) == ours
    assert INSTALLED or package.choose(CUDA) == ours


def test_it_is_loaded_behind_an_empty_parent_with_one_configuration_each(distribution: Path) -> None:
    with pytest.raises(ImportError, match="selective_scan_cuda"):
        importlib.import_module("mamba_ssm")
    chosen = package.choose(CUDA)
    assert chosen.fingerprint == f"mamba-ssm 9.9 tf32x3 chunk{CHUNK} 64x64x32x4x2"
    assert chosen.fingerprint != chunk_scan.FINGERPRINT
    for (module, name), wanted in package.CONFIGURATIONS.items():
        (only,) = getattr(sys.modules[f"mamba_ssm.ops.triton.{module}"], name).configs
        assert (only.kwargs, only.num_warps, only.num_stages) == (wanted, 4, 2)


def test_a_piece_that_begins_within_a_chunk_is_cut_at_its_end(distribution: Path) -> None:
    scan = package.choose(CUDA).scan
    calls = sys.modules[package.MODULE].calls  # type: ignore[attr-defined]
    for first, tokens, expected in [(0, 200, [200]), (100, 200, [28, 172]), (100, 9, [9]), (128, 1, [1])]:
        calls.clear()
        inputs = Inputs(tokens, SMALL)
        x, dt, b, c, a, d, dt_bias = inputs.piece(0, tokens)
        state, out = inputs.state.clone(), torch.full((tokens, SMALL.inner), torch.nan)
        workspace = chunk_scan.Workspace(tokens, SMALL.heads, torch.device("cpu"))
        scan(x.flatten(1), dt, b.flatten(1), c.flatten(1), a, d, dt_bias, state, first, SMALL, workspace, out)
        assert calls == [(length, CHUNK, "tf32x3") for length in expected]
        found, after = recurrence(inputs, tokens)
        assert torch.equal(out, found.flatten(1))
        assert torch.equal(state, after)


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("ssd_combined.py", "raise RuntimeError('no such symbol')", "cannot be imported: no such symbol"),
        ("ssd_bmm.py", "", "its kernel _bmm_chunk_fwd_kernel is not the one that is known"),
        (
            "ssd_state_passing.py",
            "import types, triton\n"
            "_state_passing_fwd_kernel = types.SimpleNamespace(configs=[triton.Config({'N': 1})])",
            "its kernel _state_passing_fwd_kernel is not",
        ),
    ],
)
def test_one_that_is_not_known_is_not_used(distribution: Path, caplog, file: str, text: str, reason: str) -> None:
    (distribution / file).write_text(text)
    assert package.choose(CUDA).fingerprint == chunk_scan.FINGERPRINT
    assert reason in caplog.text
    with pytest.raises(package.PackageError, match=reason):
        package.load()


@pytest.mark.skipif(not INSTALLED, reason="mamba-ssm is not installed")
def test_the_real_package_is_loaded(other_modules) -> None:
    chosen = package.choose(CUDA)
    assert chosen.fingerprint.startswith(f"mamba-ssm {importlib.metadata.version('mamba-ssm')} ")
    for module, name in package.CONFIGURATIONS:
        assert len(getattr(sys.modules[f"mamba_ssm.ops.triton.{module}"], name).configs) == 1
    combined = sys.modules[package.MODULE].mamba_chunk_scan_combined  # type: ignore[attr-defined]
    named = ("D", "dt_bias", "initial_states", "dt_softplus", "dt_limit", "return_final_states")
    assert set(named) <= set(inspect.signature(combined).parameters)


@pytest.mark.gpu
@pytest.mark.skipif(not (INSTALLED and torch.cuda.is_available()), reason="needs mamba-ssm and a GPU")
def test_the_real_package_is_the_recurrence(other_modules) -> None:
    scan, tokens, first = package.load().scan, 300, 77
    inputs = Inputs(tokens, SMALL)
    x, dt, b, c, a, d, dt_bias = (here(tensor) for tensor in inputs.piece(0, tokens))
    edge = 2 * CHUNK - first
    results = []
    for cuts in ((0, tokens), (0, edge, tokens)):
        state, out = here(inputs.state.clone()), poisoned(tokens, SMALL.inner)
        workspace = chunk_scan.Workspace(tokens, SMALL.heads, CUDA)
        for start, end in pairwise(cuts):
            rows = (tensor[start:end].flatten(1) for tensor in (x, dt, b, c))
            scan(*rows, a, d, dt_bias, state, first + start, SMALL, workspace, out[start:end])
        results.append((out.cpu(), state.cpu()))
    expected, expected_state = recurrence(inputs, tokens)
    assert relative_error(results[0][0], expected.flatten(1)) < 10 * CHUNK_BOUND
    assert relative_error(results[0][1], expected_state) < 10 * CHUNK_BOUND
    for whole, cut in zip(*results, strict=True):
        assert torch.equal(whole, cut)
    assert relative_error(results[0][0], randn(tokens, SMALL.inner)) > 0.1
