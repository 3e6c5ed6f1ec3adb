"""Pillow draws noise from C's own generator: here it is the same in each test, whichever tests came before."""

import ctypes

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    ctypes.CDLL(None).srand(1)  # as in a new process
