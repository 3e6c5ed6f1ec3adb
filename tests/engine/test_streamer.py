"""The engine's experts: C++ and Python give the same bits and count the same; failures have the engine's names."""

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.build import BuildError
from kernels.experts import reference
from services.engine.errors import DiskError, MemoryPlanError, StepError
from services.engine.experts import streamer
from services.engine.experts.store import Store
from services.engine.experts.streamer import Experts, HostExperts, PythonExperts, open_experts

Opener = Callable[..., Experts]
UNPACKED: dict[tuple[int, int], reference.Expert] = {}  # of the demo's store


@pytest.fixture
def opened(demo_store: Store) -> Iterator[Opener]:
    found: list[Experts] = []

    def open_one(kind: type = HostExperts, store: Store = demo_store, **options: int) -> Experts:
        if kind is PythonExperts:
            found.append(PythonExperts(store, slots=options["slots"]))
        else:
            found.append(open_experts(store, **options))
        assert isinstance(found[-1], kind)
        return found[-1]

    yield open_one
    for experts in found:
        experts.check()
        experts.close()


def batch(store: Store, rows: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    config = store.config
    ids = torch.stack([torch.randperm(config.experts, generator=generator) for _ in range(rows)])
    shape = rows, config.experts_per_token
    x = torch.randn(rows, config.latent_size, generator=generator)
    return ids[:, : shape[1]].to(torch.int32), torch.rand(shape, generator=generator), x


def expected(store: Store, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
    """The definition, straight from the store."""

    def expert(id: int) -> reference.Expert:
        if (layer, id) not in UNPACKED:
            block, data = store.blocks[layer][id], store.read_block(layer, id)
            UNPACKED[layer, id] = reference.unpack_expert(data, store.layout, block.up_scale, block.down_scale)
        return UNPACKED[layer, id]

    return reference.step(ids, weights, x, expert)


def damaged(store: Store, folder: Path, layer: int, expert: int) -> Store:
    shutil.copytree(store.folder, folder)
    with (folder / "experts.bin").open("r+b") as file:
        file.seek(store.blocks[layer][expert].offset + 7)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    return Store.open(folder)


@pytest.mark.parametrize("kind", [HostExperts, PythonExperts])
@pytest.mark.parametrize("slots", [1, 40, 100_000])
def test_both_ways_give_the_definitions_bits(demo_store: Store, opened: Opener, kind: type, slots: int) -> None:
    experts = opened(kind, slots=slots)
    for seed, rows in enumerate((1, 2, 7)):
        layer = seed % len(demo_store.blocks)
        arguments = batch(demo_store, rows, seed)
        assert torch.equal(experts.step(layer, *arguments), expected(demo_store, layer, *arguments))


def test_both_ways_count_the_same(demo_store: Store, opened: Opener) -> None:
    counted = []
    for kind in (HostExperts, PythonExperts):
        experts = opened(kind, slots=100_000)
        for step in range(12):
            experts.step(step % 2, *batch(demo_store, 2, step % 5))
        counters = experts.counters()
        assert counters.compute_s > 0
        assert counters.disk_wait_s > 0
        counted.append(replace(counters, compute_s=0, disk_wait_s=0))
    assert counted[0] == counted[1]
    assert counted[0].hits > 0


@pytest.mark.parametrize("kind", [HostExperts, PythonExperts])
def test_a_small_cache_counts_what_it_does(demo_store: Store, opened: Opener, kind: type) -> None:
    experts, asked = opened(kind, slots=9), 0
    for step in range(12):
        arguments = batch(demo_store, 2, step % 2)
        asked += len(set(arguments[0].flatten().tolist()))
        experts.step(step % 2, *arguments)
    counters = experts.counters()
    assert counters.hits + counters.misses == asked
    assert counters.slots_used == counters.slots_total == 9
    assert counters.evictions == counters.misses - 9
    assert counters.demand_read_bytes == counters.misses * demo_store.layout.block_bytes


def test_more_slots_than_experts_are_not_made(demo_store: Store, opened: Opener) -> None:
    total = len(demo_store.blocks) * demo_store.config.experts
    for kind in (HostExperts, PythonExperts):
        assert opened(kind, slots=10 * total).counters().slots_total == total


def test_prefetch_is_a_hint(demo_store: Store, opened: Opener) -> None:
    for kind in (HostExperts, PythonExperts):
        experts = opened(kind, slots=20)
        experts.prefetch(99, torch.tensor([1], dtype=torch.int32))
        experts.prefetch(1, torch.tensor([1, 1, -5, 10_000], dtype=torch.int32))
        experts.prefetch(0, torch.tensor([], dtype=torch.int32))
        experts.step(0, *batch(demo_store, 2, 1))


@pytest.mark.parametrize("kind", [HostExperts, PythonExperts])
def test_a_damaged_block_fails_its_step_only(demo_store: Store, opened: Opener, kind: type, tmp_path: Path) -> None:
    store = damaged(demo_store, tmp_path / "store", layer=2, expert=5)
    experts = opened(kind, store, slots=8)
    ids, weights, x = batch(store, 1, 1)
    ids[0, 2] = 5
    with pytest.raises(StepError, match=r"MoE layer 2, expert 5: .*experts.bin.*checksum.*repack") as caught:
        experts.step(2, ids, weights, x)
    assert str(tmp_path) not in str(caught.value), "clients hear this"
    ids[0, 2] = 6
    assert torch.equal(experts.step(2, ids, weights, x), expected(demo_store, 2, ids, weights, x))
    with pytest.raises(StepError):
        experts.step(2, ids - ids + 5, weights, x)


def test_a_missing_file_and_too_little_memory(
    demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = replace(demo_store, folder=tmp_path)
    with pytest.raises(DiskError, match=r"experts\.bin: cannot be opened"):
        open_experts(store, slots=4)
    with pytest.raises(MemoryPlanError, match="cache of 0 experts cannot be had"):
        open_experts(demo_store, slots=0)


def test_without_a_compiler_it_is_python_and_says_so(
    demo_store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(threads: int, spin_us: int) -> None:
        raise BuildError("no C++ compiler found: install one")

    monkeypatch.setattr(streamer, "use_threads", missing)
    with caplog.at_level(logging.WARNING):
        experts = open_experts(demo_store, slots=4)
    assert isinstance(experts, PythonExperts)
    assert "install one" in caplog.text
    experts.close()


def test_counters_have_the_protocols_names(opened: Opener) -> None:
    assert all(value == 0 or name == "slots_total" for name, value in asdict(opened(slots=3).counters()).items())
