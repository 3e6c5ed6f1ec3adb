"""Compiles every Triton kernel of the project, at full shape, for the cards it must run on; prints JSON.

Run by test_gpu_compile.py in a process of its own, since other tests use Triton's interpreter. Needs no GPU.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compile_dense
import compile_sweep
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.block import BlockLayout
from kernels.experts import decode, decode_step, handoff, pause

TARGETS = (80, 90, 120)
LAYOUT = BlockLayout(latent=1024, width=2688)
SHOWN = ("TOKENS", "T", "K", "FORMAT0", "FP8")
SIZES = {"LATENT": LAYOUT.latent, "WIDTH": LAYOUT.width}

# kernel, argument types, constants, warps
KERNELS = [
    (decode.quantise_kernel, "x:*fp32 xq:*i16 factor:*fp32", {"LATENT": 1024}, 4),
    *[
        (
            decode.up_kernel,
            "first:i32 table:*i64 count:*i32 scale_2:*fp32 xq:*i16 x_factor:*fp32 h:*fp32",
            SIZES | {"UP_SCALES": LAYOUT.up_scales, "TOKENS": tokens, "TILE": decode_step.UP_TILE},
            4,
        )
        for tokens in (1, 4)
    ],
    (
        decode.alive_kernel,
        "first:i32 count:*i32 scale_2:*fp32 h:*fp32 hq:*i16 touched:*i32 touched_count:*i32 y_factor:*fp32",
        {"WIDTH": 2688, "GROUPS_PADDED": 256, "TOKENS": 4},
        4,
    ),
    *[
        (
            decode.down_kernel,
            "first:i32 table:*i64 count:*i32 hq:*i16 touched:*i32 touched_count:*i32 partial:*i64",
            SIZES
            | {
                "DOWN_VALUES": LAYOUT.down_values,
                "DOWN_SCALES": LAYOUT.down_scales,
                "TOKENS": tokens,
                "SPLITS": decode_step.DOWN_SPLITS,
                "WHOLE_GROUPS": False,
            },
            4,
        )
        for tokens in (1, 4)
    ],
    (
        decode.combine_kernel,
        "source:*i32 weights:*fp32 y:*fp32 host_y:*fp32 out:*fp32",
        {"LATENT": 1024, "TOKENS": 4, "TOP_K": 22, "TILE": decode_step.COMBINE_TILE, "OCTETS": True},
        2,
    ),
    (
        decode.finish_kernel,
        "first:i32 count:*i32 partial:*i64 y_factor:*fp32 y:*fp32",
        {"LATENT": 1024, "TOKENS": 4, "SPLITS": decode_step.DOWN_SPLITS, "TILE": decode_step.COMBINE_TILE},
        2,
    ),
    (
        handoff.post_kernel,
        "turn:*i32 stop:*i32 posted:*i32 layer:i32 ids:*i32 x:*fp32 host_ids:*i32 host_x:*fp32",
        {"IDS": 22, "IDS_PADDED": 32, "VALUES": 1024, "VALUES_PADDED": 1024},
        4,
    ),
    (
        handoff.wait_kernel,
        "turn:*i32 flag:*i32 stop:*i32 stopped_there:*i32 timeout_ns:i64 waited:*i64 plan:*i64 plan_here:*i64",
        {"PLAN": 128, "PLAN_PADDED": 128},
        1,
    ),
    (pause.pause_kernel, "length_there:*i64", {}, 1),
]


def local_bytes(cubin: bytes) -> int:
    """Bytes of local memory a thread (stack and spills), as cuobjdump reports them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    fields = dict(word.split(":", 1) for word in report.stdout.split() if word.startswith(("STACK:", "LOCAL:")))
    return int(fields["STACK"]) + int(fields["LOCAL"])


def source_of(kernel: Any, arguments: str, constants: dict[str, Any]) -> ASTSource:
    signature = dict(pair.split(":") for pair in arguments.split())
    aligned = [
        parameter.num
        for parameter in kernel.params
        if signature.get(parameter.name, "").startswith("*") and not parameter.do_not_specialize_on_alignment
    ]
    attributes = {(number,): [["tt.divisibility", 16]] for number in aligned}
    return ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants, attributes)


def compile_kernel(kernel: Any, arguments: str, constants: dict[str, Any], warps: int, fuse: bool) -> list[list[Any]]:
    """Name, bytes of shared memory and bytes of local memory, for each card. `fuse`: a product and a sum may be one."""
    source = source_of(kernel, arguments, constants)
    found = []
    for capability in TARGETS:
        options = {"num_warps": warps, "enable_fp_fusion": fuse}
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        shape = " ".join(f"{name}={value}" for name, value in constants.items() if name in SHOWN)
        name = f"{kernel.fn.__name__} {shape} sm_{capability}"
        found.append([name, compiled.metadata.shared, local_bytes(compiled.asm["cubin"])])
    return found


def sum_layouts(form: str, tokens: int) -> list[str]:
    """How the numbers of each of Triton's sums lie in the threads along the axis that is summed: its order."""
    kernel, arguments, constants, warps = compile_dense.linear([(form, 512)], 1024, tokens, "store", True)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    text = triton.compile(source_of(kernel, arguments, constants), GPUTarget("cuda", 120, 32), options).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = #ttg\.blocked<(.*)>$", text, re.MULTILINE))
    found = []
    for axis, rest in re.findall(r'"tt\.reduce"\([^)]*\) <\{axis = (\d+)(.*?\}\) : \(tensor<[^)]*)\)', text, re.DOTALL):
        layout = layouts[re.findall(r"#\w+", rest)[-1]]
        numbers = re.findall(r"(sizePerThread|threadsPerWarp|warpsPerCTA) = \[([\d, ]+)\]", layout)
        found.append(" ".join(f"{name} {values.split(', ')[int(axis)]}" for name, values in numbers))
    return found


def main() -> None:
    unfused = compile_dense.DENSE + compile_sweep.SWEEP
    work = [(*kernel, True) for kernel in KERNELS] + [(*kernel, False) for kernel in unfused]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # most of the time is the compiler's, outside Python's lock
        results = [
            found for futures in [pool.submit(compile_kernel, *each) for each in work] for found in futures.result()
        ]
        layouts = {
            (form, tokens): pool.submit(sum_layouts, form, tokens)
            for form in ("NVFP4", "FP8", "BF16", "F16", "F32")
            for tokens in (1, 2, 4)
        }
    sums = [[form, tokens, future.result()] for (form, tokens), future in layouts.items()]
    json.dump({"kernels": results, "sums": sums}, sys.stdout)


if __name__ == "__main__":
    main()
