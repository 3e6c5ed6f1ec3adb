"""The sweep's kernels at full shape, for compile_all.py: kernel, argument types, constants, warps."""

import triton.language as tl

import kernels.attention.sweep as attention_sweep
import kernels.attention.vision as vision_attention
from kernels.block import BlockLayout
from kernels.experts import prefill, prefill_kernels
from kernels.linear import sweep as linear_sweep
from kernels.mamba import sweep as mamba_sweep
from kernels.norm import sweep as norm_sweep
from kernels.norm import vision as vision_norm

LAYOUT = BlockLayout(latent=1024, width=2688)
EXPERTS = {
    "BLOCK_BYTES": LAYOUT.block_bytes,
    "LATENT": LAYOUT.latent,
    "WIDTH": LAYOUT.width,
    "OPERAND": tl.float16,
}

WEIGHTS = {"NVFP4": "*u8", "FP8": "*i16", "BF16": "*bf16", "F16": "*fp16", "F32": "*fp32"}


def linear(
    form: str,
    rows: int,
    columns: int,
    finish: str,
    out: str,
    precise: bool = False,
    kind: str = "*fp16",
    bias: str | None = None,
) -> tuple:
    made = linear_sweep.tiles(form, precise)
    arguments = (
        f"x:{'*fp32' if precise else kind} weight:{WEIGHTS[form]} scales:*u8 factor:fp32 out:{out} tokens:i32"
        + (f" bias:{bias}" if bias else "")
    )
    constants = {"K": columns, "ROWS": rows, "OUT_STRIDE": rows, "FORMAT": form, "FINISH": finish, "PRECISE": precise}
    constants |= {"BM": made.bm, "BN": made.bn, "BK": made.bk, "STAGES": made.stages}
    constants |= {} if bias else {"bias": None}
    return linear_sweep.sweep_kernel, arguments, constants, made.warps


HEADS, ROWS, CHANNELS = 128, 18560, 10240  # of a Mamba layer; a sequence's states of all 40 layers lie side by side


def attend(fp8: bool) -> tuple:
    page = "*u8" if fp8 else "*bf16"
    arguments = (
        f"query:*fp32 keys:{page} values:{page} tables:*i32 table_stride:i32 segments:*i32 score_factor:fp32 "
        "value_factor:fp32 out:*i16"
    )
    constants = {"STRIDE": 4096, "KV_HEADS": 2, "GROUP": 16, "PADDED": 16, "SIZE": 128, "PAGE": 64, "FP8": fp8}
    constants |= {"TOKENS": attention_sweep.tile_tokens(16, 64), "STAGES": attention_sweep.STAGES}
    return attention_sweep.sweep_attend_kernel, arguments, constants, attention_sweep.WARPS


def vision_attend() -> tuple:
    constants = {"Q_STRIDE": 1280, "KV_STRIDE": 2560, "VALUES": 1280, "SIZE": 80, "HIGH": 64, "REST": 16}
    constants |= {"ROWS": vision_attention.ROWS, "KEYS": vision_attention.KEYS, "STAGES": vision_attention.STAGES}
    arguments = "query:*bf16 kv:*bf16 out:*bf16 tokens:i32 score_factor:fp32"
    return vision_attention.vision_attend_kernel, arguments, constants, vision_attention.WARPS


def store_kv(fp8: bool) -> tuple:
    page = "*u8" if fp8 else "*i16"
    arguments = (
        f"key:*fp32 key_stride:i32 value:*fp32 value_stride:i32 keys:{page} values:{page} tables:*i32 "
        "table_stride:i32 segments:*i32 inverse_key_scale:fp32 inverse_value_scale:fp32"
    )
    constants = {"COLUMNS": 256, "PADDED": 256, "TOKENS": attention_sweep.STORED_TOKENS, "PAGE": 64, "FP8": fp8}
    return attention_sweep.sweep_store_kernel, arguments, constants, attention_sweep.STORE_WARPS


SWEEP = [
    (
        mamba_sweep.convolve_kernel,
        "projected:*fp32 segments:*i32 conv_state:*fp32 weight:*fp32 bias:*fp32",
        {"STRIDE": ROWS, "STATE_STRIDE": 40 * CHANNELS * 3, "FIRST": 8192, "CHANNELS": CHANNELS, "TAPS": 4}
        | {"PADDED": 4, "ROWS": mamba_sweep.CONV_ROWS, "TILE": mamba_sweep.CONV_CHANNELS},
        mamba_sweep.CONV_WARPS,
    ),
    (
        mamba_sweep.steps_and_decays_kernel,
        "dt:*fp32 dt_bias:*fp32 a:*fp32 steps:*fp32 tokens:i32",
        {"STRIDE": ROWS, "HEADS": HEADS, "TOKENS": mamba_sweep.STEPS_TOKENS, "TILE": mamba_sweep.STEPS_HEADS},
        mamba_sweep.STEPS_WARPS,
    ),
    (
        mamba_sweep.sequential_kernel,
        "projected:*fp32 segments:*i32 steps:*fp32 tokens:i32 ssm_state:*fp32 d:*fp32 y:*fp32",
        {"STRIDE": ROWS, "STATE_STRIDE": 40 * HEADS * 64 * 128, "Y_STRIDE": ROWS, "HEADS": HEADS, "HEAD_DIM": 64}
        | {"STATE": 128, "GROUPS": 8, "PART": mamba_sweep.PART, "OUTER": 2, "INNER": 2, "LANES": 8}
        | {"STAGES": mamba_sweep.STAGES},
        mamba_sweep.WARPS,
    ),
    linear("FP8", 18560, 4096, "store", "*fp32"),
    linear("FP8", 4096, 8192, "add", "*fp32"),
    linear("NVFP4", 5376, 4096, "relu2", "*fp16"),
    linear("NVFP4", 4096, 5376, "add", "*fp32"),
    linear("BF16", 4096, 4096, "store", "*fp16"),
    *[linear(form, 512, 4096, "store", "*bf16", kind="*bf16") for form in WEIGHTS],
    *[linear(form, 512, 4096, "store", "*fp16") for form in ("F16", "F32")],
    *[linear(form, 512, 4096, "store", "*fp32", precise=True) for form in ("NVFP4", "FP8", "BF16", "F32")],
    (
        norm_sweep.sweep_rms_norm_kernel,
        "x:*fp32 weight:*fp32 out:*fp16 eps:fp32",
        {"K": 4096, "PADDED": 4096},
        norm_sweep.WARPS,
    ),
    (
        norm_sweep.sweep_gated_norm_kernel,
        "y:*fp32 y_stride:i32 z:*fp32 z_stride:i32 weight:*fp32 out:*fp16 eps:fp32",
        {"N": 8192, "GROUP": 1024, "PADDED": 1024},
        norm_sweep.WARPS,
    ),
    (
        prefill_kernels.up_kernel,
        "ring:*u8 items:*i32 starts:*i32 rows:*i32 x:*fp16 scale_2:*fp32 h:*fp16",
        EXPERTS
        | {"UP_SCALES": LAYOUT.up_scales, "TOP_K": 22}
        | {"ROWS": prefill.UP.rows, "NEURONS": prefill.UP.outputs, "INPUTS": prefill.UP.step},
        prefill.UP.warps,
    ),
    (
        prefill_kernels.down_kernel,
        "ring:*u8 items:*i32 starts:*i32 rows:*i32 h:*fp16 scale_2:*fp32 y:*fp16",
        EXPERTS
        | {"DOWN_VALUES": LAYOUT.down_values, "DOWN_SCALES": LAYOUT.down_scales}
        | {"ROWS": prefill.DOWN.rows, "OUTPUTS": prefill.DOWN.outputs, "NEURONS": prefill.DOWN.step},
        prefill.DOWN.warps,
    ),
    *[
        (
            prefill_kernels.combine_kernel,
            f"y:*fp16 weights:*fp32 out:{out}",
            {"LATENT": LAYOUT.latent, "TOP_K": 22, "TILE": prefill.COMBINE_TILE},
            prefill.COMBINE_WARPS,
        )
        for out in ("*fp16", "*fp32")
    ],
    attend(fp8=False),
    attend(fp8=True),
    store_kv(fp8=False),
    store_kv(fp8=True),
    linear("BF16", 1280, 768, "store", "*fp32"),
    linear("BF16", 2560, 1280, "store", "*bf16", bias="*bf16", kind="*bf16"),
    linear("BF16", 5120, 1280, "gelu", "*bf16", bias="*bf16", kind="*bf16"),
    linear("BF16", 1280, 5120, "add", "*fp32", bias="*bf16", kind="*bf16"),
    vision_attend(),
    (
        vision_norm.layer_norm_kernel,
        "x:*fp32 weight:*bf16 bias:*bf16 out:*bf16 eps:fp32",
        {"K": 1280, "PADDED": 2048},
        vision_norm.WARPS,
    ),
    (
        vision_norm.shuffled_norm_kernel,
        "x:*fp32 weight:*bf16 bias:*bf16 outer:*bf16 out:*bf16 columns:i32 eps:fp32 outer_eps:fp32",
        {"K": 1280, "PADDED": 2048},
        vision_norm.SHUFFLE_WARPS,
    ),
    (
        vision_norm.positions_kernel,
        "x:*fp32 lines:*bf16 down:*i32 below:*fp32 across:*i32 beside:*fp32 first_patch:i32 first_line:i32 rows:i32 "
        "columns:i32",
        {"SIDE": 128, "K": 1280, "PADDED": 2048},
        vision_norm.WARPS,
    ),
]
