"""How tests are shared out among the processes of `pytest -n`: the longest first, and what shares a server together.

A file is one piece, so that what it prepares is prepared once; so is a folder whose tests ask the same servers. The
pieces that take longest come first: none is left for the end, when the others have nothing to do any more.
"""

from pathlib import PurePosixPath
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# Folders below tests/, the order of their pieces. What is not named comes last: files of many short tests.
ORDER = ("drills", "e2e", "contract", "kernels", "engine", "tools", "vision", "train")
SHARED = ("e2e", "contract")  # a session's fixtures here are servers


def folder_of(nodeid: str) -> str:
    parts = PurePosixPath(nodeid.partition("::")[0]).parts
    return next((part for part in parts[:-1] if part != "tests"), "")


def piece_of(nodeid: str) -> str:
    folder = folder_of(nodeid)
    return folder if folder in SHARED else nodeid.partition("::")[0]


def place_of(nodeid: str) -> int:
    folder = folder_of(nodeid)
    return ORDER.index(folder) if folder in ORDER else len(ORDER)


class Pieces(LoadScopeScheduling):  # type: ignore[misc]
    """In the order in which they were collected."""

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return Pieces(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: place_of(item.nodeid))
