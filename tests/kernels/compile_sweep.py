"""The sweep's kernels at full shape, for compile_all.py: kernel, argument types, constants, warps."""

import triton.language as tl

from kernels.block import BlockLayout
from kernels.experts import prefill, prefill_kernels

LAYOUT = BlockLayout(latent=1024, width=2688)
EXPERTS = {
    "BLOCK_BYTES": LAYOUT.block_bytes,
    "LATENT": LAYOUT.latent,
    "WIDTH": LAYOUT.width,
    "ROWS": prefill.ROWS,
    "OPERAND": tl.bfloat16,
}

SWEEP = [
    (
        prefill_kernels.up_kernel,
        "ring:*u8 items:*i32 starts:*i32 rows:*i32 x:*bf16 scale_2:*fp32 h:*bf16",
        EXPERTS
        | {"UP_SCALES": LAYOUT.up_scales, "TOP_K": 22, "NEURONS": prefill.UP_NEURONS, "INPUTS": prefill.UP_INPUTS},
        prefill.WARPS,
    ),
    (
        prefill_kernels.down_kernel,
        "ring:*u8 items:*i32 starts:*i32 rows:*i32 h:*bf16 scale_2:*fp32 y:*bf16",
        EXPERTS
        | {"DOWN_VALUES": LAYOUT.down_values, "DOWN_SCALES": LAYOUT.down_scales}
        | {"OUTPUTS": prefill.DOWN_OUTPUTS, "NEURONS": prefill.DOWN_NEURONS},
        prefill.WARPS,
    ),
    *[
        (
            prefill_kernels.combine_kernel,
            f"y:*bf16 weights:*fp32 out:{out}",
            {"LATENT": LAYOUT.latent, "TOP_K": 22, "TILE": prefill.COMBINE_TILE, "BF16": out == "*bf16"},
            prefill.COMBINE_WARPS,
        )
        for out in ("*bf16", "*fp32")
    ],
]
