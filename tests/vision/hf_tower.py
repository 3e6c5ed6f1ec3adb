"""A random tower and projector: as our file of vision tensors, and as transformers' own modules with these weights.

transformers is imported by whoever asks for the latter: it takes four seconds of each process that collects tests.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from services.engine.vision.config import CLIP_MEAN, CLIP_STD, VisionConfig

CONFIG = VisionConfig(
    patch=4,
    width=160,
    heads=2,
    inner=320,
    blocks=3,
    prefix=10,
    table=16,
    projector=96,
    hidden=48,
    least_patches=16,
    most_patches=1024,
    mean=CLIP_MEAN,
    std=CLIP_STD,
)


def random_tensors(config: VisionConfig = CONFIG, seed: int = 0) -> dict[str, Tensor]:
    """By our names; about as large as a trained model's."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, spread: float | None = None, mean: float = 0) -> Tensor:
        spread = shape[-1] ** -0.5 if spread is None else spread
        return torch.randn(shape, generator=random) * spread + mean

    width, inner = config.width, config.inner
    found = {
        "embedder": draw(width, 3 * config.patch**2),
        "position": draw(1, config.table**2, width, spread=0.5),
        "class_tokens": draw(config.prefix, width, spread=0.5),
        "final_norm.weight": draw(width, spread=0.2, mean=1),
        "final_norm.bias": draw(width, spread=0.2),
        "projector.norm": draw(4 * width, spread=0.2, mean=1),
        "projector.up": draw(config.projector, 4 * width),
        "projector.down": draw(config.hidden, config.projector),
    }
    linears = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (inner, width), "fc2": (width, inner)}
    for block in (f"blocks.{index}." for index in range(config.blocks)):
        for name, shape in linears.items():
            found |= {f"{block}{name}.weight": draw(*shape), f"{block}{name}.bias": draw(shape[0], spread=0.2)}
        for norm in ("norm1", "norm2"):
            found[f"{block}{norm}.weight"] = draw(width, spread=0.2, mean=1)
            found[f"{block}{norm}.bias"] = draw(width, spread=0.2)
    return found


def write(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(tensors, folder / "vision.safetensors")
    return folder / "vision.safetensors"


class Theirs:
    """transformers' tower, final norm and projector, eager attention, float32."""

    def __init__(self, tensors: dict[str, Tensor], config: VisionConfig = CONFIG) -> None:
        from transformers.models.nemotron_h_omni import modeling_nemotron_h_omni as omni
        from transformers.models.radio.configuration_radio import RadioConfig
        from transformers.models.radio.modeling_radio import RadioModel

        radio = RadioConfig(
            hidden_size=config.width,
            num_hidden_layers=config.blocks,
            num_attention_heads=config.heads,
            mlp_ratio=config.inner / config.width,
            patch_size=config.patch,
            max_img_size=config.table * config.patch,
        )
        radio._attn_implementation = "eager"
        self.tower = RadioModel(radio).eval()
        self.tower.make_preprocessor_external()
        self.norm = nn.LayerNorm(config.width, eps=radio.layer_norm_eps)
        self.projector = omni.NemotronH_Omni_Reasoning_V3MultiModalProjector(
            4 * config.width, config.projector, config.hidden
        )
        self.shuffle = omni.NemotronH_Omni_Reasoning_V3.pixel_shuffle
        named = {"embeddings.patch_projection.weight": tensors["embedder"]}
        named |= {"embeddings.position_embedding": tensors["position"]}
        named |= {"embeddings.cls_register_token": tensors["class_tokens"]}
        for index in range(config.blocks):
            ours, theirs = f"blocks.{index}.", f"encoder.layer.{index}."
            for kind in ("weight", "bias"):
                thirds = tensors[f"{ours}qkv.{kind}"].chunk(3)
                named |= {
                    f"{theirs}attention.{letter}_proj.{kind}": third
                    for letter, third in zip("qkv", thirds, strict=True)
                }
                named[f"{theirs}attention.o_proj.{kind}"] = tensors[f"{ours}proj.{kind}"]
                named |= {f"{theirs}{norm}.{kind}": tensors[f"{ours}{norm}.{kind}"] for norm in ("norm1", "norm2")}
                named |= {f"{theirs}mlp.{fc}.{kind}": tensors[f"{ours}{fc}.{kind}"] for fc in ("fc1", "fc2")}
        missing, unexpected = self.tower.load_state_dict(named, strict=False)
        assert not unexpected
        assert all("layer_scale" in name or name == "summary_idxs" for name in missing), missing
        self.norm.load_state_dict({kind: tensors[f"final_norm.{kind}"] for kind in ("weight", "bias")})
        self.projector.load_state_dict(
            {
                "layer_norm.weight": tensors["projector.norm"],
                "linear_1.weight": tensors["projector.up"],
                "linear_2.weight": tensors["projector.down"],
            }
        )

    @torch.inference_mode()
    def features(self, patches: Tensor, grid: tuple[int, int]) -> Tensor:
        return self.tower(patches, image_grid_hw=torch.tensor([grid])).features

    @torch.inference_mode()
    def embeddings(self, patches: Tensor, grid: tuple[int, int], final_norm: bool = True) -> Tensor:
        found = self.features(patches, grid)
        found = self.norm(found) if final_norm else found
        return self.projector(self.shuffle(None, found.view(1, *grid, -1)).flatten(0, 2))
