"""What a GPU engine needs beside the GPU: said before anything is loaded, not by a compiler's traceback."""

import shutil
import sysconfig
from pathlib import Path

import pytest

from services.engine.errors import DeviceError
from services.engine.gpu.usable import check_build_tools


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_with_a_compiler_and_headers_nothing_is_missing(headers: Path) -> None:
    (headers / "Python.h").touch()
    check_build_tools()


def test_missing_headers_are_named(headers: Path) -> None:
    with pytest.raises(DeviceError, match=r"Python\.h is not there: install python3-dev"):
        check_build_tools()


def test_a_missing_compiler_is_named(headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (headers / "Python.h").touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match="install gcc"):
        check_build_tools()
    monkeypatch.setenv("CC", "cc")
    check_build_tools()
