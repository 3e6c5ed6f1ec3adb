"""Sampling in C++ against its references: the same ids, the same bits, the same refusals, in random cases."""

import ctypes
import math
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from odd_memory import framed, randn
from torch import Tensor

from kernels import build
from kernels.elementary import binding
from kernels.sampling import cpu, penalties, reference
from kernels.workers.pool import available_isas

VOCABULARY = 131_072
ODD = [math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38]


@pytest.fixture(autouse=True)
def library_is_there() -> None:
    """Without it the references would be compared with themselves."""
    assert binding.bind(*cpu.SAMPLE) is not None


def pack(allowed: Tensor) -> Tensor:
    """bool [V] -> int32 words; bits that belong to no id are set."""
    padded = torch.ones((len(allowed) + 31) // 32 * 32, dtype=torch.int64)
    padded[: len(allowed)] = allowed
    return (padded.view(-1, 32) << torch.arange(32)).sum(1).to(torch.int32)


def some_logits(chance: random.Random, ids: int) -> Tensor:
    scale = chance.choice([0.0, 1e-3, 1.0, 3.0, 10.0, 1e4, 1e38])
    logits = randn(ids, seed=chance.getrandbits(40), scale=scale) + chance.choice([0.0, 30.0, -1e6])
    if chance.random() < 0.3:
        logits = logits.round()  # many ties
    if chance.random() < 0.2:
        logits[torch.rand(ids) < chance.random()] = -math.inf
    if chance.random() < 0.15:
        logits[chance.randrange(ids)] = chance.choice(ODD)
    return logits


def some_options(chance: random.Random, ids: int) -> dict[str, Any]:
    return {
        "temperature": chance.choice([0.0, 1e-320, 1e-6, 0.3, 0.7, 1.0, 1.0, 1.5, 1e6, 1e308]),
        "top_p": chance.choice([1.0, 0.95, 1 - 1e-15, 1e-300, chance.random() or 1.0]),
        "seed": chance.getrandbits(64) - chance.choice([0, 1 << 63]),
        "position": chance.getrandbits(chance.choice([3, 40])),
        "top_k": chance.choice([0, 0, 1, 5, ids, 2 * ids]),
        "min_p": chance.choice([0.0, 0.0, 0.05, 1.0, 1e-30, chance.random()]),
    }


def outcome(sample: Any, logits: Tensor, **options: Any) -> int | str:
    try:
        return int(sample(logits, **options))
    except reference.LogitsError as error:
        return str(error)


def compare(cases: int, seed: int) -> Counter[str]:
    """How many random cases of each kind there were; the ids that an option decided count for that option."""
    chance, seen = random.Random(seed), Counter[str]()
    torch.manual_seed(seed)
    for _ in range(cases):
        ids = chance.choice([1, 2, 31, 32, 33, 64, 100, 257])
        logits, options = some_logits(chance, ids), some_options(chance, ids)
        allowed = torch.rand(ids) < chance.random() if chance.random() < 0.3 else None
        masked = logits if allowed is None else logits.masked_fill(~allowed, -math.inf)
        expected = outcome(reference.sample, masked, **options)
        found = outcome(cpu.sample, framed(logits), **options, allowed=None if allowed is None else pack(allowed))
        assert found == expected, (ids, options)
        seen["refused" if isinstance(expected, str) else "drawn"] += 1
        for option, neutral in {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "temperature": 1.0, "position": 0}.items():
            seen[option] += outcome(cpu.sample, masked, **{**options, option: neutral}) != found
        seen["allowed"] += outcome(cpu.sample, logits, **options) != found
    return seen


@pytest.mark.parametrize("seed", range(4))
def test_draws_what_the_reference_draws(seed: int) -> None:
    """And every option decided some of the ids: a path that ignored it would have been caught."""
    seen = compare(800, seed)
    assert min(seen.values()) > 5, seen


REAL = {
    "as a model's": lambda: randn(VOCABULARY, scale=3.0),
    "flat": lambda: randn(VOCABULARY, scale=0.01),
    "all equal": lambda: torch.zeros(VOCABULARY),
    "one far below": lambda: torch.cat([torch.rand(VOCABULARY - 1) * 0.01, torch.tensor([-20.0])]),
    "one far above": lambda: torch.cat([torch.tensor([30.0]), randn(VOCABULARY - 1, scale=3.0)]),
    "few values": lambda: randn(VOCABULARY, scale=3.0).bfloat16().float(),
}


@pytest.mark.parametrize("kind", REAL)
def test_draws_the_same_from_a_real_vocabulary(kind: str) -> None:
    logits = REAL[kind]()
    allowed = torch.rand(VOCABULARY, generator=torch.Generator().manual_seed(1)) < 0.5
    drawn = []
    for position, (top_p, top_k, min_p) in enumerate([(0.95, 0, 0.0), (1.0, 0, 0.0), (0.9, 60_000, 1e-6)]):
        options = (0.8 + 0.2 * (position % 2), top_p, 7, position, top_k, min_p)
        drawn.append(cpu.sample(logits, *options))
        assert drawn[-1] == reference.sample(logits, *options)
    masked = logits.masked_fill(~allowed, -math.inf)
    assert cpu.sample(logits, 1.0, 0.95, 3, 5, allowed=pack(allowed)) == reference.sample(masked, 1.0, 0.95, 3, 5)
    assert cpu.sample(logits, 0.0, 1.0, 0, 0) == int(logits.argmax())
    if kind != "one far above":
        assert len(set(drawn)) > 1, "the control: they are drawn"


def test_a_mask_of_the_wrong_size_or_type_is_our_own_bug() -> None:
    logits = torch.zeros(40)
    assert cpu.sample(logits, 0.0, 1.0, 0, 0, allowed=torch.tensor([0, 1 << 4], dtype=torch.int32)) == 36
    for wrong in (torch.zeros(1, dtype=torch.int32), torch.ones(2, dtype=torch.int64)):
        with pytest.raises(AssertionError):
            cpu.sample(logits, 0.0, 1.0, 0, 0, allowed=wrong)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_may_forbid_what_is_not_a_number(temperature: float) -> None:
    logits = torch.tensor([1.0, math.nan, math.inf, 0.5])
    assert cpu.sample(logits, temperature, 1e-9, 0, 0, allowed=torch.tensor([0b1001], dtype=torch.int32)) == 0
    for bits, largest in [(0b1011, "nan"), (0b1101, "inf"), (0, "-inf")]:
        with pytest.raises(reference.LogitsError, match=f"the largest logit is {largest}:"):
            cpu.sample(logits, temperature, 1.0, 0, 0, allowed=torch.tensor([bits], dtype=torch.int32))


@pytest.mark.parametrize("ids", [1, 63, 500, VOCABULARY])
def test_log_probabilities(ids: int) -> None:
    for seed, scale in enumerate([0.0, 1.0, 8.0, 200.0]):
        logits = randn(ids, seed=seed, scale=scale)
        if seed == 2:
            logits = logits.round()
        if seed == 3 and ids > 1:
            logits[:: ids // 2 or 1] = -math.inf
            logits[ids // 3] = 7.0
        for id_, top in [(0, 0), (ids - 1, 1), (ids // 2, min(20, ids))]:
            assert cpu.logprobs(framed(logits), id_, top) == penalties.logprobs(logits, id_, top)
    if ids > 1:
        logits = torch.zeros(ids)
        changed = logits.clone()
        changed[ids // 3] += 1e-3
        assert cpu.logprobs(changed, 0, 1) != cpu.logprobs(logits, 0, 1), "the control"


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
def test_log_probabilities_of_what_is_not_finite_are_refused(bad: float) -> None:
    logits = torch.zeros(70)
    logits[40] = bad
    for values in (logits, torch.full((5,), -math.inf)):
        for logprobs in (cpu.logprobs, penalties.logprobs):
            with pytest.raises(reference.LogitsError, match="not usable"):
                logprobs(values, 0, 1)


@pytest.mark.parametrize(
    "asked", [(1.3, 0.0, 0.0), (1.0, 0.7, 0.0), (1.0, 0.0, -0.3), (0.9, 1.1, 0.37), (1.0, 0.0, 0.0)]
)
def test_penalties(asked: tuple[float, float, float]) -> None:
    chance = random.Random(3)
    for ids in (1, 40, 3000):
        logits = randn(ids, scale=4)
        logits[: ids // 7] = -math.inf
        prompt = [chance.randrange(ids) for _ in range(ids)]
        said = [chance.randrange(ids) for _ in range(ids // 2)]
        answer = cpu.Counts()
        for id_ in said:
            answer.add(id_)
        before = logits.clone()
        found = cpu.penalise(logits, torch.tensor(prompt, dtype=torch.int32), answer, *asked)
        assert torch.equal(found, penalties.penalise(logits, prompt, Counter(said), *asked))
        assert torch.equal(logits, before)
        if ids == 3000 and asked != (1.0, 0.0, 0.0):
            assert not torch.equal(found, logits), "the control"
            other = penalties.penalise(logits, prompt[1:], Counter(said[1:]), *(1.0001 * value for value in asked))
            assert not torch.equal(found, other)


def test_counts_are_a_counter() -> None:
    counts = cpu.Counts()
    said = [5, 3, 5, 5, 900, 3]
    for id_ in said:
        counts.add(id_)
    assert dict(zip(counts.ids, counts.counts, strict=True)) == Counter(said)


@pytest.mark.parametrize("flags", [("-O1",), ("-mavx2",)], ids=["plain", "avx2"])
def test_other_instruction_sets(flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library takes the best that this processor has; the others must give the same bits."""
    if flags == ("-mavx2",) and "avx2" not in available_isas():
        pytest.skip("this processor has no AVX2")
    target = tmp_path / "sampling.so"
    sources = [build.ROOT / f"kernels/sampling/{name}.cpp" for name in ("sampling", "penalties")]
    command = [build.compiler()[0], *build.FLAGS, *flags, "-DTHIMBLE_CLONES=", "-shared", *sources, "-o", target]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))

    def bind(name: str, *arguments: type) -> Any:
        function = library[name]
        function.argtypes, function.restype = arguments, None
        return function

    monkeypatch.setattr(cpu, "bind", bind)
    compare(400, 99)
    test_draws_the_same_from_a_real_vocabulary("as a model's")
    test_log_probabilities(500)
    test_penalties((0.9, 1.1, 0.37))


def test_without_a_library_the_references_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "bind", lambda *_: None)
    compare(100, 5)
    test_log_probabilities(63)
    test_penalties((0.9, 1.1, 0.37))
