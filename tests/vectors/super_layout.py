"""3-Super's NVFP4 release as files of its exact names, types, shapes and shards, without data: they are sparse.

The mixed precision is the published one, layer by layer; it is the whole list of 165,860 tensors and 80.3 GB.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

PATTERN = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
FP8_IN_PROJ = {
    0,
    2,
    4,
    6,
    9,
    11,
    13,
    15,
    18,
    20,
    27,
    29,
    31,
    40,
    49,
    51,
    53,
    55,
    57,
    60,
    62,
    66,
    68,
    71,
    73,
    82,
    84,
    86,
}
FP8_OUT_PROJ = {
    *(0, 2, 4, 9, 11, 13, 18, 38, 40, 42, 44, 49, 51, 53, 55, 57, 60, 62, 64, 66, 68, 71, 73, 75, 77, 80, 82, 84, 86)
}
ITEM_BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
SHARDS = 17
MTP = -1  # in place of a layer's number: all of it is BF16


class Layout:
    """Tensors (type, shape) and quantised modules, by name as on disk."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.modules: dict[str, dict[str, Any]] = {}
        for name, shape in (("backbone.embeddings", (131072, 4096)), ("lm_head", (131072, 4096))):
            self.plain(f"{name}.weight", *shape)
        self.plain("backbone.norm_f.weight", 4096)
        for index, kind in enumerate(PATTERN):
            layer = f"backbone.layers.{index}."
            self.plain(layer + "norm.weight", 4096)
            {"M": self.mamba, "*": self.attention, "E": self.moe}[kind](layer + "mixer.", index)
        for name in ("0.enorm", "0.hnorm", "0.norm", "1.norm", "1.final_layernorm"):
            self.plain(f"mtp.layers.{name}.weight", 4096)
        self.plain("mtp.layers.0.eh_proj.weight", 4096, 8192)
        self.attention("mtp.layers.0.mixer.", MTP)
        self.moe("mtp.layers.1.mixer.", MTP)

    def plain(self, name: str, *shape: int, dtype: str = "BF16") -> None:
        self.tensors[name] = (dtype, shape)

    def linear(self, name: str, rows: int, columns: int, form: str) -> None:
        if form == "BF16":
            self.plain(f"{name}.weight", rows, columns)
            return
        self.modules[name] = {"quant_algo": form} | ({"group_size": 16} if form == "NVFP4" else {})
        if form == "NVFP4":
            self.plain(f"{name}.weight", rows, columns // 2, dtype="U8")
            self.plain(f"{name}.weight_scale", rows, columns // 16, dtype="F8_E4M3")
            self.plain(f"{name}.weight_scale_2", dtype="F32")
        else:
            self.plain(f"{name}.weight", rows, columns, dtype="F8_E4M3")
            self.plain(f"{name}.weight_scale", dtype="F32")
        self.plain(f"{name}.input_scale", dtype="F32")

    def mamba(self, mixer: str, index: int) -> None:
        self.linear(mixer + "in_proj", 18560, 4096, "FP8" if index in FP8_IN_PROJ else "BF16")
        self.linear(mixer + "out_proj", 4096, 8192, "FP8" if index in FP8_OUT_PROJ else "BF16")
        self.plain(mixer + "conv1d.weight", 10240, 1, 4)
        for name, size in (("conv1d.bias", 10240), ("norm.weight", 8192), ("A_log", 128), ("D", 128), ("dt_bias", 128)):
            self.plain(mixer + name, size)

    def attention(self, mixer: str, index: int) -> None:
        for name, rows in (("q", 4096), ("k", 256), ("v", 256)):
            self.linear(f"{mixer}{name}_proj", rows, 4096, "BF16")
            if name != "q" and index != MTP:
                self.plain(f"{mixer}{name}_proj.{name}_scale", dtype="F32")
        self.linear(mixer + "o_proj", 4096, 4096, "FP8" if index in (69, 78) else "BF16")

    def moe(self, mixer: str, index: int) -> None:
        self.plain(mixer + "gate.weight", 512, 4096)
        self.plain(mixer + "gate.e_score_correction_bias", 512, dtype="F32")
        self.linear(mixer + "fc1_latent_proj", 1024, 4096, "FP8" if index in (1, 3, 5) else "BF16")
        self.linear(mixer + "fc2_latent_proj", 4096, 1024, "FP8" if index == 3 else "BF16")
        self.linear(mixer + "shared_experts.up_proj", 5376, 4096, "BF16" if index in (41, MTP) else "FP8")
        down = "NVFP4" if index == 1 else "BF16" if index in (8, 76, MTP) else "FP8"
        self.linear(mixer + "shared_experts.down_proj", 4096, 5376, down)
        for expert in range(512):
            form = "BF16" if index == MTP else "NVFP4"
            self.linear(f"{mixer}experts.{expert}.up_proj", 2688, 1024, form)
            self.linear(f"{mixer}experts.{expert}.down_proj", 1024, 2688, form)

    @property
    def size_bytes(self) -> int:
        return sum(prod(shape) * ITEM_BYTES[dtype] for dtype, shape in self.tensors.values())

    def write(self, folder: Path, config: dict[str, Any]) -> Path:
        """`config`: config.json without its quantization_config."""
        folder.mkdir()
        names, where = list(self.tensors), {}
        for shard in range(SHARDS):
            file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
            header, offset = {}, 0
            for name in names[shard::SHARDS]:
                dtype, shape = self.tensors[name]
                end = offset + prod(shape) * ITEM_BYTES[dtype]
                header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
                offset, where[name] = end, file
            text = json.dumps(header).encode()
            with (folder / file).open("wb") as output:
                output.write(len(text).to_bytes(8, "little") + text)
                output.truncate(8 + len(text) + offset)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
        said = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": self.modules}
        (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": said}))
        flattened = {"quant_method": "modelopt", "ignore": [], **said}
        (folder / "config.json").write_text(json.dumps({**config, "quantization_config": flattened}))
        return folder
