"""KV pages on a GPU (or in the interpreter): their formats, and the launch that adds a token's key and value to them.

Pages are BF16, or FP8 with one scale for keys and one for values (E4M3, saturating at 448 scales). The memory and the
page tables belong to the caller. One launch makes query, key and value of one to four sequences' new tokens: norm, the
three projections, the key and value rounded into the page where the token belongs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.linear.dot import project
from kernels.linear.gpu import Linear, Norm, Tiling, tiling

Tensor = torch.Tensor


@triton.jit
def to_e4m3(x):
    """float32 -> E4M3 in the low byte of an int32, nearest, ties to even; beyond 448 to 448."""
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 120 << 3: the difference of the exponents' biases
    subnormal = ((size * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.where(size < 0.015625, subnormal, normal) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def to_bf16(x):
    """float32 -> BF16 in the low half of an int32, nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)


@triton.jit
def _store_in_page(
    y, row, mask, pages, inverse_scale, tables, table_stride, lengths, tokens, ROWS: tl.constexpr,
    PAGE: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """y [T, TILE], rows of a key or value of ROWS numbers, to the last place of each sequence."""
    token = tl.minimum(tl.arange(0, y.shape[0]), tokens - 1)[:, None]
    position = tl.load(lengths + token) - 1
    page = tl.load(tables + token * table_stride + position // PAGE).to(tl.int64)
    place = pages + (page * PAGE + position % PAGE) * ROWS + row[None, :]
    if FP8:
        tl.store(place, to_e4m3(y * inverse_scale).to(tl.uint8), mask=mask)
    else:
        tl.store(place, to_bf16(y).to(tl.int16), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["x_single", "q_scales", "k_scales", "v_scales", "tables", "lengths"])
def qkv_kernel(
    x,
    x_single,
    norm_weight,
    eps,
    tokens,
    query,
    keys,
    values,
    q_weight,
    q_scales,
    q_factor,
    k_weight,
    k_scales,
    k_factor,
    v_weight,
    v_scales,
    v_factor,
    inverse_key_scale,
    inverse_value_scale,
    tables,
    table_stride,
    lengths,
    Q_ROWS: tl.constexpr,
    KV_ROWS: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    TILE: tl.constexpr,
    PAGE: tl.constexpr,
    FP8: tl.constexpr,
    K: tl.constexpr,
    T: tl.constexpr,
    UNITS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Tiles of the key, then of the value, then of the query."""
    program = tl.program_id(0)
    token = tl.arange(0, T)[:, None]
    KV_PROGRAMS: tl.constexpr = (KV_ROWS + TILE - 1) // TILE
    if program >= 2 * KV_PROGRAMS:
        row = (program - 2 * KV_PROGRAMS) * TILE + tl.arange(0, TILE)
        y = project(
            x, x_single, norm_weight, eps, q_weight, q_scales, q_factor, tl.minimum(row, Q_ROWS - 1), tokens, K,
            Q_FORMAT, True, T, UNITS, AHEAD,
        )  # fmt: skip
        tl.store(query + (token * Q_ROWS + row[None, :]), y, mask=(token < tokens) & (row < Q_ROWS)[None, :])
    elif program >= KV_PROGRAMS:
        row = (program - KV_PROGRAMS) * TILE + tl.arange(0, TILE)
        mask = (token < tokens) & (row < KV_ROWS)[None, :]
        y = project(
            x, x_single, norm_weight, eps, v_weight, v_scales, v_factor, tl.minimum(row, KV_ROWS - 1), tokens, K,
            V_FORMAT, True, T, UNITS, AHEAD,
        )  # fmt: skip
        _store_in_page(
            y, row, mask, values, inverse_value_scale, tables, table_stride, lengths, tokens, KV_ROWS, PAGE, FP8
        )
    else:
        row = program * TILE + tl.arange(0, TILE)
        mask = (token < tokens) & (row < KV_ROWS)[None, :]
        y = project(
            x, x_single, norm_weight, eps, k_weight, k_scales, k_factor, tl.minimum(row, KV_ROWS - 1), tokens, K,
            K_FORMAT, True, T, UNITS, AHEAD,
        )  # fmt: skip
        _store_in_page(y, row, mask, keys, inverse_key_scale, tables, table_stride, lengths, tokens, KV_ROWS, PAGE, FP8)


@dataclass(frozen=True)
class Pages:
    """One layer's pages [pages, page tokens, kv_heads, size], bfloat16, or float8_e4m3fn with a scale for each half."""

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def fp8(self) -> bool:
        return self.keys.dtype == torch.float8_e4m3fn

    def raw(self) -> tuple[Tensor, Tensor]:
        integer = torch.uint8 if self.fp8 else torch.int16
        return self.keys.view(integer), self.values.view(integer)


def qkv(
    x: Tensor,
    norm: Norm,
    projections: tuple[Linear, Linear, Linear],
    pages: Pages,
    tables: Tensor,
    lengths: Tensor,
    query: Tensor,
    configuration: Tiling | None = None,
) -> None:
    """Queue query = q_proj(norm(x)), and the key and value of each sequence's last token into its page.

    x float32 [M, hidden] in octet order; tables int32 [M, most pages]: a sequence's page numbers in order; lengths
    int32 [M]: its tokens, the new one included; query float32 [M, heads * size].
    """
    tokens, columns = x.shape
    q_proj, k_proj, v_proj = projections
    tilings = [configuration or tiling(each.format, each.rows, columns, tokens) for each in projections]
    assert len({(each.warps, each.ahead) for each in tilings}) == 1, "linears of one launch share their warps"
    assert k_proj.rows == v_proj.rows == pages.keys[0, 0].numel()
    tile = min(each.tile for each in tilings)
    keys, values = pages.raw()
    qkv_kernel[(triton.cdiv(q_proj.rows, tile) + 2 * triton.cdiv(k_proj.rows, tile),)](
        x,
        x,
        norm.weight,
        norm.eps,
        tokens,
        query,
        keys,
        values,
        q_proj.weight,
        q_proj.scales,
        q_proj.factor,
        k_proj.weight,
        k_proj.scales,
        k_proj.factor,
        v_proj.weight,
        v_proj.scales,
        v_proj.factor,
        1.0 / pages.key_scale,
        1.0 / pages.value_scale,
        tables,
        tables.stride(0),
        lengths,
        Q_ROWS=q_proj.rows,
        KV_ROWS=k_proj.rows,
        Q_FORMAT=q_proj.format,
        K_FORMAT=k_proj.format,
        V_FORMAT=v_proj.format,
        TILE=tile,
        PAGE=pages.keys.shape[1],
        FP8=pages.fp8,
        K=columns,
        T=triton.next_power_of_2(tokens),
        UNITS=32 * tilings[0].warps,
        AHEAD=tilings[0].ahead,
        num_warps=tilings[0].warps,
        enable_fp_fusion=False,
    )
