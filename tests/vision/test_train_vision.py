"""Teaching a small checkpoint to see: that what is trained is what the engine runs, that it learns and goes on."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from services.api.model_folder import load_model_folder
from services.api.pictures import PLACE
from services.api.shown import Shown
from services.engine.vision.embedding import embed, run
from services.engine.vision.preprocess import patches
from services.tools import oracle
from services.tools.repack import repack
from services.tools.train_demo.fused import plain
from services.tools.train_vision import command, drawings
from services.tools.train_vision.batches import GRIDS, IGNORED, Drawings, Prompts
from services.tools.train_vision.labels import CLASSES, COUNT
from services.tools.train_vision.language import Language
from services.tools.train_vision.network import Network, small_config
from services.tools.train_vision.scenes import TOPICS
from services.tools.train_vision.training import TeachingError, Training

SMALL = "--device cpu --minutes 0 --batch 2 --workers 0 --width 48 --blocks 1 --score 1"


@pytest.fixture(scope="module")
def prompts(demo_checkpoint: Path) -> Prompts:
    return Prompts(demo_checkpoint)


@pytest.fixture(scope="module")
def language(demo_checkpoint: Path) -> Language:
    return Language(demo_checkpoint, torch.float32)


def begun(language: Language, prompts: Prompts, width: int = 48, seed: int = 0) -> Training:
    network = Network(small_config(256, width, 1), seed)
    return Training(language, prompts, network, "cpu", 2, 0, lambda text: None)


@pytest.fixture(scope="module")
def training(language: Language, prompts: Prompts) -> Training:
    return begun(language, prompts)


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
    for grid in ((16, 16), (12, 20), (24, 8)):
        config = network.config
        pixels = torch.randint(0, 256, (2, grid[0] * 16, grid[1] * 16, 3), dtype=torch.uint8)
        cut = network.patches(pixels)
        assert torch.allclose(cut[0], patches(pixels[0], grid, config.patch, config.mean, config.std), atol=1e-5)
        with torch.no_grad():
            wanted = network.embeddings(network.features(cut, grid))
        for index in (0, 1):
            found = run(embed(weights, cut[index], grid))
            assert torch.allclose(found, wanted[index], atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(run(embed(weights, cut[0], (8, 24))), wanted[0], atol=0.1)


def test_the_language_model_is_the_checkpoints(language: Language, demo_checkpoint: Path) -> None:
    ids = torch.randint(32, 4096, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = oracle.load(demo_checkpoint)
    everywhere = torch.ones(2, 20, dtype=torch.bool)
    found = language(language.words(ids), everywhere).view(2, 20, -1)
    wanted = theirs(inputs_embeds=theirs.get_input_embeddings()(ids)).logits
    assert torch.allclose(found, wanted, atol=1e-3)
    assert not any(parameter.requires_grad for parameter in language.parameters())
    language.fused = plain(torch.float32)  # what is compiled on a GPU
    assert torch.allclose(language(language.words(ids), everywhere).view(2, 20, -1), wanted, atol=1e-3)
    language.fused = None
    last = torch.zeros(2, 20, dtype=torch.bool)
    last[:, -1] = True
    assert torch.allclose(language(language.words(ids), last), found[:, -1], atol=1e-4)


def test_prompts_are_as_they_are_served(demo_checkpoint: Path, prompts: Prompts) -> None:
    folder = load_model_folder(demo_checkpoint)
    for seed in range(12):
        asked = drawings.drawing(seed, (64, 64)).asked
        message = {"role": "user", "content": f"{PLACE}\n{asked.question}"}
        served = folder.template.prompt([message], None, {"enable_thinking": False}, [Shown(b"", 36)])
        prompt, answer = prompts.ids(asked, 36)
        assert prompt == folder.tokenizer.encode(served.text)
        assert folder.tokenizer.encode(asked.answer) == answer[:-1]
        assert answer[-1] == 11


def test_batches_are_of_one_grid_and_held_out_ones_are_others(prompts: Prompts) -> None:
    config = small_config(256)
    taught, held_out = (Drawings(prompts, config, 3, 0, which) for which in (False, True))
    found = [taught.batch(number) for number in range(6)]
    assert {batch.grid for batch in found} <= GRIDS.keys()
    for batch in found:
        assert batch.pixels.shape == (3, 16 * batch.grid[0], 16 * batch.grid[1], 3)
        assert batch.labels.shape == (3, COUNT)
        assert int(batch.labels.max()) < CLASSES
        assert (batch.ids == prompts.picture_id).sum(1).tolist() == [batch.grid[0] * batch.grid[1] // 4] * 3
        assert (batch.targets != IGNORED).sum(1).min() >= 2
    assert torch.equal(taught.batch(4).pixels, found[4].pixels)
    assert not torch.equal(held_out.batch(4).ids, found[4].ids)


def test_a_batch_learns_and_the_language_model_stays(training: Training, prompts: Prompts) -> None:
    before = {name: value.clone() for name, value in training.language.named_parameters() if "norm" in name}
    batch = Drawings(prompts, training.network.config, 2, 11, False).batch(0)
    optimiser = torch.optim.AdamW([*training.network.parameters(), *training.head.parameters()], 3e-3)
    losses = []
    for _ in range(5):
        loss = training._words_loss(batch)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(
        torch.equal(value, before[name]) for name, value in training.language.named_parameters() if name in before
    )
    assert float(training._labels_loss(batch).detach()) > 0.1


def test_an_interrupted_run_goes_on(training: Training, language: Language, prompts: Prompts, tmp_path: Path) -> None:
    state = tmp_path / "run.state"
    training.run(0, state)
    kept = {name: value.clone() for name, value in training.network.state_dict().items()}
    steps = training.progress.steps
    assert steps == 2
    other = begun(language, prompts, seed=9)
    assert not torch.equal(other.network.state_dict()["embedder"], kept["embedder"])
    other._load(state)
    assert all(torch.equal(value, kept[name]) for name, value in other.network.state_dict().items())
    assert other.progress == training.progress
    with pytest.raises(TeachingError, match="another tower"):
        begun(language, prompts, width=96).run(0, state)


def test_the_command_makes_a_checkpoint_that_is_read(
    demo_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    words = f"{demo_checkpoint} {tmp_path}/out {SMALL}"
    assert command.run(parser.parse_args(words.split())) == 0
    told = capsys.readouterr().out
    assert all(f"held-out drawings, {topic}" in told for topic in TOPICS)
    assert sum(int(line.split(" of ")[1].split()[0]) for line in told.splitlines() if line.startswith("held-out")) == 2
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "nemotron_h_omni"
    assert repack(tmp_path / "out", tmp_path / "store", say=lambda text: None).vision() is not None
    assert not (tmp_path / "out.state").exists()
    with pytest.raises(Exception, match="exists"):
        command.run(parser.parse_args(words.split()))


def test_a_checkpoint_taught_anew_differs_in_what_it_sees_with_only(demo_checkpoint: Path, tmp_path: Path) -> None:
    """Its card's recipe starts from itself. The whole must stay below the size that is promised."""
    command.write(demo_checkpoint, tmp_path / "once", Network(small_config(256)))
    command.write(tmp_path / "once", tmp_path / "anew", Network(small_config(256), seed=5))
    once, anew = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("once", "anew"))
    assert once.keys() == anew.keys()
    assert {name for name in once if anew[name] != once[name]} == {"model.safetensors"}
    found, before = (load(files["model.safetensors"]) for files in (anew, once))
    assert found.keys() == before.keys()
    changed = {name for name in before if _bytes(found[name]) != _bytes(before[name])}
    assert changed
    assert all(name.startswith(("vision_", "mlp1.")) for name in changed)
    assert sum(len(data) for data in once.values()) < 24_000_000


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()
