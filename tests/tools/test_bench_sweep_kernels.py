"""The sweep benchmark's cases find wrong kernels; its table says what was measured. On the CPU, in the interpreter."""

import pytest
import torch

from services.tools import cli, sweep_cases
from services.tools.bench_sweep_kernels import line
from services.tools.dense_cases import Dense
from services.tools.sweep_cases import LinearCase, NormCase
from services.tools.sweep_cases import sweep_cases as all_cases


def linear_case(form: str, finish: str, kind: torch.dtype, precise: bool = False) -> LinearCase:
    dense = Dense(torch.device("cpu"))
    case = LinearCase(dense, f"some {form}", form, 96, 192, finish, kind, precise)  # type: ignore[arg-type]
    case.prepare(70)
    return case


@pytest.mark.parametrize(
    ("form", "finish", "kind", "precise"),
    [
        ("FP8", "store", torch.float32, False),
        ("NVFP4", "relu2", torch.bfloat16, False),
        ("BF16", "add", torch.float32, False),
        ("BF16", "store", torch.float32, True),
    ],
)
def test_a_linear_is_right_and_a_wrong_one_is_found(
    form: str, finish: str, kind: torch.dtype, precise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = linear_case(form, finish, kind, precise)
    assert case.error() < case.bound
    assert case.same_when_cut()
    right = sweep_cases.linear

    def by_number_of_rows(x, weights, out, finish, precise, configuration=None):  # type: ignore[no-untyped-def]
        right(x, weights, out, finish, precise, configuration)
        out += 0.1 * (len(x) == 70)

    monkeypatch.setattr(sweep_cases, "linear", by_number_of_rows)
    assert case.error() > case.bound
    assert not case.same_when_cut()


@pytest.mark.parametrize("gated", [False, True])
def test_a_norm_is_right_and_a_wrong_one_is_found(gated: bool) -> None:
    case = NormCase(Dense(torch.device("cpu")), "some norm", gated)
    case.prepare(3)
    assert case.error() < case.bound
    assert case.same_when_cut()
    right = case.launch
    case.launch = lambda configuration=None: (right(), case._out.mul_(1.01))[0]  # type: ignore[method-assign]
    assert case.error() > case.bound
    assert not case.same_when_cut()


def test_every_case_has_a_name_of_its_own_and_its_tiles() -> None:
    assert {"in_proj FP8", "shared down NVFP4", "gate precise BF16", "rms norm"} <= set(all_cases(None))  # type: ignore[arg-type]
    assert linear_case("FP8", "store", torch.float32).tiles


def test_the_table_counts_the_products(capsys: pytest.CaptureFixture[str]) -> None:
    line("in_proj FP8", 2048, 1e-3, 2.0 * 2048 * 18560 * 4096, 0.8, 1e9, 1e-6)
    assert capsys.readouterr().out.split() == ["in_proj", "FP8", "2048", "1000.0", "311.4", "80.0%", "1000", "1.0e-06"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "sweep-kernels"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
