"""Amounts on command lines: what no machine has is refused with the option's name, before anything is begun."""

import argparse
import importlib
from collections.abc import Callable

import pytest

from services.tools import amounts
from services.tools.cli import SUBCOMMANDS, main


def test_what_they_are() -> None:
    assert (amounts.amount("0.5"), amounts.nothing_or_more("0"), amounts.whole("12")) == (0.5, 0.0, 12)
    assert amounts.amounts("12, 16") == [12, 16]
    assert amounts.none_or_more("0,0.5") == [0, 0.5]


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        (amounts.amount, ("0", "-1", "nan", "inf", "x", "")),
        (amounts.nothing_or_more, ("-1", "nan", "inf", "x", "")),
        (amounts.amounts, ("12,,16", "12;16", "0,1", "")),
        (amounts.none_or_more, ("1,-1", "x")),
        (amounts.whole, ("0", "-1", "1.5", "x", "")),
        (amounts.count, ("-1", "1.5", "x", "")),
    ],
)
def test_what_they_are_not(read: Callable[[str], object], wrong: tuple[str, ...]) -> None:
    for text in wrong:
        with pytest.raises(argparse.ArgumentTypeError, match="expected"):
            read(text)


def test_what_an_option_is_by_default_may_be_said() -> None:
    seen = 0
    for command in SUBCOMMANDS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(command.module).add_arguments(parser)
        for action in parser._actions:
            default: object = action.default
            if callable(action.type) and isinstance(default, int | float):
                assert action.type(f"{default}") == default, (command.module, action.dest)
                seen += 1
    assert seen > 30


@pytest.mark.parametrize(
    "words",
    [
        "bench disk --emulate 0",
        "bench restart store --disk 0",
        "bench restart store --waits x",
        "bench restart store --rounds 0",
        "ledger --shape super --locked nan",
        "ledger --shape super --chunk -1",
        "fetch owner/small --parallel 0",
        "record store traces --share nan",
        "record store traces --answer-tokens -3",
    ],
)
def test_the_commands_refuse(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(words.split())
    assert f"argument {words.split()[-2]}: " in capsys.readouterr().err
