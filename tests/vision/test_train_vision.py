"""Teaching a small checkpoint to see: drawings, that what is trained is what the engine runs, and that it learns."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from services.engine.vision.embedding import embed, run
from services.tools.repack import repack
from services.tools.train_vision import command
from services.tools.train_vision.drawings import COLOURS, HELD_OUT, KINDS, QUESTIONS, SHAPES, drawing, is_right
from services.tools.train_vision.network import Network, small_config
from services.tools.train_vision.training import IGNORED, Drawings, Prompts, Training


def test_drawings_are_what_their_seed_says() -> None:
    drawn = [drawing(seed) for seed in range(400)]
    assert {one.kind for one in drawn} == set(KINDS)
    assert drawing(7).image.tobytes() == drawn[7].image.tobytes()
    assert drawing(HELD_OUT + 7).image.tobytes() != drawn[7].image.tobytes()
    for one in drawn:
        assert one.question == QUESTIONS[one.kind]
        assert is_right(one, f" {one.answer.upper()}")
        assert not is_right(one, one.answer + " And more.")
        colour, shape, count, *digits = one.labels
        if one.kind == "number":
            assert one.answer == "".join(map(str, digits)) + "."
            assert (colour, shape, count) == (-1, -1, -1)
        elif one.kind == "what":
            said = f"{count + 1} {list(COLOURS)[colour]} {SHAPES[shape]}"
            assert one.answer.startswith(said)
    shares = [sum(one.labels[2] == count for one in drawn) / len(drawn) for count in range(5)]
    assert min(shares) > 0.08


def test_the_colour_that_is_told_is_there() -> None:
    for seed in range(40):
        one = drawing(seed)
        inside = {colour for _, colour in one.image.getcolors(96 * 96)}  # type: ignore[union-attr]
        shown = [name for name, colour in COLOURS.items() if colour in inside]
        if one.kind == "colour":
            assert shown == [one.answer.rstrip(".")]


def test_what_is_trained_is_what_the_engine_runs(demo_checkpoint: Path, tmp_path: Path) -> None:
    network = Network(small_config(256, width=48, blocks=2), seed=3)
    with torch.no_grad():
        for parameter in network.parameters():  # as the checkpoint will hold them
            parameter += 0.1 * torch.randn_like(parameter) * (parameter.abs().mean() + 0.1)
            parameter.copy_(parameter.bfloat16().float())
    command.write(demo_checkpoint, tmp_path / "sees", network)
    store = repack(tmp_path / "sees", tmp_path / "store", say=lambda text: None)
    weights = store.vision()
    assert weights is not None
    assert weights.config == network.config
    cut = torch.randn(2, 144, 192)
    with torch.no_grad():
        wanted = network.embeddings(network.features(cut))
    for index in (0, 1):
        found = run(embed(weights, cut[index], (12, 12)))
        assert torch.allclose(found, wanted[index], atol=1e-4 * float(wanted.abs().max()))


def test_prompts_are_as_they_are_served(demo_checkpoint: Path) -> None:
    prompt, answer = Prompts(demo_checkpoint, 36).ids(drawing(3))
    assert prompt.count(18) == 36
    assert prompt[prompt.index(18) - 1] == 19
    assert answer[-1] == 11


@pytest.fixture(scope="module")
def training(demo_checkpoint: Path) -> Training:
    return Training(demo_checkpoint, Network(small_config(256, width=48, blocks=1)), "cpu", 2, 0, lambda text: None)


def test_a_batch_learns_and_the_language_model_stays(training: Training, demo_checkpoint: Path) -> None:
    before = {name: value.clone() for name, value in training.language.named_parameters() if "norm" in name}
    batch = next(iter(Drawings(demo_checkpoint, training.network, 2, 11)))
    assert (batch.targets != IGNORED).sum(1).min() >= 2
    optimiser = torch.optim.AdamW(training.network.parameters(), 3e-3)
    losses = []
    for _ in range(5):
        loss = training._words_loss(batch)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(
        torch.equal(value, before[name]) for name, value in training.language.named_parameters() if name in before
    )
    assert float(training._labels_loss(batch).detach()) > 1


def test_the_command_makes_a_checkpoint_that_is_read(
    demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    small = "--device cpu --minutes 0 --batch 2 --workers 0 --width 48 --blocks 1 --score 1"
    words = f"{demo_checkpoint} {tmp_path}/out {small}"
    assert command.run(parser.parse_args(words.split())) == 0
    told = capsys.readouterr().out
    assert all(f"held-out drawings, {kind}" in told for kind in KINDS)
    assert sum(int(line.split(" of ")[1].split()[0]) for line in told.splitlines() if line.startswith("held-out")) == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "nemotron_h_omni"
    assert repack(tmp_path / "out", tmp_path / "store", say=lambda text: None).vision() is not None
    with pytest.raises(Exception, match="exists"):
        command.run(parser.parse_args(words.split()))


def test_the_demo_taught_anew_differs_in_what_it_sees_with_only(demo_checkpoint: Path, tmp_path: Path) -> None:
    """Its card's recipe starts from itself. The demo's own tower has five blocks."""
    command.write(demo_checkpoint, tmp_path / "anew", Network(small_config(256, blocks=5)))
    ours, anew = ({p.name: p.read_bytes() for p in folder.iterdir()} for folder in (demo_checkpoint, tmp_path / "anew"))
    assert ours.keys() == anew.keys()
    assert {name for name in ours if anew[name] != ours[name]} - {"language.safetensors"} == {"vision.safetensors"}
    language, before = (load(files["language.safetensors"]) for files in (anew, ours))
    assert language.keys() == before.keys()
    assert all(_bytes(language[name]) == _bytes(before[name]) for name in before)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()
