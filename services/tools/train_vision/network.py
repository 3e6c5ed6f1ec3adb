"""The tower and projector as something that can be trained: the arithmetic of services/engine/vision for many pictures
of one grid at once, and the way into a checkpoint. The engine's own code is what runs later; a test compares the two.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, relu, scaled_dot_product_attention

from services.engine.vision import projector, tower
from services.engine.vision.config import CLIP_MEAN, CLIP_STD, VisionConfig

PATCH = 16
LEAST_PATCHES, MOST_PATCHES = 200, 256
BODY = "vision_model.radio_model.model."
NAMES = {
    "embedder": BODY + "patch_generator.embedder.weight",
    "position": BODY + "patch_generator.pos_embed",
    "class_tokens": BODY + "patch_generator.cls_token.token",
    "final_norm.weight": "vision_projector.vision_final_layernorm.weight",
    "final_norm.bias": "vision_projector.vision_final_layernorm.bias",
    "projector.norm": "mlp1.0.weight",
    "projector.up": "mlp1.1.weight",
    "projector.down": "mlp1.3.weight",
}
IN_BLOCK = {
    "qkv": "attn.qkv",
    "proj": "attn.proj",
    "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
    "norm1": "norm1",
    "norm2": "norm2",
}


def small_config(
    hidden: int, width: int = 192, blocks: int = 5, inner: int | None = None, wide: int = 256
) -> VisionConfig:
    """A tower for pictures of about 256 x 256 pixels: what is larger or smaller is made so.

    `inner` is the MLP's width (twice the tower's), `wide` the projector's.
    """
    return VisionConfig(
        patch=PATCH,
        width=width,
        heads=width // 48,
        inner=inner or 2 * width,
        blocks=blocks,
        prefix=4,
        table=16,
        projector=wide,
        hidden=hidden,
        least_patches=LEAST_PATCHES,
        most_patches=MOST_PATCHES,
        mean=CLIP_MEAN,
        std=CLIP_STD,
    )


class Network(nn.Module):
    """Parameters by the engine's names for them (with _ for .)."""

    def __init__(self, config: VisionConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self._names: dict[str, str] = {}
        self._places: dict[tuple[int, int], Tensor] = {}
        random = torch.Generator().manual_seed(seed)
        width, inner = config.width, config.inner
        shapes: dict[str, tuple[int, ...]] = {
            "embedder": (width, 3 * config.patch**2),
            "position": (1, config.table**2, width),
            "class_tokens": (config.prefix, width),
            "projector.up": (config.projector, 4 * width),
            "projector.down": (config.hidden, config.projector),
        }
        linears = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (inner, width), "fc2": (width, inner)}
        for block in range(config.blocks):
            shapes |= {f"blocks.{block}.{name}.weight": shape for name, shape in linears.items()}
        for name, shape in shapes.items():
            spread = 0.02 if name in ("position", "class_tokens") else shape[-1] ** -0.5
            self._add(name, torch.randn(shape, generator=random) * spread)
        norms = ["final_norm", *(f"blocks.{block}.norm{i}" for block in range(config.blocks) for i in (1, 2))]
        for norm in norms:
            self._add(f"{norm}.weight", torch.ones(width))
            self._add(f"{norm}.bias", torch.zeros(width))
        for block in range(config.blocks):
            for name, shape in linears.items():
                self._add(f"blocks.{block}.{name}.bias", torch.zeros(shape[0]))
        self._add("projector.norm", torch.ones(4 * width))

    def _add(self, name: str, value: Tensor) -> None:
        self._names[name] = name.replace(".", "_")
        self.register_parameter(self._names[name], nn.Parameter(value))

    def __getitem__(self, name: str) -> Tensor:
        value: Tensor = getattr(self, self._names[name])
        return value

    def patches(self, pixels: Tensor) -> Tensor:
        """uint8 [pictures, height, width, 3], as large as their grid -> [pictures, patches, 3 patch^2], as
        `services.engine.vision.preprocess` cuts them."""
        count, height, width, _ = pixels.shape
        mean, std = (torch.tensor(three, device=pixels.device) for three in (self.config.mean, self.config.std))
        side = self.config.patch
        cut = ((pixels / 255 - mean) / std).view(count, height // side, side, width // side, side, 3)
        return cut.permute(0, 1, 3, 5, 2, 4).reshape(count, -1, 3 * side * side)

    def features(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        """[pictures, patches, 3 patch^2] -> [pictures, tokens, 4 width], as the projector gets them."""
        config, count = self.config, len(patches)
        x = linear(patches, self["embedder"]) + self._positions(grid)
        x = torch.cat([self["class_tokens"].expand(count, -1, -1), x], dim=1)
        for index in range(config.blocks):
            block = f"blocks.{index}."
            thirds = self._linear(block + "qkv", self._norm(block + "norm1", x)).chunk(3, dim=2)
            query, key, value = (
                third.view(count, -1, config.heads, config.width // config.heads).transpose(1, 2) for third in thirds
            )
            attended = scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
            x = x + self._linear(block + "proj", attended)
            x = x + self._linear(block + "fc2", gelu(self._linear(block + "fc1", self._norm(block + "norm2", x))))
        x = self._norm("final_norm", x[:, config.prefix :])
        rows, columns = grid
        cut = x.view(count, rows // 2, 2, columns // 2, 2, config.width)
        return cut.transpose(2, 3).reshape(count, rows * columns // 4, 4 * config.width)

    def embeddings(self, features: Tensor) -> Tensor:
        """[pictures, tokens, 4 width] -> rows for the language model, [pictures, tokens, hidden]."""
        scale = torch.rsqrt(features.square().mean(-1, keepdim=True) + projector.EPS)
        return linear(
            relu(linear(features * scale * self["projector.norm"], self["projector.up"])).square(),
            self["projector.down"],
        )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """BF16, under the names of the original layout."""
        named = dict(NAMES)
        for index in range(self.config.blocks):
            for ours, theirs in IN_BLOCK.items():
                for kind in ("weight", "bias"):
                    named[f"blocks.{index}.{ours}.{kind}"] = f"{BODY}blocks.{index}.{theirs}.{kind}"
        return {theirs: self[ours].detach().cpu().to(torch.bfloat16).contiguous() for ours, theirs in named.items()}

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        """[patches, width]: the engine's window of the table is a sum of its rows, with weights that depend on the grid
        alone."""
        table = self["position"][0]
        if grid not in self._places:
            side = self.config.table
            self._places[grid] = tower.position_window(torch.eye(side**2).view(side, side, side**2), grid)
        weights = self._places[grid] = self._places[grid].to(table.device)
        return weights @ table

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self[f"{name}.weight"], self[f"{name}.bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, (self.config.width,), self[f"{name}.weight"], self[f"{name}.bias"], tower.EPS)


def config_entries(config: VisionConfig) -> dict[str, object]:
    """What config.json says of it beside the language model's."""
    return {
        "projector_hidden_size": config.projector,
        "vit_hidden_size": config.width,
        "downsample_ratio": 0.5,
        "ps_version": "v2",
        "img_context_token_id": 18,
        "vision_config": {
            "patch_size": config.patch,
            "num_attention_heads": config.heads,
            "args": {"min_num_patches": config.least_patches, "max_num_patches": config.most_patches},
        },
    }
