"""How tests are shared out: in pieces that stay together, those that take long before the others."""

from pathlib import Path

from schedule import ORDER, SHARED, piece_of, place_of


def test_pieces_are_files_and_folders_that_share_servers() -> None:
    assert piece_of("tests/e2e/test_chat.py::test_a[x/y]") == piece_of("tests/e2e/test_top.py::test_b") == "e2e"
    assert piece_of("tests/kernels/test_host.py::test_a[x/y]") == "tests/kernels/test_host.py"
    assert piece_of("tests/test_schedule.py::test_a") == "tests/test_schedule.py"


def test_long_ones_come_first() -> None:
    places = [place_of(f"tests/{folder}/test_x.py::test_a") for folder in (*ORDER, "api")]
    assert places == sorted(places)
    assert len(set(places)) == len(places)
    assert place_of("tests/test_schedule.py::test_a") == place_of("tests/api/test_x.py::test_a")


def test_the_folders_are_there() -> None:
    here = Path(__file__).parent
    assert all((here / folder / "conftest.py").exists() for folder in SHARED)
    assert all((here / folder).is_dir() for folder in ORDER)
