"""On a GPU: the expert step gives the same bits wherever its experts are computed, and a dead host never wedges it."""

import signal
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
@pytest.mark.parametrize(("waves", "apart"), [((), False), ((6, 6, 6, 4), False), ((20, 1, 1), True)])
def test_every_route_gives_the_same_bits(slots: SharedSlots, route: Route, waves: tuple[int, ...], apart: bool) -> None:
    given = inputs(1, seed=2)
    whole = run(slots, Method("cpu", share=0), given)
    for whole_groups in (False, True):
        assert torch.equal(run(slots, Method("gpu", route, TOP_K, waves, whole_groups, apart=apart), given), whole)


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


def test_blocks_in_the_cards_memory_give_the_same_bits(catalog: Catalog, slots: SharedSlots) -> None:
    given = inputs(2, seed=11)
    whole = run(slots, Method("split", share=9), given)
    with opened(catalog, 3, LAYERS * EXPERTS) as own:
        own.keep_in_vram(25, torch.device("cuda"))
        assert own.vram is not None
        rig = Rig(own, LAYERS, 2, TOP_K, Method("split", share=9))
        rig.fill(*given)
        for _ in range(4):
            rig.replay()
            assert torch.equal(rig.out.cpu(), whole)
            own.vram.improve()
        assert len(own.vram.held()) == 25
        before = rig.turns.times().vram_experts
        rig.replay()
        assert torch.equal(rig.out.cpu(), whole)
        assert rig.turns.times().vram_experts == before + 25
        own.vram.memory.zero_()
        rig.replay()
        assert not torch.equal(rig.out.cpu(), whole), "it is there that they are read"
        rig.close()
        own.host.check()


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
        "import hashlib, sys; from pathlib import Path; from tests.kernels import test_device_turns as t\n"
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


@pytest.mark.parametrize("stall_s", [0.5, 5.0])
@pytest.mark.parametrize("turn", [0, 1, LAYERS - 1])
def test_a_host_that_stalls_ends_the_wait_not_the_gpu_and_the_token_goes_on(
    slots: SharedSlots, turn: int, stall_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(1)
    whole = run(slots, Method("cpu", share=0), given)
    rig = Rig(slots, LAYERS, 1, TOP_K, Method("split"))
    rig.fill(*given)
    serve, ended = rig.turns.serve, []

    def stalls(turns: int) -> int:
        served = serve(min(turn, turns))
        if turns == LAYERS:
            time.sleep(stall_s / 2)
            begun = time.monotonic()
            torch.cuda.synchronize()  # the GPU is through with its graph while the host still sleeps
            ended.append(time.monotonic() - begun)
            time.sleep(stall_s / 2)
        return served + serve(turns - served)

    monkeypatch.setattr(rig.turns, "serve", stalls)
    rig.replay()
    out = rig.out.cpu()
    assert rig.late == 1
    assert ended[0] < 0.2
    assert torch.equal(out, whole)
    rig.replay()
    assert torch.equal(rig.out.cpu(), whole)
    rig.close()


def test_a_host_that_is_killed_in_a_token_leaves_the_gpu_to_others(catalog: Catalog, slots: SharedSlots) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from tests.kernels import test_device_turns as t\n"
        "catalog = t.BLOCKS.write(Path(sys.argv[1]) / 'experts.bin')\n"
        "with t.opened(catalog, 2, 60) as slots:\n"
        "    rig = t.Rig(slots, t.LAYERS, 1, t.TOP_K, t.Method('split')); rig.fill(*t.inputs(1)); rig.graph.replay()\n"
        "    rig.turns.serve(1); os.kill(os.getpid(), signal.SIGKILL)"
    )
    folder = catalog.path.parent / "killed"
    folder.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(folder)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    begun = time.monotonic()
    given = inputs(2, seed=4)
    assert torch.equal(run(slots, Method("split"), given), run(slots, Method("cpu", share=0), given))
    assert time.monotonic() - begun < 20.0


def test_a_system_that_refuses_to_page_lock_says_so_and_nothing_is_lost(catalog: Catalog) -> None:
    with opened(catalog, 3, 30) as shared:
        with pytest.raises(HandoffError, match="refused to page-lock"):  # what is locked cannot be locked again
            SharedSlots(shared.host)
        given = inputs(1)
        assert torch.equal(run(shared, Method("split"), given), run(shared, Method("cpu", share=0), given))


def test_one_changed_bit_is_seen(catalog: Catalog, slots: SharedSlots, tmp_path: Path) -> None:
    given = inputs(1, seed=6)
    whole = run(slots, Method("split", share=9), given)
    given[2][0, 0, 0] += 0.25
    assert not torch.equal(run(slots, Method("split", share=9), given), whole)
