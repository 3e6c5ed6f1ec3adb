"""The tree is drawn as it is, every error has a code of its own, and the map to gRPC statuses is total."""

import gc
import importlib
import pkgutil
import re

import grpc

import services.engine
from services.engine import errors
from services.engine.errors import EngineError
from services.engine.server import STATUS


def whole_tree() -> list[type[EngineError]]:
    """Also what another module of the engine may have added."""
    for module in pkgutil.walk_packages(services.engine.__path__, "services.engine."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return EngineError.tree()


def test_every_error_has_a_status_and_a_code_of_its_own() -> None:
    tree = whole_tree()
    assert set(STATUS) == set(tree)
    assert len({kind.code for kind in tree}) == len(tree)
    assert all(re.fullmatch("[a-z_]+", kind.code) for kind in tree)
    assert grpc.StatusCode.OK not in STATUS.values()
    assert grpc.StatusCode.UNKNOWN not in STATUS.values()


def test_the_drawing_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = re.findall(r"^[│├└─ ]*(\w+Error)\b", errors.__doc__, re.MULTILINE)
    assert drawn == [kind.__name__ for kind in whole_tree()]


def test_a_stray_error_would_be_found() -> None:
    class StrayError(EngineError):
        code = "stray"

    assert set(whole_tree()) - set(STATUS) == {StrayError}
    del StrayError
    gc.collect()
    assert set(whole_tree()) == set(STATUS)
