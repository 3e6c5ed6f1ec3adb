"""Triton's interpreter without what it does over and over; all that a kernel computes is left as it is.

For a launch it puts its own functions in the place of the language's. It does so anew at every call of a function
inside a kernel, thousands of times a test, and looks through the same modules each time: that was half of all its time.
Here a launch replaces once, undoes it once, and what there is to replace is looked up once. It also works out of all
sums of integers whether they overflow, and then says nothing, since nobody can ask it to (`options.debug`): not here.
And what follows from a tensor's shape is worked out once for a shape, what follows from two types once for the two:
shapes and types that are the same, as nearly all are, were compared number by number, each made an object for it.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_np_dtype = interpreter._get_np_dtype
_launch = interpreter.GridExecutor.__call__
_block_type = tl.block_type.__init__
_same_type = tl.dtype.__eq__
_broadcast = TritonSemantic.broadcast_impl_value
_computed = TritonSemantic.computation_type_impl
_computed_types: dict[tuple[Any, ...], tl.dtype] = {}
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
        (interpreter, "_patch_attr", _patch_attr),
        (interpreter, "_patch_lang", _patch_lang_once),
        (interpreter, "_get_np_dtype", _np_dtype_of),
        (interpreter.GridExecutor, "__call__", _launch_replacing_once),
        (interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=options.debug)),
        (tl.tensor, "__init__", _init_tensor),
        (tl.block_type, "__init__", _init_block_type),
        (tl.dtype, "__eq__", _is_same_type),
        (TritonSemantic, "broadcast_impl_value", _broadcast_impl_value),
        (TritonSemantic, "computation_type_impl", _computation_type_impl),
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


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    scope.set_attr(obj, name, _meant(member))


@cache
def _meant(member: Callable[..., Any]) -> Callable[..., Any]:
    """The language's function with the interpreter's meaning, whatever meaning it is called with."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    return replaced


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


def _is_same_type(self: Any, other: Any) -> bool:
    return self is other or bool(_same_type(self, other))


def _computation_type_impl(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div: bool) -> Any:
    key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div)
    if key not in _computed_types:
        _computed_types[key] = _computed(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div)
    return _computed_types[key]


def _broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
    if lhs.type.is_block() and rhs.type.is_block():
        left, right = tuple(lhs.type.shape.values), tuple(rhs.type.shape.values)
        if left == right:
            return lhs, rhs
        common = _common(left, right)
        if common is not None:
            return self.broadcast_impl_shape(lhs, common), self.broadcast_impl_shape(rhs, common)
    return _broadcast(self, lhs, rhs)


@cache
def _common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of both with sizes of one made larger; None where there is none, or not as many dimensions."""
    if len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True)):
        return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
    return None


ORIGINAL = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements()]
