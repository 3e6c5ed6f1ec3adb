"""The reference by layer is the whole reference, also after it was stopped at any layer."""

from pathlib import Path

import pytest
import torch

from services.tools import oracle, oracle_layers, small_checkpoint
from services.tools.small_checkpoint import Style

TEXTS = [list(range(3, 40)), [5, 4, 3, 9], list(range(90, 20, -1))]


@pytest.mark.parametrize("style", ["3-super", "3.5-super-vl"])
def test_it_is_the_whole_reference(tmp_path: Path, style: Style) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c", style)
    whole, said = oracle.load(checkpoint), []
    by_layer = oracle_layers.logits(checkpoint, TEXTS, tmp_path / "kept", said.append)
    for ids, logits in zip(TEXTS, by_layer, strict=True):
        with torch.inference_mode():
            expected = whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        assert logits.shape == expected.shape
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert said == [f"reference: layer {layer} of 5" for layer in range(1, 6)]
    assert not (tmp_path / "kept").exists()


class Stopped(Exception):
    pass


@pytest.mark.parametrize("layers", [1, 4, 5])
def test_it_goes_on_where_it_was_stopped(tmp_path: Path, layers: int) -> None:
    checkpoint = small_checkpoint.write(tmp_path / "c")
    whole = oracle_layers.logits(checkpoint, TEXTS, tmp_path / "kept")

    def stop(line: str) -> None:
        if line.endswith(f"layer {layers} of 5"):
            raise Stopped

    with pytest.raises(Stopped):
        oracle_layers.logits(checkpoint, TEXTS, tmp_path / "kept", stop)
    said: list[str] = []
    again = oracle_layers.logits(checkpoint, TEXTS, tmp_path / "kept", said.append)
    assert said[0] == f"reference: going on after layer {layers}"
    assert len(said) == 1 + 5 - layers
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


@pytest.mark.parametrize("change", ["texts", "weights", "damage"])
def test_what_was_kept_of_something_else_is_not_used(tmp_path: Path, change: str) -> None:
    checkpoint, kept = small_checkpoint.write(tmp_path / "c"), tmp_path / "kept"

    def stop(line: str) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        oracle_layers.logits(checkpoint, TEXTS, kept, stop)
    texts = TEXTS
    if change == "texts":
        texts = [TEXTS[0][::-1], *TEXTS[1:]]
    elif change == "weights":
        (checkpoint / "model.safetensors").touch()
    else:
        kept.write_bytes(kept.read_bytes()[:100])
    said: list[str] = []
    oracle_layers.logits(checkpoint, texts, kept, said.append)
    assert said[0] == "reference: layer 1 of 5"


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = small_checkpoint.write(
        tmp_path / "c", edit=lambda config, tensors: tensors.pop("backbone.norm_f.weight")
    )
    with pytest.raises(oracle.OracleError, match=r"norm_f\.weight"):
        oracle_layers.logits(checkpoint, TEXTS, tmp_path / "kept")
