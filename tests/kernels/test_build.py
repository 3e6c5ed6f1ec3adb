"""The native library's build: cached by content, whole or absent, and clear when there is no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one source of its own, so that a build takes a moment and touches nothing of ours."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "ROOT", tmp_path)
    return folder


def test_the_same_sources_are_built_once(sources: Path) -> None:
    first = build.library()
    made = first.stat().st_mtime_ns
    assert build.library() == first
    assert first.stat().st_mtime_ns == made
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    second = build.library()
    assert second != first
    (sources / "used.h").write_text("// a header counts too\n")
    assert build.library() not in (first, second)


def test_a_build_that_fails_leaves_nothing_and_says_why(sources: Path, tmp_path: Path) -> None:
    (sources / "two.cpp").write_text("this is not C++\n")
    with pytest.raises(build.BuildError, match=r"two\.cpp"):
        build.library()
    assert list((tmp_path / ".build").glob("*.so")) == []


def test_without_a_compiler(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(build.BuildError, match=r"no C\+\+ compiler found.*install one"):
        build.library()
    monkeypatch.setenv("PATH", path)
    made = build.library()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.library() == made, "an image carries the library without a compiler"
    (sources / "one.cpp").write_text("// changed\n")
    with pytest.raises(build.BuildError):
        build.library()


def test_a_flag_the_compiler_does_not_know_is_left_out(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (sources / "odd.cpp").write_text("#ifdef __AVX2__\n#error built with flags that were to be left out\n#endif\n")
    monkeypatch.setitem(build.INSTRUCTION_SETS, "odd", (*build.AVX2, "-mno-such-instructions"))
    build.library()


def test_where_the_code_is_read_only_the_users_cache_is_used(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.library().parent == tmp_path / "cache/thimble"


def test_a_library_beside_read_only_code_is_used(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's code and library belong to root; the service runs as somebody else, with or without a compiler."""
    made = build.library()
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert build.library() == made
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.library() == made


def test_nowhere_to_build(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    (tmp_path / "cache").write_text("a file where a folder is needed")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(build.BuildError, match=r"cannot be built: neither .* can be written"):
        build.library()


def test_processes_that_build_at_once_agree(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/one.cpp").write_text('extern "C" int one() { return 1; }\n')
    code = (
        "import pathlib, sys; from kernels import build; build.ROOT = pathlib.Path(sys.argv[1]); print(build.library())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1
    assert all(process.returncode == 0 for process in processes)
    assert Path(answers.pop().strip()).exists()
    assert sorted(path.suffix for path in (tmp_path / ".build").iterdir()) == ["", ".so"]  # the lock and the library
