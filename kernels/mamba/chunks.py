"""The scan of many tokens, a chunk at a time: the formulation that chunk_scan.py follows in Triton, in plain torch.

Formula: Dao & Gu 2024, section 6 (block decomposition). Within a chunk, with A_i the sum of a step up to and with token
i, and S the state before the chunk: y_i = e^A_i S c_i + sum over j <= i of e^(A_i - A_j) (c_i b_j) step_j x_j + d x_i.
Behind it, with A the last of the sums, S becomes e^A S + sum over j of e^(A - A_j) step_j x_j outer b_j.

It equals reference.py's recurrence up to rounding, not in bits. Chunks begin at absolute positions that are multiples
of CHUNK, whatever the first token of a call: pieces of a prompt that are cut there give the same bits as the whole. A
cut elsewhere begins a shorter chunk, with its own rounding.

The sums A are integers, 2^-32 a unit: exact in any order, and so are their differences, however far A has grown.
"""

import torch
from torch import Tensor

from kernels.elementary.reference import exp, softplus

CHUNK = 128
UNIT = 2.0**32
LEAST = -(2.0**14)  # of one token; e^-16384 is 0, and CHUNK of them fit 53 bits


def chunk_scan(
    x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, dt_bias: Tensor, state: Tensor, first: int
) -> Tensor:
    """As reference.selective_scan, `first` being the absolute position of the first of the M tokens."""
    outputs, start = [], 0
    while start < len(x):
        offset = (first + start) % CHUNK
        end = min(start + CHUNK - offset, len(x))
        step = padded(softplus(dt[start:end] + dt_bias), offset)
        inputs = padded(x[start:end], offset)
        read_in, read_out = padded(b[start:end], offset), padded(c[start:end], offset)
        y = _chunk(inputs, step, read_in, read_out, a, d, state)
        outputs.append(y[offset : offset + end - start])
        start = end
    return torch.cat(outputs)


def padded(rows: Tensor, offset: int) -> Tensor:
    """[CHUNK, ...] with the rows from `offset`, zeros elsewhere: a step of zero neither decays nor adds."""
    whole = rows.new_zeros(CHUNK, *rows.shape[1:])
    whole[offset : offset + len(rows)] = rows
    return whole


def _chunk(x: Tensor, step: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, state: Tensor) -> Tensor:
    heads = x.shape[1]
    sums = ((step * a).clamp(min=LEAST) * UNIT).long().cumsum(0).T  # [heads, CHUNK]
    x, step = x.transpose(0, 1), step.T
    b, c = (tensor.transpose(0, 1).repeat_interleave(heads // tensor.shape[1], dim=0) for tensor in (b, c))
    later = _decay(sums[:, :, None] - sums[:, None, :]).tril()  # [heads, i, j]
    mixed = (c @ b.transpose(1, 2)) * later * step[:, None, :] @ x
    y = (c @ state.transpose(1, 2)) * _decay(sums)[:, :, None] + mixed + d[:, None, None] * x
    kept = _decay(sums[:, -1:] - sums) * step
    state.copy_(state * _decay(sums[:, -1])[:, None, None] + (x * kept[:, :, None]).transpose(1, 2) @ b)
    return y.transpose(0, 1)


def _decay(sums: Tensor) -> Tensor:
    return exp(sums.clamp(max=0).float() * (1 / UNIT))
