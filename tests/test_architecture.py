"""Imports point down, files stay small, generated stubs are fresh."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MOST_LINES = 400

SHARED = ("services.settings", "services.garbage", "services.unbroken", "services.vocabulary")

# What each part may import of this project. Longest prefix wins.
ALLOWED = {
    "kernels": {"kernels"},
    "services.settings": set(),
    "services.garbage": set(),
    "services.unbroken": set(),
    "services.vocabulary": {"services.vocabulary_trial"},
    "services.vocabulary_trial": set(),
    "services.rpc": {"services.rpc"},
    "services.engine": {"services.engine", "services.rpc", *SHARED, "kernels"},
    "services.api": {"services.api", "services.rpc", *SHARED},
    "services.tools": {
        "services.tools",
        "services.engine",
        "services.api",
        "services.rpc",
        *SHARED,
        "kernels",
    },
}
TORCH_FREE = ("services.api", "services.rpc", *SHARED, "services.vocabulary_trial")


def modules() -> list[Path]:
    return [p for top in ("kernels", "services") for p in sorted((ROOT / top).rglob("*.py"))]


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def within(name: str, parts: set[str] | tuple[str, ...]) -> bool:
    return any(name == part or name.startswith(part + ".") for part in parts)


def forbidden_imports(module: str, names: set[str]) -> list[str]:
    if module == "services":
        return sorted(n for n in names if within(n, {"kernels", "services"}))
    owner = max((part for part in ALLOWED if within(module, {part})), key=len)
    bad = [n for n in names if within(n, {"kernels", "services"}) and n != "services" and not within(n, ALLOWED[owner])]
    if within(module, TORCH_FREE):
        bad += [n for n in names if within(n, {"torch", "triton", "transformers"})]
    return sorted(bad)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert forbidden_imports(module, imported_names(path)) == []


def test_the_import_check_can_fail() -> None:
    assert forbidden_imports("kernels.block", {"services.engine.model"})
    assert forbidden_imports("services.api.app", {"services.engine.engine"})
    assert forbidden_imports("services.api.app", {"torch"})
    assert forbidden_imports("services.engine.model", {"services.tools.cli"})
    assert not forbidden_imports("services.engine.model", {"torch", "kernels.block"})


def test_no_file_is_too_long() -> None:
    sources = [
        p
        for top in ("kernels", "services", "tests")
        for p in (ROOT / top).rglob("*")
        if p.suffix in {".py", ".cpp", ".h"}
    ]
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources if "services/rpc" not in str(p)
    }
    assert {name: n for name, n in lengths.items() if n > MOST_LINES} == {}


def test_there_is_no_drawer() -> None:
    drawers = {"utils", "util", "common", "misc", "helpers"}
    assert [str(p) for p in modules() if drawers & set(p.relative_to(ROOT).with_suffix("").parts)] == []


def test_stubs_are_fresh(tmp_path: Path) -> None:
    (tmp_path / "services/rpc").mkdir(parents=True)
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run(
        [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            "-I",
            "services/rpc=proto/thimble/v1",
            *outputs,
            "services/rpc/engine.proto",
        ],
        cwd=ROOT,
        check=True,
    )
    for fresh in (tmp_path / "services/rpc").iterdir():
        assert fresh.read_text() == (ROOT / "services/rpc" / fresh.name).read_text(), (
            f"{fresh.name} is stale: make proto"
        )


def test_no_two_test_files_share_a_name() -> None:
    """Two once did: pytest collects both only as long as it has not seen the first."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []
