"""On a GPU: the expert step gives the same bits wherever its experts are computed, and a dead host never wedges it."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kernels.block import BlockLayout
from kernels.experts import reference
from kernels.experts.device.turns import HandoffError, Route, SharedSlots
from kernels.experts.host.binding import Catalog, Host
from kernels.workers.pool import Workers, available_isas
from services.tools.expert_rig import Method, Rig
from services.tools.synthetic_blocks import SyntheticBlocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROOT = Path(__file__).parents[2]
LAYERS, EXPERTS, TOP_K = 3, 40, 22
BLOCKS = SyntheticBlocks(BlockLayout(1024, 2688), LAYERS, EXPERTS)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    return BLOCKS.write(tmp_path_factory.mktemp("blocks") / "experts.bin")


@pytest.fixture(scope="module")
def slots(catalog: Catalog) -> Iterator[SharedSlots]:
    with opened(catalog, threads=4, slots=LAYERS * EXPERTS) as shared:
        yield shared


@contextmanager
def opened(
    catalog: Catalog, threads: int, slots: int, isa: str | None = None, poison: bool = False
) -> Iterator[SharedSlots]:
    host = Host(catalog, Workers(threads, 1000), slots=slots, readers=3, isa=isa, poison=poison)
    shared = SharedSlots(host)
    yield shared
    shared.close()
    host.close()


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(LAYERS * tokens)])
    weights = torch.rand(LAYERS, tokens, TOP_K, generator=generator)
    x = BLOCKS.inputs(LAYERS * tokens, seed).view(LAYERS, tokens, -1)
    return ids.int().view(LAYERS, tokens, TOP_K), weights, x


def expected(catalog: Catalog, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    data = catalog.path.read_bytes()

    def expert(layer: int, id: int) -> reference.Expert:
        offset = int(catalog.offsets[layer, id])
        block = torch.frombuffer(bytearray(data[offset : offset + catalog.layout.block_bytes]), dtype=torch.uint8)
        scales = float(catalog.up_scales[layer, id]), float(catalog.down_scales[layer, id])
        return reference.unpack_expert(block.numpy(), catalog.layout, *scales)

    layers = range(len(ids))
    return torch.stack([reference.step(ids[n], weights[n], x[n], lambda id, n=n: expert(n, id)) for n in layers])


def run(slots: SharedSlots, method: Method, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    rig = Rig(slots, LAYERS, given[0].shape[1], TOP_K, method)
    rig.fill(*given)
    rig.out.fill_(float("nan"))
    rig.replay()
    out = rig.out.cpu()
    rig.close()
    slots.host.check()
    return out


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_equals_the_reference(slots: SharedSlots, catalog: Catalog, tokens: int) -> None:
    given = inputs(tokens)
    assert torch.equal(run(slots, Method("split"), given), expected(catalog, *given))


def test_every_split_gives_the_same_bits(slots: SharedSlots) -> None:
    given = inputs(1, seed=1)
    whole = run(slots, Method("cpu", share=0), given)
    for share in range(1, TOP_K + 1):
        assert torch.equal(run(slots, Method("split", share=share), given), whole), share


@pytest.mark.parametrize("route", list(Route))
@pytest.mark.parametrize("waves", [1, 4])
def test_every_route_gives_the_same_bits(slots: SharedSlots, route: Route, waves: int) -> None:
    given = inputs(1, seed=2)
    whole = run(slots, Method("cpu", share=0), given)
    for whole_groups in (False, True):
        assert torch.equal(run(slots, Method("gpu", route, TOP_K, waves, whole_groups), given), whole)


def test_threads_and_instruction_sets_give_the_same_bits(catalog: Catalog, slots: SharedSlots) -> None:
    given = inputs(2, seed=3)
    whole = run(slots, Method("split", share=9), given)
    for threads in (1, 2, 7, 16):
        for isa in available_isas():
            with opened(catalog, threads, LAYERS * EXPERTS, isa) as other:
                assert torch.equal(run(other, Method("split", share=5, timeout_ns=10**9), given), whole), (threads, isa)


def test_a_cache_smaller_than_the_model_gives_the_same_bits(catalog: Catalog, slots: SharedSlots) -> None:
    given = inputs(2, seed=4)
    whole = run(slots, Method("split", share=9), given)
    for count in (2, 10, 44, 60):
        with opened(catalog, 3, count, poison=True) as small:
            assert torch.equal(run(small, Method("split", share=9), given), whole), count


@pytest.mark.parametrize("value", [1.0, -1.0, 0.0], ids=["none alive", "all alive", "zero"])
def test_alive_sets_that_are_empty_or_full(slots: SharedSlots, catalog: Catalog, value: float) -> None:
    ids, weights, x = inputs(1, seed=8)
    x = torch.full_like(x, value)
    out = run(slots, Method("split", share=11), (ids, weights, x))
    assert torch.equal(out, expected(catalog, ids, weights, x))


def test_equal_experts_and_weights_tie_in_any_order_of_arrival(slots: SharedSlots, catalog: Catalog) -> None:
    ids, weights, x = inputs(4, seed=9)
    ids[:, 1:] = ids[:, :1]  # all tokens choose the same experts
    weights[:] = 0.5
    assert torch.equal(run(slots, Method("split"), (ids, weights, x)), expected(catalog, ids, weights, x))


def test_three_processes_give_the_same_bits(catalog: Catalog) -> None:
    code = (
        "import hashlib, sys; from pathlib import Path; from tests.kernels import test_turns as t\n"
        "catalog = t.BLOCKS.write(Path(sys.argv[1]) / 'experts.bin')\n"
        "with t.opened(catalog, 5, 60) as slots: out = t.run(slots, t.Method('split'), t.inputs(2, seed=10))\n"
        "print(hashlib.sha256(out.numpy().tobytes()).hexdigest())"
    )
    command = [sys.executable, "-c", code]
    digests = set()
    for number in range(3):
        folder = catalog.path.parent / str(number)
        folder.mkdir()
        done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=True)
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_bad_input_makes_its_token_nan_and_no_other(slots: SharedSlots) -> None:
    ids, weights, x = inputs(2, seed=5)
    whole = run(slots, Method("split", share=9), (ids, weights, x))
    x = x.clone()
    x[:, 0, 17] = float("inf")
    out = run(slots, Method("split", share=9), (ids, weights, x))
    assert out[:, 0].isnan().all()
    assert torch.equal(out[:, 1], whole[:, 1])


def test_a_host_that_does_not_answer_ends_the_wait_not_the_gpu(slots: SharedSlots) -> None:
    rig = Rig(slots, LAYERS, 1, TOP_K, Method("split"))
    given = inputs(1)
    rig.fill(*given)
    begun = time.monotonic()
    rig.graph.replay()
    torch.cuda.synchronize()
    assert time.monotonic() - begun < 1.0
    assert int(rig.turns.stop) == 1
    with pytest.raises(HandoffError, match="stopped for too long"):
        rig.turns.serve(LAYERS)
    rig.turns.stop.zero_()
    rig.turns.retire()
    rig.replay()
    good = rig.out.cpu()
    rig.close()
    assert torch.equal(good, run(slots, Method("cpu", share=0), given))


def test_one_changed_bit_is_seen(catalog: Catalog, slots: SharedSlots, tmp_path: Path) -> None:
    given = inputs(1, seed=6)
    whole = run(slots, Method("split", share=9), given)
    given[2][0, 0, 0] += 0.25
    assert not torch.equal(run(slots, Method("split", share=9), given), whole)
