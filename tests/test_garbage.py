"""Imports are not gone through for cycles, and the collector goes on afterwards."""

import gc
import subprocess
import sys

import pytest

from services import garbage


def test_imports_are_left_alone_and_the_collector_goes_on() -> None:
    before = gc.get_freeze_count()
    with garbage.not_looked_for():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > before


def test_it_goes_on_after_an_import_that_failed() -> None:
    with pytest.raises(ImportError), garbage.not_looked_for():
        raise ImportError
    assert gc.isenabled()


def test_programs_begin_with_that() -> None:
    """What takes long is imported by nobody before."""
    code = "import sys, services.engine.__main__, services.api.__main__, services.tools.cli; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "grpc", "fastapi"} & set(done.stdout.split())
    assert "services.garbage" in done.stdout.split()
