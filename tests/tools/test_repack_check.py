"""The comparison of a store with its checkpoint: passes for a sound one, names the expert of a wrong one."""

import json
from pathlib import Path

import pytest

from services.tools import repack_check, small_checkpoint
from services.tools.cli import main
from services.tools.repack import repack
from services.tools.small_checkpoint import Style


def quiet(line: str) -> None:
    pass


@pytest.mark.parametrize("style", ["3-super", "3.5-super-vl", "3.5-super-vl-export"])
def test_every_expert_of_a_sound_store_passes(tmp_path: Path, style: Style) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c", style)
    repack(checkpoint, tmp_path / "store", say=quiet)
    assert repack_check.check(checkpoint, tmp_path / "store", 5) == 5
    assert repack_check.check(checkpoint, tmp_path / "store", 1000) == 16


def test_the_demo_passes(demo_checkpoint: Path, demo_store) -> None:
    assert repack_check.check(demo_checkpoint, demo_store.folder, 16) == 16


@pytest.mark.parametrize("part", ["up values", "up scales", "down values", "down scales", "padding", "manifest"])
def test_one_wrong_byte_is_found_and_named(tmp_path: Path, part: str) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c")
    store = repack(checkpoint, tmp_path / "store", say=quiet)
    layout = store.layout
    if part == "manifest":
        path = tmp_path / "store" / "manifest.json"
        content = json.loads(path.read_text())
        content["layers"][1]["blocks"][2]["down_scale"] *= 1.5
        path.write_text(json.dumps(content))
    else:
        at = {
            "up values": layout.up_values,
            "up scales": layout.up_scales,
            "down values": layout.down_values + 9,
            "down scales": layout.down_scales + 3,
            "padding": layout.block_bytes - 1,
        }[part]
        data = bytearray(store.experts_path.read_bytes())
        data[(8 + 2) * layout.block_bytes + at] ^= 1
        store.experts_path.write_bytes(data)
    with pytest.raises(repack_check.CheckError, match="layer 4, expert 2 is not what the checkpoint has"):
        repack_check.check(checkpoint, tmp_path / "store", 16)


def test_two_exchanged_experts_are_found(tmp_path: Path) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c")
    store = repack(checkpoint, tmp_path / "store", say=quiet)
    data, size = store.experts_path.read_bytes(), store.layout.block_bytes
    store.experts_path.write_bytes(data[size : 2 * size] + data[:size] + data[2 * size :])
    with pytest.raises(repack_check.CheckError, match="layer 1, expert 0"):
        repack_check.check(checkpoint, tmp_path / "store", 16)


def test_the_command_compares_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, record = small_checkpoint.write(tmp_path / "c"), tmp_path / "here.csv"
    words = ["repack", str(checkpoint), str(tmp_path / "store"), "--verify", "4", "--record", str(record)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "4 random experts are the checkpoint's, byte for byte" in out
    assert "a plain copy of the same files runs at" in out
    assert "repack.over_disk" in record.read_text()
    assert not (tmp_path / "store" / "copy.part").exists()
    data = bytearray((tmp_path / "store" / "experts.bin").read_bytes())
    data[7] ^= 16
    (tmp_path / "store" / "experts.bin").write_bytes(data)
    assert main([*words[:3], "--verify", "16"]) == 1
    assert "layer 1, expert 0 is not what" in capsys.readouterr().err


def test_it_shares_no_code_with_the_repacking() -> None:
    source = Path(repack_check.__file__).read_text()
    assert "kernels" not in source
    assert "services.engine" not in source
