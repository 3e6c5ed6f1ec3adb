"""What a context sets aside, lowered through a driver that stands for CUDA's."""

import ctypes
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.engine.gpu import limits


@pytest.mark.parametrize("refused", [(), (limits.STACK,)], ids=str)
def test_all_limits_are_lowered(refused: tuple[int, ...]) -> None:
    found: dict[int, int] = {}

    def set_limit(limit: Any, size: Any) -> int:
        found[limit.value] = size.value
        return 1 if limit.value in refused else 0

    driver = cast(ctypes.CDLL, SimpleNamespace(cuCtxSetLimit=set_limit))
    assert limits.lower(driver) == (not refused)
    assert found == limits.LEAST_BYTES
