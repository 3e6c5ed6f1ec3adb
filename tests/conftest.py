"""Fixtures for every test: the demo checkpoint and its store, made once a session.

Without a GPU the Triton kernels run in Triton's interpreter. That is chosen when a kernel is defined, so before
anything else of ours is imported, whichever test comes first.
"""

import os
import random
from collections.abc import Generator
from pathlib import Path

import pytest

# Before numpy comes along. Its threads spin while they wait: a third of the time of all kernels that multiply matrices.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Nothing here speaks TLS, but every client would first read all of the system's certificates: 35 ms for each of a
# thousand. This folder has none.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)

import dot_by_rows
import quick_interpreter
from schedule import pytest_collection_modifyitems, pytest_xdist_make_scheduler  # noqa: F401

from services import garbage
from services.engine.experts.store import Store
from services.tools.repack import repack

# As in the engine. torch's threads spin while they wait for one another: on a busy machine tests take ten times longer.
torch.set_num_threads(1)
quick_interpreter.install()
dot_by_rows.install()

DEMO = Path(__file__).parent.parent / "demo"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules come along and stay, as when a service begins."""
    with garbage.not_looked_for():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """What is drawn from a process's own generators is the same, whichever tests came before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The committed demo checkpoint. Read only."""
    return DEMO


@pytest.fixture(scope="session")
def demo_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The demo repacked. Shared by the session: a test that damages a store copies it first."""
    return repack(DEMO, tmp_path_factory.mktemp("demo") / "store", say=lambda _: None)
