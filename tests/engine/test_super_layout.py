"""The loader takes the real model's whole list of tensors, as it is published. Headers only: there is no data."""

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.test_model_config import SUPER
from vectors.super_layout import Layout

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError
from services.tools import repack_dense


@pytest.fixture(scope="module", autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """Half of the time would go into looking for garbage among a million objects that stay."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout()


def test_the_list_is_the_published_one(layout: Layout) -> None:
    assert len(layout.tensors) == 165_860
    assert len(layout.modules) == 41_100
    assert Counter(entry["quant_algo"] for entry in layout.modules.values()) == {"NVFP4": 40_961, "FP8": 139}
    assert layout.size_bytes == pytest.approx(80.3e9, rel=0.001)


def test_it_is_read_whole_and_a_contradiction_in_it_is_found(layout: Layout, tmp_path: Path) -> None:
    source = Checkpoint.open(layout.write(tmp_path / "super", SUPER))
    assert len(source.tensors) + len(source.mtp) == len(layout.tensors)
    assert Counter(source.formats.values())["NVFP4"] == 40 * 512 * 2 + 1
    assert (source.formats["layers.41.mixer.shared_experts.up_proj"], source.formats["lm_head"]) == ("BF16", "BF16")
    assert source.config.block.block_bytes == 3_096_576
    embeddings = source.tensors["embeddings.weight"].size_bytes
    dense = sum(source.tensors[name].size_bytes for name in repack_dense.names(source)) - embeddings
    halved = sum(source.tensors[f"{name}.weight"].size_bytes // 2 for name in repack_dense.rounded(source))
    assert dense == pytest.approx(9.9e9, rel=0.01)
    assert (dense - halved) / 2**30 < 7.2

    config, quantised = tmp_path / "super" / "config.json", '"backbone.layers.86.mixer.in_proj": {"quant_algo": "FP8"}'
    assert quantised in config.read_text()
    config.write_text(config.read_text().replace(quantised, quantised.replace("FP8", "NVFP4")))
    with pytest.raises(CheckpointError, match=r"layers\.86\.mixer\.in_proj\.weight: .* says NVFP4, .* found FP8"):
        Checkpoint.open(tmp_path / "super")
