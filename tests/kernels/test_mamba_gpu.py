"""A Mamba-2 layer's token in Triton against the reference: outputs, both states, and what it must leave alone."""

import torch
from gpu_checks import BOUND, DEVICE, here, poisoned, relative_error
from odd_memory import randn
from torch import Tensor

from kernels.linear.gpu import Linear, Norm, Tiling
from kernels.linear.octets import from_octets, to_octets
from kernels.linear.reference import linear
from kernels.mamba import reference
from kernels.mamba.gpu import Sizes, in_proj, update
from kernels.norm.reference import gated_group_rms_norm, rms_norm

SIZES = Sizes(heads=6, head_dim=12, state=20, groups=2)
HIDDEN, TAPS, EPS, SLOTS = 32, 4, 1e-5, 5
ORDER = [3, 0, 4, 1]  # each token's slot
WIDE = Tiling(64, 1, False)


class Layer:
    """Random weights, and states in slots that are slices of all layers' states."""

    def __init__(self) -> None:
        self.weight = randn(SIZES.rows, HIDDEN, seed=1, scale=0.2).bfloat16()
        self.norm_weight, self.inner_norm = randn(HIDDEN, seed=2) + 1.0, randn(SIZES.inner, seed=3) + 1.0
        self.conv_weight, self.conv_bias = randn(SIZES.channels, TAPS, seed=4), randn(SIZES.channels, seed=5)
        self.a, self.d = -randn(SIZES.heads, seed=6).exp(), randn(SIZES.heads, seed=7)
        self.dt_bias = randn(SIZES.heads, seed=8)
        self.conv = randn(SLOTS, 3, SIZES.channels, TAPS - 1, seed=9)
        self.ssm = randn(SLOTS, 3, SIZES.heads, SIZES.head_dim, SIZES.state, seed=10)
        self.x = randn(4, HIDDEN, seed=11)

    def run(self, rows: slice, stopped: int | None = None) -> tuple[Tensor, ...]:
        """projected, y, normed, and all conv and SSM states, after one token for the given rows."""
        stop = None if stopped is None else torch.full((1,), stopped, dtype=torch.int32, device=DEVICE)
        conv, ssm = here(self.conv.clone()), here(self.ssm.clone())
        slots = here(torch.tensor(ORDER[rows], dtype=torch.int32))
        count = len(slots)
        projected, y, out = poisoned(count, SIZES.rows), poisoned(count, SIZES.inner), poisoned(count, SIZES.inner)
        arrived = torch.zeros(count, SIZES.groups, dtype=torch.int32, device=DEVICE)
        x, norm = here(to_octets(self.x[rows])), Norm(here(to_octets(self.norm_weight)), EPS)
        weights, taps, bias = Linear.pack("BF16", here(self.weight)), here(self.conv_weight), here(self.conv_bias)
        in_proj(x, norm, weights, SIZES, taps, bias, conv[:, 1], slots, projected, WIDE, stop)
        scan = (here(self.a), here(self.d), here(self.dt_bias), ssm[:, 2], slots)
        update(projected, SIZES, *scan, here(self.inner_norm), EPS, y, arrived, out, stop, part=8)
        assert not arrived.any()
        return projected.cpu(), y.cpu(), from_octets(out).cpu(), conv.cpu(), ssm.cpu()

    def expected(self, row: int) -> tuple[Tensor, ...]:
        """The same for one row, its two states alone."""
        raw = linear(rms_norm(self.x[row : row + 1], self.norm_weight, EPS), self.weight.float())
        z, xbc, dt = torch.split(raw, [SIZES.inner, SIZES.channels, SIZES.heads], dim=1)
        conv, ssm = self.conv[ORDER[row], 1].clone(), self.ssm[ORDER[row], 2].clone()
        xbc = reference.causal_conv(xbc, conv, self.conv_weight, self.conv_bias)
        group = SIZES.groups * SIZES.state
        x, b, c = torch.split(xbc, [SIZES.inner, group, group], dim=1)
        shape = (1, SIZES.groups, SIZES.state)
        y = reference.selective_scan(
            x.view(1, SIZES.heads, -1), dt, b.view(shape), c.view(shape), self.a, self.d, self.dt_bias, ssm
        ).flatten(1)
        normed = gated_group_rms_norm(y, z, self.inner_norm, SIZES.inner // SIZES.groups, EPS)
        return torch.cat([z, xbc, dt], dim=1)[0], y[0], normed[0], conv, ssm


def test_is_the_reference() -> None:
    layer = Layer()
    projected, y, normed, conv, ssm = layer.run(slice(0, 4))
    for row in range(4):
        found = (projected[row], y[row], normed[row], conv[ORDER[row], 1], ssm[ORDER[row], 2])
        for one, exact in zip(found, layer.expected(row), strict=True):
            assert relative_error(one, exact) < BOUND
    layer.dt_bias += 0.5
    assert relative_error(y[0], layer.expected(0)[1]) > 1e-3, "the time step must show"


def test_states_of_other_slots_and_layers_stay() -> None:
    layer = Layer()
    _, _, _, conv, ssm = layer.run(slice(0, 2))
    for slot in range(SLOTS):
        for layer_index in range(3):
            touched = slot in ORDER[:2]
            assert torch.equal(conv[slot, layer_index], layer.conv[slot, layer_index]) != (touched and layer_index == 1)
            assert torch.equal(ssm[slot, layer_index], layer.ssm[slot, layer_index]) != (touched and layer_index == 2)


def test_a_token_does_not_see_the_others() -> None:
    layer = Layer()
    together = layer.run(slice(0, 3))
    for row in (0, 2):
        alone = layer.run(slice(row, row + 1))
        for one, all_of in zip(alone[:3], together[:3], strict=True):
            assert torch.equal(one[0], all_of[row])
        for one, all_of in zip(alone[3:], together[3:], strict=True):
            assert torch.equal(one[ORDER[row]], all_of[ORDER[row]])


def test_states_stay_once_the_token_has_stopped() -> None:
    layer = Layer()
    *_, conv, ssm = layer.run(slice(0, 2), stopped=1)
    assert torch.equal(conv, layer.conv)
    assert torch.equal(ssm, layer.ssm)
    for found, expected in zip(layer.run(slice(0, 2), stopped=0), layer.run(slice(0, 2)), strict=True):
        assert torch.equal(found, expected)
