"""A product of matrices for Triton's interpreter whose rows do not depend on how many there are, as on a GPU.

The interpreter asks numpy, and so whichever kernel of OpenBLAS a processor gets: in those for AVX2 alone, a row's bits
depend on its place among the others. Here each row is multiplied by itself. Sums are doubles: of products of two halves
they are exact unless numbers are very far apart, so that it does not matter either how columns are cut.
"""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """For the rest of this process."""
    interpreter.InterpreterBuilder.create_dot = _create_dot


def dot(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[..., M, K] times [..., K, N], floating: [..., M, N] of doubles. Any M, K and N."""
    wide = np.matmul(a.astype(np.float64)[..., None, :], b.astype(np.float64)[..., None, :, :])
    return np.asarray(wide[..., 0, :])


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    a_data, b_data = (_numbers(one) for one in (a, b))
    if not a.dtype.is_floating():
        product = np.matmul(a_data, b_data, dtype=d.data.dtype)
    else:
        product = dot(a_data, b_data).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _numbers(handle: Any) -> Any:
    """Its numbers: numpy has no type for those of 8 bits, nor for BF16 (where Triton's own takes the bits instead)."""
    if handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating():
        return interpreter._convert_float(handle.data, handle.dtype, tl.float16, None).view(np.float16)
    if handle.dtype == tl.bfloat16:
        return interpreter._convert_float(handle.data, handle.dtype, tl.float32, None).view(np.float32)
    return handle.data
