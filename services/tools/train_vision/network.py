"""The tower and projector as something that can be trained: the arithmetic of services/engine/vision for many pictures
of one grid at once, and the way into a checkpoint. The engine's own code is what runs later; a test compares the two.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, pad, relu, scaled_dot_product_attention

from services.engine.errors import CheckpointError
from services.engine.vision import projector, tower
from services.engine.vision.config import CLIP_MEAN, CLIP_STD, VisionConfig

PATCH = 16
LEAST_PATCHES, MOST_PATCHES = 200, 256
# All that a picture may be made to, rows and columns of patches.
GRIDS = tuple(
    (rows, columns)
    for rows in range(2, MOST_PATCHES // 2 + 1, 2)
    for columns in range(2, MOST_PATCHES // rows + 1, 2)
    if rows * columns >= LEAST_PATCHES
)
_PADDED = MOST_PATCHES + 8
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

    windows: Tensor
    real: Tensor
    mean: Tensor  # of each value of a patch, on the device: what is copied there in a step keeps it from being a graph
    std: Tensor

    def __init__(self, config: VisionConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self._names: dict[str, str] = {}
        self._places: dict[tuple[int, int], Tensor] = {}
        for name in ("windows", "real", "mean", "std"):
            self.register_buffer(name, torch.empty(0), persistent=False)
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
            # Rows for the language model begin about as large as its words' are.
            smaller = 0.5 if "fc2" in name else 0.1 if name == "projector.down" else 1.0
            spread = 0.02 if name == "class_tokens" else smaller * shape[-1] ** -0.5
            self._add(name, torch.randn(shape, generator=random) * spread)
        with torch.no_grad():
            self["position"].copy_(_waves(config.table, width))
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
            x = self._block(index, x, None)
        x = self._norm("final_norm", x[:, config.prefix :])
        rows, columns = grid
        cut = x.view(count, rows // 2, 2, columns // 2, 2, config.width)
        return cut.transpose(2, 3).reshape(count, rows * columns // 4, 4 * config.width)

    def padded(self, patches: Tensor, grids: Tensor) -> Tensor:
        """`features` of pictures of any grids at once: values from 0 to 255 [pictures, MOST_PATCHES, 3 patch^2], the
        patches of a token after one another (`in_order`), and numbers of their grids in GRIDS -> [pictures,
        MOST_PATCHES / 4, 4 width].

        What is behind a grid's own tokens means nothing. Wants `prepare` to have been called.
        """
        config, count = self.config, len(patches)
        x = linear((patches / 255 - self.mean) / self.std, self["embedder"])
        with torch.autocast(patches.device.type, enabled=False):
            positions = torch.matmul(self.windows, self["position"][0])[grids]
        x = torch.cat([self["class_tokens"].expand(count, -1, -1), x.float() + positions], dim=1)
        x = pad(x, (0, 0, 0, _PADDED - x.shape[1]))  # to a length that fast kernels take
        seen = pad(self.real[grids], (config.prefix, 0), value=True)
        seen = pad(seen, (0, _PADDED - seen.shape[1]), value=False)[:, None, None, :].expand(-1, -1, _PADDED, -1)
        for index in range(config.blocks):
            x = self._block(index, x, seen)
        x = self._norm("final_norm", x[:, config.prefix : config.prefix + MOST_PATCHES])
        return x.reshape(count, MOST_PATCHES // 4, 4 * config.width)

    def prepare(self) -> None:
        """What `padded` needs to know of all grids, beside the parameters."""
        side = self.config.table
        each = torch.eye(side**2).view(side, side, side**2)
        self.windows = torch.zeros(len(GRIDS), MOST_PATCHES, side**2)
        self.real = torch.zeros(len(GRIDS), MOST_PATCHES, dtype=torch.bool)
        for number, grid in enumerate(GRIDS):
            window = tower.position_window(each, grid).view(*grid, side**2)
            self.windows[number, : grid[0] * grid[1]] = in_order(window)
            self.real[number, : grid[0] * grid[1]] = True
        self.mean, self.std = (
            torch.tensor(three).repeat_interleave(self.config.patch**2) for three in (self.config.mean, self.config.std)
        )
        self.to(self["embedder"].device)

    def take(self, found: dict[str, Tensor]) -> list[str]:
        """The tower that a checkpoint has is taken over, by its names for it; which parameters. Not the projector: it
        speaks to the language model that it was taught before. Raises CheckpointError if it is another tower."""
        names = {ours: theirs for ours, theirs in self._checkpoint_names().items() if not ours.startswith("projector")}
        for ours, theirs in names.items():
            if theirs not in found:
                raise CheckpointError(f"no tensor {theirs} among {len(found)}: no tower of this kind")
            if found[theirs].shape != self[ours].shape:
                shapes = f"{theirs} is {list(found[theirs].shape)}, not {list(self[ours].shape)}"
                raise CheckpointError(f"a tower of another size: {shapes}; see --width and --blocks")
        if more := {name for name in found if name.startswith(BODY)} - {*names.values()}:
            raise CheckpointError(f"a larger tower: {len(more)} more tensors, such as {min(more)}; see --blocks")
        with torch.no_grad():
            for ours, theirs in names.items():
                self[ours].copy_(found[theirs])
        return [*names]

    def embeddings(self, features: Tensor) -> Tensor:
        """[pictures, tokens, 4 width] -> rows for the language model, [pictures, tokens, hidden]."""
        scale = torch.rsqrt(features.square().mean(-1, keepdim=True) + projector.EPS)
        return linear(
            relu(linear(features * scale * self["projector.norm"], self["projector.up"])).square(),
            self["projector.down"],
        )

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """BF16, under the names of the original layout."""
        return {
            theirs: self[ours].detach().cpu().to(torch.bfloat16).contiguous()
            for ours, theirs in self._checkpoint_names().items()
        }

    def _checkpoint_names(self) -> dict[str, str]:
        named = dict(NAMES)
        for index in range(self.config.blocks):
            for ours, theirs in IN_BLOCK.items():
                for kind in ("weight", "bias"):
                    named[f"blocks.{index}.{ours}.{kind}"] = f"{BODY}blocks.{index}.{theirs}.{kind}"
        return named

    def _block(self, index: int, x: Tensor, seen: Tensor | None) -> Tensor:
        block, count, config = f"blocks.{index}.", len(x), self.config
        thirds = self._linear(block + "qkv", self._norm(block + "norm1", x)).chunk(3, dim=2)
        query, key, value = (
            third.view(count, -1, config.heads, config.width // config.heads).transpose(1, 2) for third in thirds
        )
        attended = scaled_dot_product_attention(query, key, value, seen).transpose(1, 2).flatten(2)
        x = x + self._linear(block + "proj", attended)
        return x + self._linear(block + "fc2", gelu(self._linear(block + "fc1", self._norm(block + "norm2", x))))

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


def in_order(of_grid: Tensor) -> Tensor:
    """[rows, columns, any] -> [rows * columns, any]: the four patches of a token after one another, by rows."""
    rows, columns, size = of_grid.shape
    return of_grid.view(rows // 2, 2, columns // 2, 2, size).transpose(1, 2).reshape(rows * columns, size)


def _waves(side: int, width: int) -> Tensor:
    """[1, side^2, width]: places told apart from the first step on, by waves along both axes. From small random numbers
    the tower takes a thousand steps to learn where anything is."""
    lengths = 4.0 * side * (1.5 / side) ** (torch.arange(width // 4) / max(1, width // 4 - 1))
    angles = 2 * math.pi * torch.arange(side)[:, None] / lengths
    along = torch.cat([angles.sin(), angles.cos()], dim=1)
    down, across = along[:, None].expand(-1, side, -1), along[None].expand(side, -1, -1)
    return torch.cat([down, across], dim=2).reshape(1, side**2, width)


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
