"""The network that is trained: its parts against their plain definitions, the whole against transformers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.fp8.reference as fp8
import kernels.nvfp4.reference as nvfp4
from services.engine.model_config import ModelConfig
from services.tools import oracle
from services.tools.train_demo import experts, scan, shapes
from services.tools.train_demo import fused as fused_parts
from services.tools.train_demo.documents import NOT_SCORED
from services.tools.train_demo.export import export
from services.tools.train_demo.network import Network
from services.tools.train_demo.rounding import FP8, NVFP4, Rounding
from services.tools.train_demo.training import Training


def tiny(seed: int = 1) -> Network:
    """Random weights as a checkpoint can hold them, large enough that every part matters."""
    network = Network(ModelConfig.from_hf(shapes.config("tiny")), seed)
    with torch.no_grad():
        for name, value in network.state_dict().items():
            value += 0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name)))
            if not name.endswith(("gate.weight", "e_score_correction_bias")):
                value.copy_(value.bfloat16().float())
    return network


def documents() -> Tensor:
    return torch.tensor([[0] * 11 + [1] * 30 + [2] * 9, [0] * 50])


def one_by_one(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, places: Tensor) -> Tensor:
    rows, tokens, heads, size = x.shape
    y, per = torch.zeros_like(x), heads // b.shape[2]
    for row in range(rows):
        state = torch.zeros(heads, size, b.shape[3], dtype=x.dtype)
        for t in range(tokens):
            if t and places[row, t] != places[row, t - 1]:
                state = torch.zeros_like(state)
            into, out = (v[row, t].repeat_interleave(per, 0) for v in (b, c))
            step = dt[row, t]
            state = state * torch.exp(step * a)[:, None, None] + (step[:, None] * x[row, t])[:, :, None] * into[:, None]
            y[row, t] = (state * out[:, None]).sum(-1)
    return y


@pytest.mark.parametrize("chunk", [8, 16, 64])
def test_the_scan_is_the_recurrence(chunk: int) -> None:
    random = torch.Generator().manual_seed(2)
    x = torch.randn(2, 50, 4, 6, generator=random, dtype=torch.float64)
    dt, a = torch.rand(2, 50, 4, generator=random, dtype=torch.float64), -torch.rand(4, dtype=torch.float64)
    b, c = (torch.randn(2, 50, 2, 5, generator=random, dtype=torch.float64) for _ in range(2))
    found = scan.scan(x, dt, a, b, c, documents(), chunk)
    assert torch.allclose(found, one_by_one(x, dt, a, b, c, documents()).float(), atol=1e-5)
    assert not torch.allclose(found, one_by_one(x, dt, a, b, c, torch.zeros(2, 50)).float(), atol=1e-2)


def test_experts_and_their_gradients_are_the_plain_sum() -> None:
    random = torch.Generator().manual_seed(3)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()

    x, up, down, weights = leaf(30, 8), leaf(5, 7, 8), leaf(5, 8, 7), leaf(30, 2)
    ids = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(30)])  # expert 4 has no token
    found, counts, active = experts.run(x, ids, weights, up, down)
    hidden = torch.relu(torch.einsum("enl,tl->ten", up, x)).square()
    every = torch.einsum("eln,ten->tel", down, hidden)
    wanted = (every.gather(1, ids[..., None].expand(-1, -1, 8)) * weights[..., None]).sum(1)
    assert torch.allclose(found, wanted)
    assert counts.tolist() == torch.bincount(ids.flatten(), minlength=5).tolist()
    assert int((active > 0).sum()) == int((hidden.gather(1, ids[..., None].expand(-1, -1, 7)) > 0).sum())
    push = torch.randn(30, 8, generator=random, dtype=torch.float64)
    ours = torch.autograd.grad(found, (x, up, down, weights), push)
    theirs = torch.autograd.grad(wanted, (x, up, down, weights), push)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other)
        assert not torch.allclose(one, torch.zeros_like(one))


def run_folder(tmp_path: Path) -> Path:
    shapes.write_config(tmp_path, "tiny")
    return tmp_path


@torch.no_grad()
def test_the_whole_is_what_transformers_computes(tmp_path: Path) -> None:
    network, ids, places = tiny(), torch.randint(32, 500, (2, 50)), documents()
    export(network, run_folder(tmp_path), tmp_path / "out")
    reference = oracle.load(tmp_path / "out")

    def ours() -> Tensor:
        return network.logits(network(ids, places)[0])

    found = ours()
    for row, begin, end in ((0, 0, 11), (0, 11, 41), (0, 41, 50), (1, 0, 50)):  # packed documents see only themselves
        wanted = reference(input_ids=ids[row : row + 1, begin:end], use_cache=False).logits[0]
        assert torch.allclose(found[row, begin:end], wanted, atol=2e-4 * float(wanted.abs().max()))
    network.get_parameter("layers.0.mixer.dt_bias").add_(0.01)
    assert not torch.allclose(ours()[1], wanted, atol=2e-4 * float(wanted.abs().max()))


def test_drafts_see_one_id_further_and_teach_the_model_nothing() -> None:
    network, ids = tiny(), torch.randint(32, 500, (1, 20))
    hidden, run = network(ids, torch.zeros(1, 20, dtype=torch.long))
    drafts = network.draft_logits(network.draft(hidden, ids, run))
    other = ids.clone()
    other[0, 10] += 1  # place 9 reads it, place 8 does not
    hidden_2, run_2 = network(other, torch.zeros(1, 20, dtype=torch.long))
    drafts_2 = network.draft_logits(network.draft(hidden_2, other, run_2))
    assert torch.equal(drafts[0, :9], drafts_2[0, :9])
    assert not torch.allclose(drafts[0, 9], drafts_2[0, 9])
    drafts[0, :-1].logsumexp(-1).sum().backward()
    taught = {name for name, p in network.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert taught
    assert all(name.startswith("mtp.") for name in taught)


def test_rounding_is_the_checkpoints() -> None:
    random = torch.Generator().manual_seed(4)
    stacked = torch.randn(3, 8, 32, generator=random) * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    stacked[1, 2, :16] = 0
    stacked = stacked.bfloat16().float().requires_grad_()
    found = Rounding()("experts", stacked, NVFP4)
    for one, other in zip(found, stacked.detach(), strict=True):
        assert torch.equal(one, nvfp4.dequantise(*nvfp4.quantise(other)))
        assert not torch.equal(one, nvfp4.dequantise(*nvfp4.quantise(other, "max")))
    assert torch.equal(Rounding()("in", stacked[0], FP8), fp8.dequantise(*fp8.quantise(stacked[0].detach())))
    found.sum().backward()
    assert stacked.grad is not None
    assert torch.equal(stacked.grad, torch.ones_like(stacked))  # straight through


def test_scales_stay_until_they_are_to_be_fresh() -> None:
    rounding, weight = Rounding(), torch.randn(4, 32)
    first = rounding("w", weight, NVFP4)
    kept = rounding("w", 4 * weight, NVFP4)
    rounding.fresh()
    assert torch.equal(rounding("w", 4 * weight, NVFP4), 4 * first)
    assert not torch.equal(kept, 4 * first)


def test_balancing_moves_loads() -> None:
    def busiest(amount: float) -> list[float]:
        network = tiny()
        mixture = network.mixtures()[0]
        with torch.no_grad():
            mixture.gate.e_score_correction_bias.zero_()
            mixture.gate.e_score_correction_bias[0] = 0.5  # everybody's favourite
        found = []
        ids = torch.randint(32, 500, (4, 60), generator=torch.Generator().manual_seed(5))
        for _ in range(40):
            with torch.no_grad():
                hidden, run = network(ids, torch.zeros(4, 60, dtype=torch.long))
                network.draft(hidden, ids, run)
            load = run.loads[mixture.name].float()
            found.append(float(load.max() / load.mean()))
            Training.balance(FakeTraining(network), run.loads, amount)  # type: ignore[arg-type]
        return found

    moved, left = busiest(0.02), busiest(0.0)
    assert moved[0] == left[0] == left[-1]
    assert moved[0] > 3.5  # 8 experts, 2 a token: 4 would be all of them
    assert moved[-1] < 2


class FakeTraining:
    def __init__(self, network: Network) -> None:
        self.network = network


@pytest.mark.parametrize("rounded", [False, True])
def test_fused_parts_are_the_networks_own(rounded: bool) -> None:
    """Losses, loads and every gradient; without one of its weights a part is another."""
    network, rounding = tiny(), Rounding() if rounded else None
    ids = torch.randint(0, 512, (2, 50), generator=torch.Generator().manual_seed(5))
    found = []
    for fused in (None, fused_parts.plain(torch.float32)):
        network.zero_grad(set_to_none=True)
        hidden, run = network(ids, documents(), rounding, True, fused, True)
        states = network.draft(hidden, ids, run)
        if fused is None or fused.head is None:
            loss = torch.nn.functional.cross_entropy(
                network.logits(hidden, rounding)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
            )
        else:
            targets = torch.cat((ids[:, 1:], torch.full((2, 1), NOT_SCORED)), dim=1)
            loss = fused.head(hidden, network.lm_head.value(rounding), targets, torch.float32)
        (loss + states.square().mean() + torch.stack(run.sparsity).mean()).backward()
        gradients = {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
        found.append((loss.detach(), torch.stack(run.zeros), torch.stack(run.sparsity).detach(), run.loads, gradients))
    (loss, zeros, sparsity, loads, gradients), (loss_2, zeros_2, sparsity_2, loads_2, gradients_2) = found
    assert torch.allclose(loss, loss_2, rtol=1e-5)
    assert torch.allclose(zeros, zeros_2)
    assert torch.allclose(sparsity, sparsity_2, rtol=1e-4)
    assert {name: value.tolist() for name, value in loads.items()} == {n: v.tolist() for n, v in loads_2.items()}
    assert gradients.keys() == gradients_2.keys()
    assert len(gradients) > 50
    for name, one in gradients.items():
        assert torch.allclose(one, gradients_2[name], rtol=1e-3, atol=1e-3 * float(one.abs().max())), name
    assert not torch.allclose(gradients["lm_head.weight"], gradients_2["lm_head.weight"].roll(1))
