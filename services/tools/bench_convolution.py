"""The sweep's causal convolution at the real model's shape, for bench_scan.py: right, cut anywhere, and how long.

Random inputs. Owns no clock and no figures.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.mamba import sweep
from kernels.mamba.gpu import Sizes
from services.tools.dense_cases import relative_error

TAPS = 4


@dataclass(frozen=True)
class Convolution:
    """A prompt's projections [tokens, rows] before the convolution, its weights, and a sequence's state."""

    sizes: Sizes
    projected: Tensor
    weight: Tensor
    bias: Tensor
    state: Tensor

    @classmethod
    def random(cls, sizes: Sizes, tokens: int, device: torch.device) -> "Convolution":
        generator = torch.Generator().manual_seed(2)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device)

        channels = sizes.channels
        return cls(sizes, randn(tokens, sizes.rows), randn(channels, TAPS), randn(channels), randn(channels, TAPS - 1))

    def run(self, projected: Tensor, state: Tensor, segments: Tensor) -> None:
        sweep.convolve(projected, self.sizes, self.weight, self.bias, state[None], segments)

    def found(self, cuts: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """projected and the state after pieces, one after the other."""
        projected, state, tokens = self.projected.clone(), self.state.clone(), len(self.projected)
        for start, end in itertools.pairwise([0, *(cut for cut in cuts if cut < tokens), tokens]):
            table = torch.tensor([[start, end - start, 0]], dtype=torch.int32, device=state.device)
            self.run(projected, state, table)
        return projected, state

    def error(self, projected: Tensor) -> float:
        """Of the convolved channels, against float64; inf if z or dt has changed."""
        first, last = self.sizes.inner, self.sizes.inner + self.sizes.channels
        if not torch.equal(projected[:, :first], self.projected[:, :first]):
            return float("inf")
        if not torch.equal(projected[:, last:], self.projected[:, last:]):
            return float("inf")
        window = torch.cat([self.state.T, self.projected[:, first:last]])
        tokens, mixed = len(projected), self.bias.double()
        for tap in range(TAPS):
            mixed = mixed + window[tap : tap + tokens].double() * self.weight[:, tap].double()
        return relative_error(projected[:, first:last], torch.nn.functional.silu(mixed))

    def check(self, cuts: tuple[int, ...]) -> tuple[float, bool]:
        """The error of the whole; whether a prompt that is cut has the same bits."""
        whole, cut = self.found(()), self.found(cuts)
        return self.error(whole[0]), all(torch.equal(one, other) for one, other in zip(whole, cut, strict=True))
