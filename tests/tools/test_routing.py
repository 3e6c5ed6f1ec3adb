"""A model's routing and zeros beside the published ones: of decoded tokens alone, and counted right."""

import csv
from pathlib import Path

import pytest
import torch

from kernels.experts import reference
from services.engine.experts.store import Store
from services.engine.experts.streamer import PythonExperts
from services.engine.experts.trace import read_trace
from services.tools import routing
from services.tools.cli import main
from services.tools.record import record
from services.tools.traces import calibration


def test_figures_beside_the_published_ones(
    demo_store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_path = tmp_path / "here.csv"
    words = ["routing", str(demo_store.folder), "--answer-tokens", "12", "--dialogs", "2", "--record", str(rows_path)]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert "published" in said[0]
    assert "81% to 84%" in said[1]
    rows = list(csv.DictReader(rows_path.read_text().splitlines()))
    assert [row["name"] for row in rows] == list(routing.NAMES)
    for row, line in zip(rows, said[1:], strict=True):
        assert f"{float(row['value']):.1%}" in line
        assert 0.05 < float(row["value"]) < 0.97, row


def test_only_decoded_tokens_count(demo_store: Store, tmp_path: Path) -> None:
    [path] = record(demo_store, tmp_path, slots=80, answer_tokens=6, dialogs=1)
    trace = read_trace(path)
    single = calibration.decoded(trace.routing())
    assert len(single.ids) == trace.decoded_tokens * trace.header.layers < len(trace.routing().ids)
    assert len(single.guesses) == len(trace.routing().guesses) > 0
    rows = trace.rows[(trace.rows["ahead"] == 0) & (trace.rows["phase"] == 1)]
    assert (single.ids == rows["ids"]).all()


def test_zeros_are_those_of_the_arithmetic(demo_store: Store) -> None:
    """Of one token; another one has others, and a prompt's do not count."""
    inner = PythonExperts(demo_store, slots=10)
    zeros = routing.Zeros(demo_store).before(inner)
    layout = demo_store.layout
    x = torch.randn(1, layout.latent, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[3, 7]], dtype=torch.int32), torch.ones(1, 2)
    expected = 0
    for id_ in (3, 7):
        block = demo_store.layers[2][id_]
        data = demo_store.read_block(2, id_)
        expert = reference.unpack_expert(data, layout, block.up_scale, block.down_scale)
        values, exponents = reference.quantise(x)
        expected += int((torch.relu(reference.rescale(values @ expert.up.T, expert.up_scale, exponents)) == 0).sum())
    assert torch.equal(zeros.step(2, ids, weights, x), inner.step(2, ids, weights, x))
    assert (zeros.zeros, zeros.neurons) == (expected, 2 * layout.width)
    assert 0 < expected < zeros.neurons
    before = zeros.zeros
    zeros.step(2, ids, weights, -x)
    assert zeros.zeros - before != expected
    zeros.step(2, ids.repeat(2, 1), weights.repeat(2, 1), x.repeat(2, 1))
    assert zeros.neurons == 4 * layout.width, "a prompt's tokens do not count"
