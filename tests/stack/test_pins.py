"""pyproject.toml pins what we name, services/constraints.txt also all that those bring along: they must agree."""

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def constraints() -> dict[str, str]:
    pins = {}
    for line in (ROOT / "services/constraints.txt").read_text().splitlines():
        name, version = line.split("==")
        pins[canonicalize_name(name)] = version
    return pins


def named() -> list[Requirement]:
    requirements = [Requirement(text) for extra in EXTRAS.values() for text in extra]
    return [requirement for requirement in requirements if requirement.name != "thimble"]


def disagreements(requirements: list[Requirement], pins: dict[str, str]) -> list[str]:
    wrong = []
    for requirement in requirements:
        exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        if exact != [pins.get(canonicalize_name(requirement.name))]:
            wrong.append(str(requirement))
    return wrong


def brought_along(requirements: list[Requirement]) -> set[str]:
    """Every distribution that `requirements` pull in here, by the installed packages' own metadata."""
    seen: set[tuple[str, str]] = set()
    todo = [(requirement.name, extra) for requirement in requirements for extra in (requirement.extras | {""})]
    while todo:
        name, extra = todo.pop()
        if (canonicalize_name(name), extra) in seen:
            continue
        seen.add((canonicalize_name(name), extra))
        for below in [Requirement(text) for text in metadata.requires(name) or []]:
            if not below.marker or below.marker.evaluate({"extra": extra}):
                todo += [(below.name, wanted) for wanted in (below.extras | {""})]
    return {name for name, _ in seen}


def test_every_named_dependency_is_pinned_the_same_twice() -> None:
    assert disagreements(named(), constraints()) == []


def test_the_agreement_check_can_fail() -> None:
    assert disagreements([Requirement("grpcio==1.0")], {"grpcio": "1.1"})
    assert disagreements([Requirement("grpcio>=1.0")], {"grpcio": "1.0"})
    assert disagreements([Requirement("grpcio==1.0")], {})


def test_everything_brought_along_is_pinned() -> None:
    missing = brought_along(named()) - set(constraints())
    assert missing == set(), "run `make pins`"
    assert "anyio" in brought_along([Requirement("openai")])


def test_installed_versions_are_the_pinned_ones() -> None:
    pins = constraints()
    installed = {name: metadata.version(name).split("+")[0] for name in brought_along(named())}
    assert {name: (version, pins[name]) for name, version in installed.items() if version != pins[name]} == {}
