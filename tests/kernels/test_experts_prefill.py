"""The sweep's expert kernels agree with their definition: in the interpreter here, on the GPU where there is one."""

from dataclasses import dataclass, field

import pytest
import torch
from expert_blocks import PackedExpert, random_expert
from gpu_checks import DEVICE, here, relative_error

from kernels.block import BlockLayout
from kernels.experts import prefill, prefill_reference, reference
from kernels.experts.prefill import Item, Items

Tensor = torch.Tensor
EXACT_SCALES = (0x30, 0x40)  # E4M3 1/2 to 2 by sixteenths: with small whole inputs every sum is exact in float32
# float16 keeps 8 bits of h and y, so a sum that differs in float32's last bits may round to the neighbour.
BOUND = 2e-3
LAYOUTS = [BlockLayout(96, 80), BlockLayout(64, 144), BlockLayout(32, 16)]
SMALL = BlockLayout(96, 80)
NUMPY_SAYS = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")  # the interpreter


@dataclass
class Layer:
    """Experts of a layer, and a sweep over them with all that it must not read or write poisoned."""

    layout: BlockLayout
    experts: list[PackedExpert]
    gap: int = 1  # empty slots of the ring before each block
    h: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def scales(self, name: str) -> Tensor:
        return here(torch.tensor([getattr(expert, name) for expert in self.experts], dtype=torch.float32))

    def ring(self) -> Tensor:
        ring = torch.full((len(self.experts) * (1 + self.gap), self.layout.block_bytes), 0xFF, dtype=torch.uint8)
        for number, expert in enumerate(self.experts):
            ring[self.slot(number), : self.layout.used_bytes] = torch.from_numpy(expert.block)[: self.layout.used_bytes]
        return here(ring)

    def slot(self, number: int) -> int:
        return number * (1 + self.gap) + self.gap

    def sweep(self, ids: Tensor, x: Tensor, groups: list[list[int]], most: int = 1 << 20) -> Tensor:
        """y float16 [T * top_k, latent] by groups of experts; of each expert at most `most` lookups in one pass."""
        ring, tables = self.ring(), Items(2, DEVICE)
        order = prefill.order(here(ids), len(self.experts))
        counts = order.starts.diff().tolist()
        self.y = torch.full((ids.numel() + 1, self.layout.latent), torch.nan, dtype=torch.float16, device=DEVICE)
        for group in groups:
            for first in range(0, max([1, *(counts[id] for id in group)]), most):
                items, rows = [], 1  # a row of h before the first
                for id in group:
                    items.append(Item(id, self.slot(id), rows, first, most))
                    rows += max(0, min(counts[id] - first, most))
                largest = max(max(0, min(counts[id] - first, most)) for id in group)
                self.h = torch.full((rows + 1, self.layout.width), torch.nan, dtype=torch.float16, device=DEVICE)
                table = tables.put(items)
                prefill.up(ring, self.layout, table, largest, order, here(x), self.scales("up_scale"), self.h)
                prefill.down(ring, self.layout, table, largest, order, self.h, self.scales("down_scale"), self.y[:-1])
                assert self.h[0].isnan().all(), "a row before the group's was written"
                assert self.h[-1].isnan().all(), "a row after the group's was written"
        assert self.y[-1].isnan().all()
        return self.y[:-1].cpu()

    def expected(self, ids: Tensor, x: Tensor) -> Tensor:
        y = torch.empty(ids.numel(), self.layout.latent, dtype=torch.float16)
        for lookup, id in enumerate(ids.flatten().tolist()):
            expert = self.experts[id].unpacked
            row = x[lookup // ids.shape[1]][None]
            y[lookup] = prefill_reference.down(prefill_reference.up(row, expert), expert)[0]
        return y


def random_layer(layout: BlockLayout, experts: int, scale_codes: tuple[int, int] = (0, 0x7E)) -> Layer:
    return Layer(layout, [random_expert(layout, seed, scale_codes) for seed in range(experts)])


def random_ids(tokens: int, top_k: int, experts: int, seed: int = 0) -> Tensor:
    """Expert 1 is chosen by every token, expert 2 by the third only, the last by none."""
    generator = torch.Generator().manual_seed(seed)
    others = torch.tensor([0, *range(3, experts - 1)])
    rows = []
    for token in range(tokens):
        row = others[torch.randperm(len(others), generator=generator)[:top_k]]
        row[token % top_k] = 1
        if token == 2:
            row[(token + 1) % top_k] = 2
        rows.append(row)
    return torch.stack(rows).to(torch.int32)


def random_x(tokens: int, latent: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, latent, generator=torch.Generator().manual_seed(seed)).half()


def whole_x(tokens: int, latent: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (tokens, latent), generator=generator).half()


def close(found: Tensor, expected: Tensor) -> bool:
    return relative_error(found, expected) < BOUND


def test_order_sorts_lookups_by_expert() -> None:
    ids = random_ids(37, 3, 7)
    order = prefill.order(here(ids), 7)
    flat = ids.flatten().tolist()
    assert order.rows.tolist() == sorted(range(len(flat)), key=lambda lookup: (flat[lookup], lookup))
    counts = [flat.count(id) for id in range(7)]
    assert order.starts.tolist() == [sum(counts[:id]) for id in range(8)]
    assert counts[1] == 37
    assert counts[2] == 1
    assert counts[6] == 0


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_up_is_its_definition_bit_for_bit_where_sums_are_exact(layout: BlockLayout) -> None:
    layer = random_layer(layout, 3, EXACT_SCALES)
    x = whole_x(70, layout.latent)
    layer.sweep(torch.ones(70, 1, dtype=torch.int32), x, [[1]])
    expected = prefill_reference.up(x, layer.experts[1].unpacked)
    assert (expected > 0).float().mean() > 0.2
    assert torch.equal(layer.h[1:-1].cpu(), expected)
    assert not torch.equal(layer.h[1:-1].cpu(), prefill_reference.up(x, layer.experts[0].unpacked))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_down_is_its_definition_bit_for_bit_where_sums_are_exact(layout: BlockLayout) -> None:
    layer = random_layer(layout, 3, EXACT_SCALES)
    h = whole_x(70, layout.width).abs()
    order = prefill.order(here(torch.ones(70, 1, dtype=torch.int32)), 3)
    table = Items(1, DEVICE).put([Item(1, layer.slot(1), 0)])
    y = torch.full((70, layout.latent), torch.nan, dtype=torch.float16, device=DEVICE)
    prefill.down(layer.ring(), layout, table, 70, order, here(h), layer.scales("down_scale"), y)
    assert torch.equal(y.cpu(), prefill_reference.down(h, layer.experts[1].unpacked))
    assert not torch.equal(y.cpu(), prefill_reference.down(h, layer.experts[0].unpacked))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_lookup_gets_its_expert_for_all_codes_and_scales(layout: BlockLayout) -> None:
    layer = random_layer(layout, 7)
    ids, x = random_ids(67, 3, 7), random_x(67, layout.latent)
    found, expected = layer.sweep(ids, x, [[3, 0, 1, 6], [5, 2, 4]]), layer.expected(ids, x)
    for lookup in range(len(found)):
        assert close(found[lookup], expected[lookup]), lookup
    assert not close(found.roll(1, 0), expected), "the check sees results that are another lookup's"


def test_a_lookup_does_not_depend_on_the_others() -> None:
    layer = random_layer(SMALL, 7)
    ids, x = random_ids(67, 3, 7), random_x(67, SMALL.latent)
    whole = layer.sweep(ids, x, [[0, 1, 2, 3, 4, 5, 6]])
    assert torch.equal(layer.sweep(ids, x, [[6, 3], [1], [5, 4, 2], [0]]), whole)
    assert torch.equal(layer.sweep(ids, x, [[4, 2, 1, 0], [3, 5]], most=40), whole)
    parts = [layer.sweep(ids[part], x[part], [[0, 1, 2, 3, 4, 5]]) for part in (slice(0, 5), slice(5, None))]
    assert torch.equal(torch.cat(parts), whole)
    changed = x.clone()
    changed[40] += 1
    other = layer.sweep(ids, changed, [[0, 1, 2, 3, 4, 5, 6]])
    same = (other == whole).all(dim=1).unflatten(0, (67, 3))
    assert not same[40].any()
    assert same[torch.arange(67) != 40].all()


@NUMPY_SAYS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    layer = random_layer(SMALL, 7)
    ids, x = random_ids(67, 3, 7), random_x(67, SMALL.latent)
    clean = layer.sweep(ids, x, [[0, 1, 2, 3, 4, 5]])
    x[66, 5] = bad
    found = layer.sweep(ids, x, [[0, 1, 2, 3, 4, 5]])
    assert torch.equal(found[: 66 * 3], clean[: 66 * 3])
    assert found[66 * 3 :].isnan().all()  # infinity times the zeros among the weights


@NUMPY_SAYS
def test_an_h_beyond_float16_is_not_hidden() -> None:
    layer = random_layer(SMALL, 2, (0x7E, 0x7E))
    x = torch.full((1, SMALL.latent), 1e30).half()
    x[0, ::2] = -2e30
    assert not layer.sweep(torch.ones(1, 1, dtype=torch.int32), x, [[1]]).isfinite().any()


@pytest.mark.parametrize(("tokens", "top_k", "latent"), [(5, 3, 96), (1, 22, 600), (3, 1, 32)])
def test_combine_adds_in_router_rank_order(tokens: int, top_k: int, latent: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    y = torch.randn(tokens * top_k, latent, generator=generator).half()
    weights = torch.rand(tokens, top_k, generator=generator)
    for dtype in (torch.float32, torch.float16):
        out = torch.full((tokens, latent), torch.nan, dtype=dtype, device=DEVICE)
        prefill.combine(here(y), here(weights), out)
        assert torch.equal(out.cpu(), prefill_reference.combine(y, weights).to(dtype))
    if top_k > 1:
        backwards = prefill_reference.combine(
            y.unflatten(0, (tokens, top_k)).flip(1).flatten(0, 1), weights.flip(1).contiguous()
        )
        assert not torch.equal(backwards, prefill_reference.combine(y, weights)), "another order has other bits"


def test_combine_keeps_nan_and_infinity() -> None:
    y = torch.ones(6, 32, dtype=torch.float16)
    y[2, 3], y[4, 5] = float("nan"), float("inf")
    out = torch.empty(3, 32, dtype=torch.float16, device=DEVICE)
    prefill.combine(here(y), here(torch.ones(3, 2)), out)
    expected = prefill_reference.combine(y, torch.ones(3, 2)).half()
    assert expected.isnan().sum() == 1
    assert expected.isinf().sum() == 1
    assert torch.equal(out.cpu().nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_a_whole_layer_is_near_decodes_arithmetic() -> None:
    """Two definitions of the same layer: apart by float16's roundings, no more."""
    layer = random_layer(SMALL, 7)
    ids, x = random_ids(20, 3, 7), random_x(20, SMALL.latent)
    weights = torch.rand(20, 3, generator=torch.Generator().manual_seed(0))
    y = layer.sweep(ids, x, [[0, 1, 2, 3, 4, 5]])
    out = torch.empty(20, SMALL.latent, device=DEVICE)
    prefill.combine(here(y), here(weights), out)
    by_definition = prefill_reference.step(ids, weights, x, lambda id: layer.experts[id].unpacked)
    assert close(out, by_definition)
    by_decode = reference.step(ids, weights, x.float(), lambda id: layer.experts[id].unpacked)
    assert relative_error(out, by_decode) < 5e-3


def test_tables_are_used_again() -> None:
    tables = Items(2, DEVICE)
    for turn in range(5):
        items = [Item(turn, turn + 1, turn + 2, turn + 3, turn + 4), Item(9, 8, 7)]
        assert tables.put(items).tolist() == [[turn + i for i in range(5)], [9, 8, 7, 0, 2**31 - 1]]
