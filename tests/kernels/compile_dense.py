"""The dense kernels at full shape, for compile_all.py: kernel, argument types, constants, warps.

Arguments' alignment is told to the compiler as a launch would tell it.
"""

import kernels.attention.gpu as attention
import kernels.mamba.gpu as mamba
import kernels.norm.gpu as norm
import kernels.router.gpu as router
import kernels.sampling.gpu as sampling
from kernels.attention import pages
from kernels.linear.gpu import linear_kernel, tiling
from kernels.mamba import chunk_scan, settle

SIZES = mamba.Sizes(heads=128, head_dim=64, state=128, groups=8)
LINEAR = "x:*fp32 x_single:*fp32 norm_weight:*fp32 eps:fp32 tokens:i32 stop:*i32 " + " ".join(
    f"out{i}:*fp32 weight{i}:*i32 scales{i}:*i16 factor{i}:fp32 rows{i}:i32" for i in range(3)
)


def step(form: str, rows: int, columns: int, tokens: int) -> tuple[dict[str, object], int]:
    chosen = tiling(form, rows, columns, tokens)
    constants = {"K": columns, "T": tokens, "UNITS": 32 * chosen.warps, "AHEAD": chosen.ahead}
    return constants | {"TILE": chosen.tile}, chosen.warps


def linear(parts: list[tuple[str, int]], columns: int, tokens: int, finish: str, with_norm: bool) -> tuple:
    constants, warps = step(*parts[0], columns, tokens)
    del constants["TILE"]
    for index in range(3):
        form, rows = parts[min(index, len(parts) - 1)]
        tile = tiling(form, rows, columns, tokens).tile
        constants |= {f"FORMAT{index}": form, f"TILE{index}": tile, f"FINISH{index}": finish}
    return (
        linear_kernel,
        LINEAR,
        constants | {"PARTS": len(parts), "NORM": with_norm, "GUARDED": finish == "add"},
        warps,
    )


def in_proj(form: str, tokens: int) -> tuple:
    constants, warps = step(form, SIZES.rows, 4096, tokens)
    constants |= {"ROWS": SIZES.rows, "FIRST": SIZES.inner, "CHANNELS": SIZES.channels, "TAPS": 4, "FORMAT": form}
    constants |= {"GUARDED": True, "DRAFTS": True}
    arguments = (
        "x:*fp32 x_single:*fp32 norm_weight:*fp32 eps:fp32 weight:*i32 scales:*i16 factor:fp32 out:*fp32 tokens:i32 "
        "slots:*i32 conv_state:*fp32 conv_stride:i32 conv_weight:*fp32 conv_bias:*fp32 stop:*i32 drafts:*i32 "
        "kept:*fp32 kept_stride:i32"
    )
    return mamba.in_proj_kernel, arguments, constants, warps


def qkv(fp8: bool) -> tuple:
    constants, warps = step("BF16", 4096, 4096, 1)
    constants |= {"Q_ROWS": 4096, "KV_ROWS": 256, "PAGE": 64, "FP8": fp8}
    constants |= dict.fromkeys(("Q_FORMAT", "K_FORMAT", "V_FORMAT"), "BF16")
    page = "*u8" if fp8 else "*i16"
    arguments = (
        f"x:*fp32 x_single:*fp32 norm_weight:*fp32 eps:fp32 tokens:i32 query:*fp32 keys:{page} values:{page} "
        + " ".join(f"{p}_weight:*i32 {p}_scales:*i16 {p}_factor:fp32" for p in "qkv")
        + " inverse_key_scale:fp32 inverse_value_scale:fp32 tables:*i32 table_stride:i32 lengths:*i32"
    )
    return pages.qkv_kernel, arguments, constants, warps


def attend(fp8: bool) -> tuple:
    page = "*u8" if fp8 else "*i16"
    arguments = (
        f"query:*fp32 keys:{page} values:{page} tables:*i32 table_stride:i32 lengths:*i32 score_factor:fp32 "
        "mixed_out:*fp32 best_out:*fp32 total_out:*fp32"
    )
    constants = {"KV_HEADS": 2, "GROUP": 16, "ROWS": 16, "SIZE": 128, "PAGE": 64}
    constants |= {"SPLIT_PAGES": attention.SPLIT_PAGES, "FP8": fp8}
    return attention.attend_kernel, arguments, constants, attention.WARPS


TILES = 131072 // sampling.TILE
LOGITS = {"IDS": 131072, "MASKED": True, "TILE": sampling.TILE}
SEARCH = LOGITS | {"TILES": TILES, "PADDED": TILES, "STEPS": sampling.STEPS}

DENSE = [
    linear([("NVFP4", 5376)], 4096, 1, "relu2", True),
    linear([("NVFP4", 4096)], 5376, 4, "add", False),
    linear([("FP8", 4096)], 8192, 1, "add", False),
    linear([("FP8", 5376)], 4096, 4, "relu2", True),
    linear([("BF16", 512), ("BF16", 1024), ("BF16", 512)], 4096, 1, "store", True),
    linear([("BF16", 131072)], 4096, 4, "store", True),
    linear([("BF16", 4096)], 8192, 2, "octets", False),
    in_proj("FP8", 1),
    in_proj("FP8", 4),
    qkv(fp8=True),
    attend(fp8=False),
    attend(fp8=True),
    (
        attention.merge_kernel,
        "mixed_in:*fp32 best_in:*fp32 total_in:*fp32 lengths:*i32 value_factor:fp32 out:*fp32 runs:i32",
        {"KV_HEADS": 2, "GROUP": 16, "SIZE": 128, "RUN_TOKENS": 64 * attention.SPLIT_PAGES}
        | {"AT_ONCE": attention.MERGE_RUNS},
        attention.MERGE_WARPS,
    ),
    (
        mamba.update_kernel,
        "projected:*fp32 slots:*i32 ssm_state:*fp32 ssm_stride:i32 a:*fp32 d:*fp32 dt_bias:*fp32 y:*fp32 arrived:*i32 "
        "norm_weight:*fp32 out:*fp32 eps:fp32 stop:*i32 drafts:*i32",
        {"ROWS": SIZES.rows, "HEADS": 128, "HEAD_DIM": 64, "STATE": 128, "GROUPS": 8, "PART": mamba.UPDATE_PART}
        | {"COLUMNS": 128, "GROUP_PADDED": 1024, "GUARDED": True, "DRAFTS": True},
        mamba.UPDATE_WARPS,
    ),
    (
        settle.shift_kernel,
        "kept:*fp32 conv_state:*fp32",
        {"KEPT": SIZES.kept, "CHANNELS": SIZES.channels, "TAPS": 4, "TILE": settle.CHANNELS_TILE},
        4,
    ),
    (
        settle.advance_kernel,
        "kept:*fp32 ssm_state:*fp32 a:*fp32 dt_bias:*fp32",
        {"KEPT": SIZES.kept, "CHANNELS": SIZES.channels, "HEADS": 128, "HEAD_DIM": 64, "STATE": 128, "GROUPS": 8}
        | {"PART": mamba.UPDATE_PART, "COLUMNS": 128},
        mamba.UPDATE_WARPS,
    ),
    (
        chunk_scan.conv_kernel,
        "x:*fp32 x_stride:i32 state:*fp32 weight:*fp32 bias:*fp32 out:*fp32 rows:i32",
        {"CHANNELS": SIZES.channels, "TAPS": 4, "ROWS": chunk_scan.CONV_ROWS, "TILE": chunk_scan.CONV_CHANNELS},
        chunk_scan.WARPS,
    ),
    (
        chunk_scan.steps_kernel,
        "dt:*fp32 dt_stride:i32 dt_bias:*fp32 a:*fp32 steps:*fp32 sums:*i64 rows:i32 offset:i32",
        {"HEADS": 128, "CHUNK": chunk_scan.CHUNK},
        chunk_scan.WARPS,
    ),
    (
        chunk_scan.scan_kernel,
        "x:*fp32 x_stride:i32 b:*fp32 b_stride:i32 c:*fp32 c_stride:i32 d:*fp32 steps:*fp32 sums:*i64 state:*fp32 "
        "out:*fp32 rows:i32 offset:i32 chunks:i32",
        {"HEADS": 128, "HEAD_DIM": 64, "STATE": 128, "GROUPS": 8, "PART": chunk_scan.PART}
        | {"CHUNK": chunk_scan.CHUNK, "BLOCK": chunk_scan.BLOCK, "SLICE": chunk_scan.SLICE},
        chunk_scan.WARPS,
    ),
    (
        router.choose_kernel,
        "logits:*fp32 bias:*fp32 ids:*i32 weights:*fp32 scale:fp32",
        {"EXPERTS": 512, "PADDED": 512, "TOP_K": 22, "RANKS": 32, "NORMALISE": True, "EPSILON": router.EPSILON},
        router.WARPS,
    ),
    (norm.rms_norm_kernel, "x:*fp32 weight:*fp32 out:*fp32 eps:fp32", {"K": 4096, "PADDED": 4096}, norm.WARPS),
    (
        norm.gated_group_rms_norm_kernel,
        "y:*fp32 z:*fp32 z_stride:i32 weight:*fp32 out:*fp32 eps:fp32",
        {"N": 8192, "GROUP": 1024, "PADDED": 1024},
        norm.WARPS,
    ),
    (sampling.best_kernel, "logits:*fp32 allowed:*i32 best:*i64", LOGITS, sampling.WARPS),
    (sampling.greedy_kernel, "best:*i64 ids:*i32", {"TILES": TILES, "PADDED": TILES}, sampling.WARPS),
    (
        sampling.narrow_kernel,
        "logits:*fp32 allowed:*i32 best:*i64 states:*i64 sums:*i64 counts:*i32 parameters:*fp64 seeds:*i64 step:i32",
        SEARCH,
        sampling.WARPS,
    ),
    (
        sampling.pick_kernel,
        "logits:*fp32 allowed:*i32 best:*i64 states:*i64 counts:*i32 ids:*i32",
        SEARCH,
        sampling.WARPS,
    ),
]
