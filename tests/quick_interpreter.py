"""Triton's interpreter without what it does over and over; all that a kernel computes is left as it is.

For a launch it puts its own functions in the place of the language's. It does so anew at every call of a function
inside a kernel, thousands of times a test, and looks through the same modules each time: that was half of all its time.
Here a launch replaces once, undoes it once, and what there is to replace is looked up once. It also works out of all
sums of integers whether they overflow, and then says nothing, since nobody can ask it to (`options.debug`): not here.
And what follows from a tensor's shape is worked out once for a shape.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_np_dtype = interpreter._get_np_dtype
_launch = interpreter.GridExecutor.__call__
_block_type = tl.block_type.__init__
_np_dtypes: dict[str, np.dtype[Any]] = {}


class _Replaced:
    """What one launch has replaced, and for which modules."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        self.seen: set[frozenset[int]] = set()

    def undo(self) -> None:
        for scope in reversed(self.scopes):
            scope.restore()


_launches: list[_Replaced] = []


def install() -> None:
    """For the rest of this process."""
    for owner, name, value in replacements():
        setattr(owner, name, value)


def replacements() -> list[tuple[Any, str, Any]]:
    """Owner, name, and what takes the place of what is there."""
    options = interpreter.interpreter_builder.options
    return [
        (interpreter, "_patch_builtin", _patch_builtin),
        (interpreter, "_patch_lang", _patch_lang_once),
        (interpreter, "_get_np_dtype", _np_dtype_of),
        (interpreter.GridExecutor, "__call__", _launch_replacing_once),
        (interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=options.debug)),
        (tl.tensor, "__init__", _init_tensor),
        (tl.block_type, "__init__", _init_block_type),
    ]


def _launch_replacing_once(self: Any, *args: Any, **kwargs: Any) -> None:
    _launches.append(_Replaced())
    try:
        _launch(self, *args, **kwargs)
    finally:
        _launches.pop().undo()


def _patch_lang_once(function: Callable[..., Any]) -> Any:
    """Returns a scope with nothing in it: `_launch_replacing_once` undoes all, last first."""
    replaced, languages = _launches[-1], _languages(function)
    if languages not in replaced.seen:
        replaced.seen.add(languages)
        replaced.scopes.append(_patch_lang(function))
    return interpreter._LangPatchScope()


@cache
def _languages(function: Callable[..., Any]) -> frozenset[int]:
    """The language's modules that a function sees."""
    return frozenset(id(one) for one in function.__globals__.values() if one is tl or one is tl.core)


@cache
def _builtins(package: Any) -> list[str]:
    """First asked before anything in it is replaced."""
    return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if tl.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


def _np_dtype_of(type_: Any) -> np.dtype[Any]:
    if isinstance(type_, tl.block_type):
        type_ = type_.element_ty
    if isinstance(type_, tl.pointer_type):
        return np.dtype(np.uint64)
    if type_.name not in _np_dtypes:
        _np_dtypes[type_.name] = _np_dtype(type_)
    return _np_dtypes[type_.name]


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _dimensions(tuple(type.shape.values) if type.is_block() else ())


@cache
def _dimensions(shape: tuple[int, ...]) -> tuple[Any, Any]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    known, text = _block(tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    self.element_ty, self.shape, self.numel = element_ty, known.shape, known.numel
    self.name = f"<{text}, {element_ty}>"


@cache
def _block(shape: tuple[int, ...]) -> tuple[Any, str]:
    """Any block of that shape, and the shape in words. Raises for a bad one, as the original does."""
    known = object.__new__(tl.block_type)
    _block_type(known, tl.int32, list(shape))
    return known, str(known.shape)


ORIGINAL = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements()]
