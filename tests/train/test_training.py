"""From a corpus to an engine: a small run on the CPU, end to end."""

import csv
import json
import shutil
from pathlib import Path

import pytest
import torch

from services.engine.checkpoint import Checkpoint
from services.engine.errors import CheckpointError
from services.engine.experts.streamer import open_experts
from services.engine.model import Model, Segment
from services.engine.model_config import ModelConfig
from services.engine.pages import PagePool, pages_for
from services.engine.state import State
from services.tools import oracle, quantize
from services.tools.cli import main
from services.tools.parity import divergence
from services.tools.repack import repack
from services.tools.score.questions import questions
from services.tools.train_demo import documents, export, shapes
from services.tools.train_demo.chats import Renderer
from services.tools.train_demo.documents import NOT_SCORED, Position, Rows, Source
from services.tools.train_demo.lessons import Lessons
from services.tools.train_demo.measuring import measure
from services.tools.train_demo.network import Network
from services.tools.train_demo.rounding import Rounding
from services.tools.train_demo.training import PERIOD, Training, TrainingError

TINY = shapes.RECIPES["tiny"]
STAGE_STEPS = 2 * PERIOD


def write_corpus(folder: Path) -> Path:
    folder.mkdir()
    animals, places = ("fox", "hen", "goat", "mouse", "bear"), ("wood", "barn", "garden", "river")
    texts = [
        f"Once there was a {a} who lived near the {p}. The {a} saw a {b} and they went to the {q} together. " * 3
        for a in animals
        for b in animals
        for p in places
        for q in places
    ]
    asked = questions()[0]["turns"][0]
    chats = [
        [("What is the capital of France?", "The capital of France is Paris.")],
        [("What is the capital of Peru?", "The capital of Peru is Lima.")],
        [("Which animal is red?", "The capital of Spain is Madrid."), ("And grey?", "The mouse.")],
        [("Where is the goat of Italy?", "The capital of Italy is Rome.")],
        [(asked, "HELD-OUT ANSWER")],
    ]
    messages = [
        [
            {"role": role, "content": text}
            for turn in chat
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        for chat in chats
    ]
    for name, records in {
        "pretrain": [{"text": text, "source": "gutenberg"} for text in texts],
        "pretrain_val": [{"text": texts[7] + texts[3], "source": "gutenberg"}],
        "chat": [{"messages": one, "source": "synth", "weight": 2} for one in messages],
        "chat_val": [{"messages": messages[2], "source": "synth"}],
    }.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    return folder


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    corpus = write_corpus(folder / "corpus")
    command = ["train-demo", "prepare", str(folder / "run"), "--corpus", str(corpus), "--size", "tiny"]
    assert main([*command, "--lessons", "40"]) == 0
    return folder / "run"


def opened(run: Path) -> Training:
    return Training(run, TINY, "cpu", lambda text: None)


def losses(run: Path) -> list[float]:
    return [float(row["loss"]) for row in csv.DictReader((run / "loss.csv").read_text().splitlines())]


@pytest.fixture(scope="module")
def pretrained(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One uninterrupted run."""
    run = tmp_path_factory.mktemp("whole") / "run"
    shutil.copytree(prepared, run)
    assert opened(run).stage("pretrain", 10, STAGE_STEPS, 1)
    return run


def test_the_loss_falls(pretrained: Path) -> None:
    found = losses(pretrained)
    assert found[0] == pytest.approx(6.24, abs=0.1)  # ln 512: nothing is known
    assert found[-1] < 0.9 * found[0]


def test_a_run_that_goes_on_is_the_run_that_never_stopped(pretrained: Path, prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    assert not opened(run).stage("pretrain", 0, STAGE_STEPS, 1)  # stops as soon as it may
    stopped = opened(run)
    assert stopped.progress.steps == PERIOD
    assert stopped.stage("pretrain", 10, None, 1)
    whole = opened(pretrained).network.state_dict()
    assert all(torch.equal(value, whole[name]) for name, value in stopped.network.state_dict().items())
    assert losses(run) == losses(pretrained)


def test_a_run_that_forgets_its_position_is_another(pretrained: Path, prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    opened(run).stage("pretrain", 0, STAGE_STEPS, 1)
    forgetful = opened(run)
    forgetful.position = Position()
    forgetful.stage("pretrain", 10, None, 1)
    whole = opened(pretrained).network.state_dict()
    assert not all(torch.equal(value, whole[name]) for name, value in forgetful.network.state_dict().items())


def test_stages_come_in_order(prepared: Path, pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="pretrain is not done"):
        opened(prepared).stage("quantise", 1, 16, 1)
    with pytest.raises(TrainingError, match="prepare"):
        opened(tmp_path)
    assert opened(pretrained).stage("pretrain", 1, None, 1)  # nothing left to do


@pytest.fixture(scope="module")
def finished(pretrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    shutil.copytree(pretrained, run)
    training = opened(run)
    assert training.stage("chat", 10, PERIOD, 1)
    assert training.stage("quantise", 10, PERIOD, 1, sparsity=0.01)
    return run


def test_the_engine_computes_what_was_trained(finished: Path, tmp_path: Path) -> None:
    training = opened(finished)
    assert (
        main(["train-demo", "export", str(finished), str(tmp_path / "bf16"), "--size", "tiny", "--device", "cpu"]) == 0
    )
    source = Checkpoint.open(tmp_path / "bf16")
    inputs = dict.fromkeys(source.formats, 1.0)
    quantize.quantize(source, tmp_path / "quantised", inputs, "mse", lambda text: None)
    assert Checkpoint.open(tmp_path / "quantised").mtp.keys() == source.mtp.keys() != set()
    store = repack(tmp_path / "quantised", tmp_path / "store", say=lambda text: None)
    text = "Once there was a fox who lived near the barn. The fox saw a goat."
    ids, _ = Renderer.of(finished).text(text)
    experts = open_experts(store, slots=sum(map(len, store.blocks)))
    try:
        model = Model(store.dense(), store.config, experts)
        state = State(model.config, PagePool(model.config, pages_for(len(ids))))
        found = model.forward_all([Segment(state, ids)])
        state.release()
    finally:
        experts.close()
    row = torch.tensor([ids])
    with torch.no_grad():
        # Everything but experts, lm_head and Mamba is BF16 in the files.
        for name, value in training.network.state_dict().items():
            if not name.endswith(("gate.weight", "e_score_correction_bias")):
                value.copy_(value.bfloat16().float())

        def trained(rounding: Rounding | None) -> torch.Tensor:
            return training.network.logits(training.network(row, row * 0, rounding)[0], rounding)[0]

        rounded, plain = trained(Rounding()), trained(None)
    assert float(divergence(rounded, found).max()) < 1e-5
    assert float(divergence(plain, found).max()) > 1e-4  # without rounding it would show


def test_a_run_begins_with_what_another_has_exported(
    finished: Path, prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bf16, run = tmp_path / "bf16", tmp_path / "run"
    shutil.copytree(prepared, run)
    small = ["--size", "tiny", "--device", "cpu"]
    assert main(["train-demo", "export", str(finished), str(bf16), *small]) == 0
    begun = opened(run)
    begun.begin_from(bf16, "chat")
    there = opened(finished).network.state_dict()
    for name, value in begun.network.state_dict().items():
        exact = name.endswith(("gate.weight", "e_score_correction_bias"))
        assert torch.equal(value, there[name] if exact else there[name].bfloat16().float())
    assert main(["train-demo", "measure", str(run), "--from", str(bf16), *small]) == 0
    theirs, none = (
        f"books, as trained: perplexity {measure(of, 'books', False).per_token:.3f}" for of in (begun, opened(run))
    )
    assert theirs != none
    assert theirs in capsys.readouterr().out
    assert main(["train-demo", "chat", str(run), "--from", str(bf16), "--steps", str(PERIOD), *small]) == 0
    first = next(csv.DictReader((run / "loss.csv").read_text().splitlines()))
    known = measure(opened(finished), "books", False)
    assert first["stage"] == "chat"
    assert float(first["rate"]) < 0.2 * TINY.rates["chat"][0]  # warms up anew
    assert measure(opened(run), "books", False).per_token < 1.2 * known.per_token
    assert opened(run).stage("quantise", 10, PERIOD, 1)
    with pytest.raises(TrainingError, match="has begun already"):
        opened(run).begin_from(bf16, "chat")


def test_tokens_that_were_never_seen_are_exported_as_the_mean_of_the_others() -> None:
    lengths = torch.tensor([1.0, 2.0, 1e-6, 3.0, 0.04, 0.2, 1.5])
    embeddings = (torch.eye(7, 8) * lengths[:, None]).bfloat16()
    found = export.filled(embeddings)
    seen = [0, 1, 3, 5, 6]
    assert torch.equal(found[seen], embeddings[seen])
    mean = embeddings[seen].float().mean(0).bfloat16()
    assert torch.equal(found[2], mean)
    assert torch.equal(found[4], mean)
    assert torch.equal(export.filled(embeddings[seen]), embeddings[seen])


def test_no_token_of_the_demo_is_next_to_nothing() -> None:
    """What is made of next to nothing hangs on a float's last bits: see test_parity.py, which asks strange tokens."""
    length = (
        Checkpoint.open(shapes.DEMO).tensors[export.EMBEDDINGS.removeprefix("backbone.")].read().float().norm(dim=1)
    )
    assert length.min() > export.NEVER_SEEN * length.median()


def test_a_checkpoint_of_another_size_is_refused(prepared: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(prepared, run)
    begun = opened(run)
    before = {name: value.clone() for name, value in begun.network.state_dict().items()}
    with pytest.raises(CheckpointError, match="of a model of this size"):
        begun.begin_from(shapes.DEMO, "chat")
    assert all(torch.equal(value, before[name]) for name, value in begun.network.state_dict().items())


def test_a_run_goes_on_from_the_quantized_demo() -> None:
    """Each weight is what another reader of the formats takes it for, the stacked experts in their order."""
    network = Network(ModelConfig.from_hf(shapes.config("demo")))
    export.load(network, shapes.DEMO)
    found = network.state_dict()
    wanted = oracle.their_names(oracle.dequantise(oracle.read(shapes.DEMO)))
    wanted = {name.removeprefix("model."): tensor for name, tensor in wanted.items()}
    assert found.keys() - {name for name in found if name.startswith("mtp.")} == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    assert all(value.abs().max() > 0 for name, value in found.items() if name.startswith("mtp."))
    experts = next(name for name in wanted if name.endswith("experts.up_proj"))
    assert not torch.equal(found[experts][[1, 0, *range(2, len(found[experts]))]], wanted[experts])


def test_what_is_dropped_is_of_the_step(finished: Path) -> None:
    training = opened(finished)
    sources = documents.load(finished / "documents")
    batch = Rows(sources, dict.fromkeys(sources, 1.0), 64, 4, 1).batch(Position())

    def loss(drop: float, seed: int) -> float:
        torch.manual_seed(seed)
        return float(training.losses(batch, None, drop=drop).model.detach())

    assert loss(0.1, 1) == loss(0.1, 1) != loss(0.1, 2)
    assert loss(0.0, 1) == loss(0.0, 2)


def test_what_is_measured_improves_with_training(finished: Path, prepared: Path) -> None:
    before, after = (measure(opened(run), "books", True) for run in (prepared, finished))
    assert 1 < after.per_byte < after.per_token
    assert after.per_token < 0.6 * before.per_token
    assert 0 <= before.drafts <= 1
    assert 0.3 < after.zeros < 1


def test_matrix_products_in_bf16_teach_the_same(finished: Path) -> None:
    """As on a GPU: every part of a step takes BF16, and says what float32 says."""
    training = opened(finished)
    sources = documents.load(finished / "documents")
    batch = Rows(sources, dict.fromkeys(sources, 1.0), 64, 4, 1).batch(Position())
    gradients = []
    for training.half in (False, True):
        training.network.zero_grad(set_to_none=True)
        found = training.losses(batch, Rounding(), watch=True)
        (found.model + found.draft + found.sparsity).backward()
        gradients.append(
            {name: p.grad.flatten() for name, p in training.network.named_parameters() if p.grad is not None}
        )
        gradients[-1]["losses"] = torch.stack([found.model, found.draft, found.sparsity]).detach()
    full, half = gradients
    assert torch.allclose(full["losses"], half["losses"], rtol=0.02)
    assert not torch.equal(full["losses"], half["losses"])
    assert full.keys() == half.keys()
    assert len(full) > 50
    alike = {name: float(torch.cosine_similarity(full[name], half[name], dim=0)) for name in full}
    assert {name: value for name, value in alike.items() if value < 0.9} == {}


def test_the_curve_is_a_picture(finished: Path, tmp_path: Path) -> None:
    assert main(["train-demo", "curve", str(finished), str(tmp_path / "loss.png")]) == 0
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_special_tokens_have_the_real_models_ids(prepared: Path) -> None:
    from tokenizers import Tokenizer

    learnt = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    demo = json.loads((shapes.DEMO / "tokenizer.json").read_text())["added_tokens"]
    ours = json.loads((prepared / "tokenizer.json").read_text())["added_tokens"]
    assert ours == demo
    text = "Odd  text: ÄÖ 漢字 <x> 12 3\n\n\tend"
    assert learnt.decode(learnt.encode(text).ids) == text


def test_what_the_exam_asks_is_not_taught(prepared: Path) -> None:
    from tokenizers import Tokenizer

    learnt = Tokenizer.from_file(str(prepared / "tokenizer.json"))
    sources = documents.load(prepared / "documents")
    taught = {name: learnt.decode(source.ids.tolist()) for name, source in sources.items()}
    assert "The capital of Peru is Lima." in taught["chat"]
    assert "HELD-OUT" not in taught["chat"]


def test_only_answers_are_learnt(prepared: Path) -> None:
    from tokenizers import Tokenizer

    learnt, renderer = Tokenizer.from_file(str(prepared / "tokenizer.json")), Renderer.of(prepared)
    lessons, said = Lessons(1, {"France": "Paris", "Peru": "Lima", "Spain": "Madrid"}), ""
    for _ in range(60):
        chat = lessons.chat()
        ids, scored = renderer.chat(chat["messages"], chat.get("tools"))
        said = learnt.decode([i for i, one in zip(ids, scored, strict=True) if one], skip_special_tokens=False)
        answers = [m for m in chat["messages"] if m["role"] == "assistant"]
        assert said.count("<|im_end|>") == len(answers)
        assert "<|im_start|>" not in said
        for answer in answers:
            assert answer["content"] in said
            assert answer.get("reasoning_content", "") in said
            assert all(f"<function={c['function']['name']}>" in said for c in answer.get("tool_calls", ()))


def source(name: str, whole: bool, lengths: list[int]) -> Source:
    return Source.of(name, whole, [([n + 1] * length, [True] * length) for n, length in enumerate(lengths)])


def test_rows_hold_every_document_once_and_chats_whole() -> None:
    chats = source("c", True, [5, 9, 4, 7, 3, 6, 8, 2])
    rows, position, seen = Rows({"c": chats}, {"c": 1}, 12, 1, 3), Position(), []
    while position.taken.get("c", 0) < 8:
        batch = rows.batch(position)
        for number in sorted(set(batch.documents[0]) - {-1}):
            part = batch.ids[0][batch.documents[0] == number]
            assert len(set(part)) == 1
            seen.append((int(part[0]), len(part)))
        assert (batch.targets[0][batch.documents[0] == -1] == NOT_SCORED).all()
    assert sorted(seen[:8]) == list(enumerate([5, 9, 4, 7, 3, 6, 8, 2], start=1))


def test_texts_are_cut_and_none_of_them_is_lost() -> None:
    rows, position = Rows({"t": source("t", False, [40, 25])}, {"t": 1}, 16, 1, 3), Position()
    batches = [rows.batch(position) for _ in range(4)]
    ids = [int(i) for batch in batches for i in batch.ids[0]]
    assert ids[:64] in ([1] * 40 + [2] * 24, [2] * 25 + [1] * 39)
    with pytest.raises(KeyError, match="no documents of x"):
        Rows({}, {"x": 1.0}, 16, 1, 3)


def test_the_demos_shape_is_the_demos() -> None:
    ours, theirs = shapes.config("demo"), json.loads((shapes.DEMO / "config.json").read_text())["llm_config"]
    assert {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)} == set()
