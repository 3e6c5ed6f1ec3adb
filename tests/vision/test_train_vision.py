"""Teaching a small checkpoint to see: that what is trained is what the engine runs, that it learns and goes on."""

import argparse
import copy
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from services.api.model_folder import load_model_folder
from services.api.pictures import PLACE
from services.api.shown import Shown
from services.engine.errors import CheckpointError
from services.engine.tensorfile import write_tensors
from services.engine.vision.embedding import embed, run
from services.engine.vision.preprocess import patches
from services.tools import oracle
from services.tools.repack import repack
from services.tools.train_demo.fused import plain
from services.tools.train_vision import command, drawings, scoring, stopwatch
from services.tools.train_vision.batches import IGNORED, LENGTH, MOST_SAID, TAUGHT_GRIDS, Batch, Drawings, Prompts
from services.tools.train_vision.labels import CLASSES, COUNT, NONE
from services.tools.train_vision.language import Language
from services.tools.train_vision.network import GRIDS, MOST_PATCHES, Network, in_order, small_config
from services.tools.train_vision.scenes import Asked
from services.tools.train_vision.training import RISING_STEPS, Options, TeachingError, Training, said

SMALL = "--device cpu --minutes 0 --batch 2 --words 2 --workers 0 --pool 8 --width 48 --blocks 1 --score 0"


@pytest.fixture(scope="module")
def prompts(demo_checkpoint: Path) -> Prompts:
    return Prompts(demo_checkpoint)


@pytest.fixture(scope="module")
def language(demo_checkpoint: Path) -> Language:
    return Language(demo_checkpoint, torch.float32)


def begun(language: Language, prompts: Prompts, width: int = 48, seed: int = 0, warm: bool = False) -> Training:
    network = Network(small_config(256, width, 1), seed)
    return Training(language, prompts, network, Options("cpu", 2, 2, 0, 8, False, warm=warm), lambda text: None)


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
    everywhere = torch.arange(20).expand(2, -1)
    found = language(language.words(ids), everywhere)
    wanted = theirs(inputs_embeds=theirs.get_input_embeddings()(ids)).logits
    assert torch.allclose(found, wanted, atol=1e-3)
    assert not any(parameter.requires_grad for parameter in language.parameters())
    language.fused = plain(torch.float32)  # what is compiled on a GPU
    assert torch.allclose(language(language.words(ids), everywhere), wanted, atol=1e-3)
    language.fused = None
    some = torch.tensor([[3, 19], [7, 0]])
    assert torch.allclose(language(language.words(ids), some)[:, 0], found[[0, 1], [3, 7]], atol=1e-4)
    assert torch.allclose(language(language.words(ids), some)[:, 1], found[[0, 1], [19, 0]], atol=1e-4)


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


def test_questions_after_one_another_are_as_a_dialog_is_served(demo_checkpoint: Path, prompts: Prompts) -> None:
    folder = load_model_folder(demo_checkpoint)
    asked = [Asked("count", "How many are there?", "3."), Asked("colour", "What colour is it?", "Red.")]
    said = [
        {"role": "user", "content": f"{PLACE}\n{asked[0].question}"},
        {"role": "assistant", "content": asked[0].answer},
        {"role": "user", "content": asked[1].question},
    ]
    served = folder.template.prompt(said, None, {"enable_thinking": False}, [Shown(b"", 36)])
    ids, targets = prompts.dialog(asked, 36)
    prompt = folder.tokenizer.encode(served.text)
    assert ids[: len(prompt)] == prompt
    wanted = [*folder.tokenizer.encode("3."), 11, *folder.tokenizer.encode("Red."), 11]
    assert [one for one in targets if one != IGNORED] == wanted
    assert all(one in (IGNORED, after) for one, after in zip(targets, ids[1:], strict=False))
    assert prompts.dialog(asked * 20, 36)[0][: len(ids)] == ids
    assert len(prompts.dialog(asked * 20, 36)[0]) <= LENGTH


def test_batches_are_of_any_grids_and_as_their_number_says(prompts: Prompts) -> None:
    taught = Drawings(prompts, small_config(256), 12, 0)
    found = taught.batch(0)
    grids = [GRIDS[number] for number in found.grids.tolist()]
    assert len({*grids}) > 1
    assert {*grids} <= TAUGHT_GRIDS.keys()
    assert found.labels.shape == (12, COUNT)
    assert int(found.labels.max()) < CLASSES
    for row, (rows, columns) in enumerate(grids):
        assert int((found.ids[row] == prompts.picture_id).sum()) == rows * columns // 4
        assert int((found.targets[row] != IGNORED).sum()) >= 2
        assert not found.patches[row, rows * columns :].any()
        assert (found.on_patches[row] != NONE).all(1).sum() == rows * columns
    assert all(torch.equal(*both) for both in zip(taught.batch(0).tensors(), found.tensors(), strict=True))
    assert not torch.equal(taught.batch(1).ids, found.ids)


def test_pictures_of_many_grids_are_seen_as_each_alone() -> None:
    network = Network(small_config(256, width=48, blocks=2), seed=3)
    network.prepare()
    chosen = [(16, 16), (10, 22), (12, 20), (2, 100)]
    pixels = [torch.randint(0, 256, (1, rows * 16, columns * 16, 3)) for rows, columns in chosen]
    padded = torch.full((len(chosen), MOST_PATCHES, 768), 77.0)
    for row, (picture, (rows, columns)) in enumerate(zip(pixels, chosen, strict=True)):
        cut = picture.view(rows, 16, columns, 16, 3).permute(0, 2, 4, 1, 3).reshape(rows, columns, 768)
        padded[row, : rows * columns] = in_order(cut)
    with torch.no_grad():
        found = network.padded(padded, torch.tensor([GRIDS.index(grid) for grid in chosen]))
        others = network.padded(padded, torch.tensor([GRIDS.index((16, 16))] * len(chosen)))
        for row, (picture, grid) in enumerate(zip(pixels, chosen, strict=True)):
            wanted = network.features(network.patches(picture), grid)[0]
            assert torch.allclose(found[row, : len(wanted)], wanted, atol=1e-4)
            assert grid == (16, 16) or not torch.allclose(others[row, : len(wanted)], wanted, atol=0.1)


def one_batch(prompts: Prompts, training: Training) -> Batch:
    return Drawings(prompts, training.network.config, 2, 11).batch(0)


def test_a_batch_learns_and_the_language_model_stays(training: Training, prompts: Prompts) -> None:
    before = {name: value.clone() for name, value in training.language.named_parameters() if "norm" in name}
    batch = one_batch(prompts, training)
    optimiser = torch.optim.AdamW([*training.network.parameters(), *training.head.parameters()], 3e-3)
    losses = []
    for _ in range(5):
        loss, _ = training._words(batch, training.network.padded(batch.patches, batch.grids))
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    assert all(
        torch.equal(value, before[name]) for name, value in training.language.named_parameters() if name in before
    )


def test_what_is_on_patches_and_in_the_picture_is_learnt(training: Training, prompts: Prompts) -> None:
    batch = one_batch(prompts, training)
    given = (batch.patches, batch.grids, batch.labels, batch.on_patches)
    optimiser = torch.optim.AdamW([*training.network.parameters(), *training.head.parameters()], 3e-3)
    losses = []
    for _ in range(8):
        _, loss, right = training.tell(*given)
        losses.append(float(loss.detach()))
        assert right.shape == (2,)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert losses[-1] < 0.8 * losses[0]
    with torch.no_grad():
        _, own, _ = training.tell(*given)
        _, other, _ = training.tell(*given[:2], batch.labels.roll(1, 0), batch.on_patches.roll(1, 0))
    assert float(other) > float(own)


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
    assert "ms a step would be its products alone" in told
    assert "a checkpoint that sees" in told
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "nemotron_h_omni"
    assert repack(tmp_path / "out", tmp_path / "store", say=lambda text: None).vision() is not None
    assert not (tmp_path / "out.state").exists()
    with pytest.raises(Exception, match="exists"):
        command.run(parser.parse_args(words.split()))
    again = f"{words.replace('/out ', '/other ')} --from {tmp_path}/out"
    assert command.run(parser.parse_args(again.split())) == 0
    told = capsys.readouterr().out
    assert "of its tower taken over" in told


def test_a_tower_is_taken_over_without_its_projector_and_only_if_it_fits(tmp_path: Path) -> None:
    taught = Network(small_config(256, 48, 2), seed=1)
    write_tensors(tmp_path / "tower.safetensors", taught.checkpoint_tensors())
    by_file, by_folder = (command.vision_tensors(path) for path in (tmp_path / "tower.safetensors", tmp_path))
    assert by_file.keys() == by_folder.keys() == taught.checkpoint_tensors().keys()
    begun = Network(small_config(320, 48, 2), seed=4)  # of another language model
    own = {name: begun[name].clone() for name in ("projector.up", "projector.norm", "projector.down")}
    taken = begun.take(by_file)
    assert len(taken) == len(taught.checkpoint_tensors()) - len(own)
    assert all(torch.equal(begun[name], value) for name, value in own.items())
    assert all(torch.equal(begun[name], taught[name].bfloat16().float()) for name in taken)
    for other, why in (
        ((96, 2), "of another size.*--width"),
        ((48, 1), "larger tower.*--blocks"),
        ((48, 3), "no tensor"),
    ):
        anew = Network(small_config(256, *other), seed=4)
        before = anew["embedder"].clone()
        with pytest.raises(CheckpointError, match=why):
            anew.take(by_file)
        assert torch.equal(anew["embedder"], before)


def test_what_is_said_is_found_at_its_places() -> None:
    targets = torch.full((3, LENGTH), IGNORED)
    targets[0, [4, 9, 10]] = torch.tensor([7, 8, 0])
    targets[1] = torch.arange(LENGTH)
    places, found = said(targets)
    assert places.shape == found.shape == (3, MOST_SAID)
    assert places[0, :3].tolist() == [4, 9, 10]
    assert found[0].tolist() == [7, 8, 0, *[IGNORED] * (MOST_SAID - 3)]
    assert places[1].tolist() == found[1].tolist() == [*range(MOST_SAID)]
    assert (found[2] == IGNORED).all()


def test_a_tower_that_sees_rises_slowly_and_to_a_lower_rate(language: Language, prompts: Prompts) -> None:
    cold, warm = begun(language, prompts), begun(language, prompts, warm=True)
    rates = {}
    for name, training in (("cold", cold), ("warm", warm)):
        for steps in (0, RISING_STEPS, 5000):
            training._set_rates("tower", steps, 0.0)
            rates[name, steps] = [group["lr"] for group in training._optimiser.param_groups]
    assert rates["warm", 0][0] < 0.3 * rates["cold", 0][0]
    assert rates["warm", RISING_STEPS][0] < 0.3 * rates["cold", RISING_STEPS][0]
    assert rates["warm", 5000][0] < rates["cold", 5000][0]
    assert rates["warm", 5000][2] == rates["cold", 5000][2]  # of the head, which is anew in both
    warm._set_rates("tower", 5000, 1.0)
    assert warm._optimiser.param_groups[0]["lr"] < 1e-9


def test_time_that_a_run_was_stopped_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])
    clock = stopwatch.Clock(3.0)
    now[0] += 2.0
    assert clock.tick() == 2.0
    now[0] += 500.0
    assert clock.tick() == 5.0
    now[0] += 50.0
    assert clock.tick(60.0) == 55.0
    assert clock.tick() == 55.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_as_a_graph_is_the_step(language: Language, prompts: Prompts) -> None:
    network = Network(small_config(256, 48, 1))
    options = Options("cuda", 2, 2, 0, 8, False, True)
    training = Training(copy.deepcopy(language), prompts, network, options, lambda text: None)
    batches = Drawings(prompts, network.config, 2, 11)
    first, second = (batches.batch(number).to("cuda") for number in (0, 1))
    step = training._capture(first, partial(training._step, stage="tower"), "tower")
    training._set_rates("tower", 5000, 0.0)
    losses = [float(step(first)[0]) for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert float(step(second)[0]) > losses[-1]


def test_examinations_ask_what_their_pictures_show(training: Training, prompts: Prompts, tmp_path: Path) -> None:
    counted = training.score(1, rows=1)
    lines = list(scoring.lines(*counted))
    scoring.record(tmp_path / "scores.csv", *counted, "small")
    assert len((tmp_path / "scores.csv").read_text().splitlines()) == 1 + len(lines)
    assert sum(int(line.split(" of ")[1].split()[0]) for line in lines if " all " not in line) == 6
    assert {line.split()[2] for line in lines} <= {*scoring.EXAMS}
    held_out = scoring.HeldOut(prompts, training.network.config, 1, rows=2)
    asked = [one for _, topics in scoring.batches(held_out, 0) for one in topics]
    assert len(asked) == 2 * len(held_out) == 12
    assert {exam for exam, _ in asked} <= {*scoring.EXAMS}
    assert scoring.as_taught(Asked("number", "?", "0417.")).answer == "It says 0417."
    assert scoring.as_taught(Asked("shape", "?", "circle.")).answer == "Circle."
    right, both = Counter({("wide", "shape"): 1}), Counter({("wide", "shape"): 2, ("wide", "what"): 2})
    told = list(scoring.lines(right, both))
    assert [line.split()[-2] for line in told] == ["0.0", "50.0", "25.0"]


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
