"""Synthetic stores: the exact shape, random weights that compute, shared blocks, and that they say what they are."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from services.engine.errors import DiskError, StoreError
from services.engine.experts.store import DENSE, DRAFT, Store
from services.engine.experts.streamer import PythonExperts
from services.engine.gpu.ledger import head_weight_bytes, read_layout
from services.engine.gpu.weights import DeviceWeights, HeadWeights
from services.engine.load import served_name
from services.engine.model import Model, Segment
from services.engine.pages import PagePool
from services.engine.state import State
from services.engine.tensorfile import read_header
from services.tools import synth
from services.tools.cli import main
from services.tools.synthetic_blocks import DISTINCT, SyntheticBlocks
from services.tools.synthetic_dense import RandomDense
from services.tools.synthetic_shapes import SMALL, SUPER, dense_layout

PHYSICAL = 37  # of 96


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return synth.synthesise(tmp_path_factory.mktemp("synth") / "store", "small", physical=PHYSICAL)


@pytest.fixture
def store(made: Store, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    shutil.copytree(made.folder, tmp_path / "store")
    return tmp_path / "store"


def test_experts_share_blocks_of_the_file(made: Store) -> None:
    assert made.experts_path.stat().st_size == PHYSICAL * made.layout.block_bytes
    offsets = [block.offset for layer in made.blocks for block in layer]
    assert len(offsets) == 96
    assert len(set(offsets)) == PHYSICAL
    contents = {bytes(made.read_block(layer, expert)) for layer in range(3) for expert in range(32)}
    assert len(contents) == PHYSICAL, "every block of the file is another"
    made.check_dense()


def test_all_experts_have_a_block_of_their_own_if_asked(tmp_path: Path) -> None:
    assert synth.synthesise(tmp_path / "store", "small", physical=1000).physical_blocks == 96


def test_the_formats_are_the_recipes(made: Store) -> None:
    formats = made.dense().formats
    assert {formats[f"layers.0.mixer.{name}"] for name in ("in_proj", "out_proj")} == {"FP8"}
    assert {formats[name] for name in ("lm_head", "layers.1.mixer.shared_experts.up_proj")} == {"W4A16_NVFP4"}
    assert {formats[f"layers.3.mixer.{name}_proj"] for name in "qkvo"} == {"BF16"}
    assert formats["layers.1.mixer.fc1_latent_proj"] == "BF16"


def test_weights_are_as_large_as_a_trained_models(made: Store) -> None:
    """Every linear keeps the size of its input, in every format; embeddings of no size would hide that."""
    dense = made.dense()
    for name in dense.formats:
        weight = dense.linear(name).dequantise()
        assert weight.square().mean().sqrt().item() * weight.shape[1] ** 0.5 == pytest.approx(1.0, abs=0.15), name
    assert dense.plain("embeddings.weight").std().item() == pytest.approx(1.0, abs=0.05)


def test_the_model_computes(made: Store) -> None:
    experts = PythonExperts(made, slots=96)
    model = Model(made.dense(), made.config, experts)
    state = State(made.config, PagePool(made.config, 2))
    logits = model.forward([Segment(state, [5, 7, 11, 13])])
    assert torch.isfinite(logits).all()
    assert 0.2 < logits.std().item() < 5
    experts.close()


def test_blocks_are_those_of_the_expert_benchmarks(made: Store) -> None:
    """Which leave the published share of neurons alive, see there."""
    blocks = SyntheticBlocks(made.layout, 1, PHYSICAL)
    originals = [blocks.original(number) for number in range(DISTINCT)]
    for number in (0, DISTINCT + 1, PHYSICAL - 1):
        layer, expert = divmod(number, made.config.experts)
        assert np.array_equal(made.read_block(layer, expert), blocks.block(originals, number))


def test_a_finished_store_is_left_alone_and_another_not_overwritten(store: Path) -> None:
    before = (store / "manifest.json").stat().st_mtime_ns
    synth.synthesise(store, "small", physical=PHYSICAL)
    assert (store / "manifest.json").stat().st_mtime_ns == before
    with pytest.raises(DiskError, match="--replace if it is synthetic"):
        synth.synthesise(store, "small", physical=PHYSICAL, seed=1)
    other = synth.synthesise(store, "small", physical=PHYSICAL, seed=1, replace=True)
    assert other.source["seed"] == 1


def test_a_real_store_is_never_replaced(demo_store: Store) -> None:
    with pytest.raises(DiskError, match="another finished store"):
        synth.synthesise(demo_store.folder, "small", replace=True)


def test_a_half_made_store_is_made_anew(store: Path) -> None:
    (store / "manifest.json").unlink()
    (store / DENSE).write_bytes(b"half")
    synth.synthesise(store, "small", physical=PHYSICAL).check_dense()


def test_only_a_synthetic_store_may_share_blocks(store: Path) -> None:
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["synthetic"] = False
    path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=f"block {PHYSICAL} has offset 0"):
        Store.open(store)


@pytest.mark.parametrize("physical", [0, 97, 36, "37", None])
def test_a_wrong_number_of_blocks_is_noticed(store: Path, physical: object) -> None:
    path = store / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["source"]["physical_blocks"] = physical
    path.write_text(json.dumps(manifest))
    with pytest.raises(StoreError, match=r"physical blocks|has offset"):
        Store.open(store)


def test_it_is_served_as_what_it_is(made: Store, demo_store: Store) -> None:
    assert served_name(made) == "synthetic-small"
    assert served_name(made, "super") == "synthetic-super"
    assert served_name(demo_store, "super") == "super"


def test_no_space_and_too_few_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DiskError, match="a layer has 32 experts"):
        synth.synthesise(tmp_path / "few", "small", physical=31)
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(DiskError, match=r"GB needed, 0\.0 GB free"):
        synth.synthesise(tmp_path / "full", "small")
    assert not (tmp_path / "full" / "manifest.json").exists()


def test_large_tensors_come_from_pools_and_no_two_rows_are_alike() -> None:
    """With a pool smaller than a tensor, as a real one's are."""
    config = replace(SMALL, vocab_size=1024)
    layout = dense_layout(config)
    values = RandomDense(layout, seed=3, pool=4096 + 43)
    data = np.concatenate(list(values.pieces("embeddings.weight")))
    rows = data.reshape(config.vocab_size, -1)
    assert rows.nbytes == config.vocab_size * config.hidden_size * 2
    assert len({bytes(row) for row in rows}) == config.vocab_size
    codes = np.concatenate(list(values.pieces("lm_head.weight")))
    assert codes.nbytes == config.vocab_size * config.hidden_size // 2


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 3 * 8192 + 17])
def test_a_file_holds_what_was_appended(tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth, "BUFFER_BYTES", 8192)
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    with synth.DirectFile(tmp_path / "file") as file:
        for begin in range(0, size, 3000):
            file.append(data[begin : begin + 3000])
    assert (tmp_path / "file").read_bytes() == data.tobytes()
    assert (file.size_bytes, file.digest) == (size, xxhash.xxh64_intdigest(data.data))


def test_super_has_the_real_models_shape() -> None:
    """Against published counts: parameters of an expert and of each kind of layer, bytes of a block."""
    parameters = {"moe": 0, "mamba": 0, "attention": 0}
    for name, shape in synth.dense_layout(SUPER, "3-fp8").items():
        if name.startswith("layers."):
            kind = SUPER.layers[int(name.split(".")[1])]
            parameters[kind] += int(np.prod(shape[1])) if "weight_scale" not in name else 0
    assert parameters["mamba"] == 40 * 109_640_064
    assert parameters["attention"] == 8 * 35_655_680
    assert parameters["moe"] == 40 * (2_873_102_848 - 512 * 5_505_024)
    assert SUPER.block.block_bytes == 3_096_576
    assert len(SUPER.layers) == 88


def test_the_command_says_synthetic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["synth", str(tmp_path / "store"), "--shape", "small", "--physical", "40"]) == 0
    printed = capsys.readouterr().out
    assert "SYNTHETIC store, shape small, random weights; 96 experts are 40 blocks" in printed
    assert read_header(tmp_path / "store" / DENSE).keys() == dense_layout(SMALL).keys()


def test_a_block_that_drafts_is_one_more_layer_if_asked_for(made: Store, tmp_path: Path) -> None:
    store = synth.synthesise(tmp_path / "store", "small", physical=PHYSICAL, block=True)
    assert [len(layer) for layer in store.layers] == [32] * 4
    assert store.fingerprint == made.fingerprint, "the model is the same with and without"
    store.check_dense()
    store.read_block(3, 31)
    dense = DeviceWeights.load(store.dense(), store.config, torch.device("cpu"))
    draft = store.draft()
    assert draft is not None
    head = HeadWeights.load(draft, dense, torch.device("cpu"))
    assert head.eh_proj.format == "BF16"
    assert head.network.size_bytes == head_weight_bytes(SMALL, read_layout(store.folder / DRAFT))
    assert synth.synthesise(store.folder, "small", physical=PHYSICAL, block=True).draft_file == store.draft_file
    with pytest.raises(DiskError, match="another finished store"):
        synth.synthesise(store.folder, "small", physical=PHYSICAL)
    assert synth.synthesise(store.folder, "small", physical=PHYSICAL, replace=True).draft_file is None
    assert not (store.folder / DRAFT).exists()
