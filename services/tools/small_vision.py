"""The vision side of a small random checkpoint, in both layouts that 3.5-Super-VL's checkpoints have.

Both layouts of one seed hold the same tower of two blocks and the same projector. Patches are 2 x 2 pixels.
"""

from typing import Any, Literal

import torch
from torch import Tensor

Layout = Literal["original", "export"]
WIDTH, PATCH, INNER, PROJECTOR, BLOCKS = 16, 12, 32, 48, 2
CONFIG: dict[str, Any] = {
    "projector_hidden_size": PROJECTOR,
    "downsample_ratio": 0.5,
    "ps_version": "v2",
    "vision_config": {
        "patch_size": 2,
        "num_attention_heads": 2,
        "args": {"min_num_patches": 16, "max_num_patches": 208},
    },
}


def tensors(layout: Layout, hidden: int, seed: int = 0) -> dict[str, Tensor]:
    """Names as on disk, values BF16; `hidden` is the language model's width."""
    random = torch.Generator().manual_seed(seed + 2)

    def draw(*shape: int) -> Tensor:
        """Linears about as large as trained ones; all else about 1."""
        spread = shape[-1] ** -0.5 if len(shape) == 2 else 1.0
        return (torch.randn(shape, generator=random) * spread).to(torch.bfloat16)

    body, export = "vision_model.radio_model.model.", layout == "export"
    generator = "vision_model.embeddings." if export else body + "patch_generator."
    found = {
        generator + ("patch_projection.weight" if export else "embedder.weight"): draw(WIDTH, PATCH),
        generator + ("video_patch_projection.weight" if export else "video_embedder.weight"): draw(WIDTH, 2 * PATCH),
        generator + ("position_embedding" if export else "pos_embed"): draw(1, 64, WIDTH),
        generator + ("cls_register_token" if export else "cls_token.token"): draw(10, WIDTH),
        "vision_projector.vision_final_layernorm.weight": draw(WIDTH),
        "vision_projector.vision_final_layernorm.bias": draw(WIDTH),
    }
    for index in range(BLOCKS):
        block = f"vision_model.encoder.layer.{index}." if export else f"{body}blocks.{index}."
        found |= {f"{block}{norm}.{part}": draw(WIDTH) for norm in ("norm1", "norm2") for part in ("weight", "bias")}
        qkv = {"weight": draw(3 * WIDTH, WIDTH), "bias": draw(3 * WIDTH)}
        for part, whole in qkv.items():
            if export:
                for name, third in zip(("query", "key", "value"), whole.chunk(3), strict=True):
                    found[f"{block}attention.attention.{name}.{part}"] = third.clone()
            else:
                found[f"{block}attn.qkv.{part}"] = whole
        linears = {"attention.output.dense" if export else "attn.proj": (WIDTH, WIDTH)}
        linears |= {"mlp.fc1": (INNER, WIDTH), "mlp.fc2": (WIDTH, INNER)}
        for name, (rows, columns) in linears.items():
            found |= {f"{block}{name}.weight": draw(rows, columns), f"{block}{name}.bias": draw(rows)}
        if export:
            found |= {f"{block}layer_scale{i}.lambda1": torch.ones(WIDTH, dtype=torch.bfloat16) for i in (1, 2)}
    for original, exported, shape in (
        ("mlp1.0", "norm", (4 * WIDTH,)),
        ("mlp1.1", "linear1", (PROJECTOR, 4 * WIDTH)),
        ("mlp1.3", "linear2", (hidden, PROJECTOR)),
    ):
        found[f"vision_projector.mlp1.{exported}.weight" if export else f"{original}.weight"] = draw(*shape)
    if not export:
        found |= {
            f"vision_model.radio_model.input_conditioner.norm_{what}": torch.ones(3, 1, 1) for what in ("mean", "std")
        }
    found["vision_model.summary_idxs" if export else "vision_model.radio_model.summary_idxs"] = torch.arange(4)
    return found
