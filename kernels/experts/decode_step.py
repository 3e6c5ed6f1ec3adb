"""Buffers and launches of one MoE layer's routed experts on a GPU (or in Triton's interpreter on the CPU).

Owns the intermediate buffers; the caller owns inputs, the blocks behind the addresses and the host results. Everything
is allocated here, before any CUDA graph is captured; `launch` only launches. Grids are fixed by `items`, so one
captured graph serves every number of experts from 0 to `items`.
"""

from dataclasses import dataclass

import torch
import triton

from kernels.block import GROUP, BlockLayout
from kernels.experts import decode

Tensor = torch.Tensor

UP_TILE = 16  # neurons a program: 8 KiB of codes in flight
DOWN_SPLITS = 16
COMBINE_TILE = 64
FINGERPRINT = f"triton-int64 up{UP_TILE} down{DOWN_SPLITS} combine{COMBINE_TILE}"


@dataclass(frozen=True)
class PlanWords:
    """Where the parts of a plan begin, in 64-bit words: what the host tells the GPU about one step, as one piece."""

    count: int
    table: int
    scale_2: int
    source: int
    total: int

    @classmethod
    def of(cls, items: int, lookups: int) -> "PlanWords":
        return cls(0, 1, 1 + 2 * items, 1 + 3 * items, 1 + 3 * items + -(-lookups // 2))

    @property
    def starts(self) -> tuple[int, ...]:
        return self.count, self.table, self.scale_2, self.source


@dataclass
class ExpertStep:
    """For at most `items` experts of `layout` on this device, exactly `tokens` tokens with `top_k` experts each.

    Inputs: x float32 [tokens, latent]; weights float32 [tokens, top_k]; host_y float32 [tokens, top_k, latent], results
    of other devices; and the plan, one int64 tensor with these views: count int32 [1], how many items; table int64
    [items, 2], addresses (device or page-locked host memory) of the blocks that `up` and `down` are read from; scale_2
    float32 [items, 2]; source int32 [tokens, top_k], an item number, or -1 - n for row n of host_y.
    Output: out float32 [tokens, latent], with `octets` in octet order (kernels/linear/octets.py).
    """

    layout: BlockLayout
    items: int
    tokens: int
    top_k: int
    device: torch.device
    splits: int = DOWN_SPLITS
    octets: bool = False

    def __post_init__(self) -> None:
        latent, width = self.layout.latent, self.layout.width
        if latent & (latent - 1) or self.items < 1 or self.tokens < 1:
            raise ValueError(
                f"latent size {latent} must be a power of two, items {self.items} and tokens {self.tokens} > 0"
            )

        def new(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.x = new(self.tokens, latent, dtype=torch.float32)
        self.weights = new(self.tokens, self.top_k, dtype=torch.float32)
        self.plan_words = PlanWords.of(self.items, self.tokens * self.top_k)
        self.plan = new(self.plan_words.total, dtype=torch.int64)
        words = torch.tensor_split(self.plan, self.plan_words.starts[1:])
        self.count = words[0].view(torch.int32)[:1]
        self.table = words[1].view(self.items, 2)
        self.scale_2 = words[2].view(torch.float32).view(self.items, 2)
        self.source = words[3].view(torch.int32)[: self.tokens * self.top_k].view(self.tokens, self.top_k)
        self.host_y = new(self.tokens * self.top_k, latent, dtype=torch.float32)
        self.out = new(self.tokens, latent, dtype=torch.float32)
        self.xq = new(self.tokens, latent, dtype=torch.int16)
        self.x_factor = new(self.tokens, dtype=torch.float32)
        self.h = new(self.items, self.tokens, width, dtype=torch.float32)
        self.hq = new(self.items, self.tokens, width, dtype=torch.int16)
        self.touched = new(self.items, width // GROUP, dtype=torch.int32)
        self.touched_count = new(self.items, dtype=torch.int32)
        self.y_factor = new(self.items, self.tokens, dtype=torch.float32)
        self.y = new(self.items, self.tokens, latent, dtype=torch.float32)
        self.partial = new(self.items, self.tokens, self.splits, latent, dtype=torch.int64)

    def launch(self, whole_groups: bool = False) -> None:
        """Queue the whole step on the current stream."""
        self.launch_quantise()
        self.launch_items(0, self.items, whole_groups)
        self.launch_combine()

    def launch_items(self, first: int, items: int, whole_groups: bool = False) -> None:
        """The experts of `items` items from `first` on; later ones may still be on their way."""
        self.launch_up(first, items)
        self.launch_alive(first, items)
        self.launch_down(first, items, whole_groups)
        self.launch_finish(first, items)

    def launch_quantise(self) -> None:
        decode.quantise_kernel[(self.tokens,)](self.x, self.xq, self.x_factor, LATENT=self.layout.latent)

    def launch_up(self, first: int, items: int, tile: int = UP_TILE, warps: int = 4) -> None:
        decode.up_kernel[(triton.cdiv(self.layout.width, tile), items)](
            first,
            self.table,
            self.count,
            self.scale_2,
            self.xq,
            self.x_factor,
            self.h,
            UP_SCALES=self.layout.up_scales,
            LATENT=self.layout.latent,
            WIDTH=self.layout.width,
            TOKENS=self.tokens,
            TILE=tile,
            num_warps=warps,
        )

    def launch_alive(self, first: int, items: int) -> None:
        decode.alive_kernel[(items,)](
            first,
            self.count,
            self.scale_2,
            self.h,
            self.hq,
            self.touched,
            self.touched_count,
            self.y_factor,
            WIDTH=self.layout.width,
            GROUPS_PADDED=triton.next_power_of_2(self.layout.width // GROUP),
            TOKENS=self.tokens,
            num_warps=4,
        )

    def launch_down(self, first: int, items: int, whole_groups: bool = False, warps: int = 4) -> None:
        decode.down_kernel[(self.splits, items)](
            first,
            self.table,
            self.count,
            self.hq,
            self.touched,
            self.touched_count,
            self.partial,
            DOWN_VALUES=self.layout.down_values,
            DOWN_SCALES=self.layout.down_scales,
            LATENT=self.layout.latent,
            WIDTH=self.layout.width,
            TOKENS=self.tokens,
            SPLITS=self.splits,
            WHOLE_GROUPS=whole_groups,
            num_warps=warps,
        )

    def launch_finish(self, first: int, items: int) -> None:
        tile = min(COMBINE_TILE, self.layout.latent)  # both powers of two
        decode.finish_kernel[(self.layout.latent // tile, items)](
            first,
            self.count,
            self.partial,
            self.y_factor,
            self.y,
            LATENT=self.layout.latent,
            TOKENS=self.tokens,
            SPLITS=self.splits,
            TILE=tile,
            num_warps=2,
        )

    def launch_combine(self) -> None:
        tile = min(COMBINE_TILE, self.layout.latent)  # both powers of two
        decode.combine_kernel[(self.layout.latent // tile, self.tokens)](
            self.source,
            self.weights,
            self.y,
            self.host_y,
            self.out,
            LATENT=self.layout.latent,
            TOKENS=self.tokens,
            TOP_K=self.top_k,
            TILE=tile,
            OCTETS=self.octets,
            num_warps=2,
        )
