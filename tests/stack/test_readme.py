"""README.md is true: its map is the tree, its commands exist, its figures are rows of the results."""

import argparse
import csv
import dataclasses
import fnmatch
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from services.tools import cards
from services.tools.cli import SUBCOMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FILES_ON_THE_MAP = ("services/engine", "services/api")  # here each file has a line, elsewhere each folder
DEEPEST = 3
# Their parts, or the folder above them, are on it.
UNMAPPED = {"services", "tests", "proto", "proto/thimble", ".ci", "tests/bench"}
UNMAPPED |= {"grafana/provisioning/dashboards", "grafana/provisioning/datasources"}


def map_entries() -> set[str]:
    [block] = re.findall(r"<!-- map -->\n```\n(.*?)```\n<!-- end of map -->", README, re.DOTALL)
    entries = [line.split()[0] for line in block.splitlines()]
    assert len(entries) == len(set(entries))
    return {entry.rstrip("/") for entry in entries}


def off_the_map(wanted: set[str]) -> set[str]:
    """A line may stand for a family of files: `services/api/responses_*.py`."""
    return {path for path in wanted if not any(fnmatch.fnmatch(path, entry) for entry in map_entries())}


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [Path(line) for line in listed.stdout.splitlines()]


def wanted_entries(files: list[Path]) -> set[str]:
    folders = {str(parent) for file in files for parent in file.parents if len(parent.parts) <= DEEPEST}
    sources = {str(file) for file in files if str(file.parent) in FILES_ON_THE_MAP and not file.name.startswith("__")}
    return (folders | sources) - {"."} - UNMAPPED


def test_everything_on_the_map_is_there() -> None:
    assert {entry for entry in map_entries() if not list(ROOT.glob(entry))} == set()


def test_everything_there_is_on_the_map() -> None:
    assert off_the_map(wanted_entries(tracked())) == set(), "add a line to the map in README.md"


def test_the_map_check_can_fail() -> None:
    new = [Path("services/engine/new.py"), Path("kernels/new/reference.py"), Path("services/tools/new.py")]
    assert off_the_map(wanted_entries(new)) == {"services/engine/new.py", "kernels/new"}


def commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    inline = re.findall(r"`((?:make|thimble|docker compose) [^`\n]+)`", README)
    return [line.strip() for block in blocks for line in block.splitlines() if line.strip()] + inline


def trouble(command: str) -> str:
    """Empty if this command is one of ours and would be understood."""
    words = shlex.split(command)
    match words[0].removeprefix(".venv/bin/"), words[1:]:
        case "make", [target, *variables]:
            makefile = (ROOT / "Makefile").read_text()
            wrong = [word for word in variables if "=" not in word or f"$({word.split('=')[0]})" not in makefile]
            if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
                return f"no make target {target}"
            return f"no make variable for {wrong}" if wrong else ""
        case "thimble", [name, *rest]:
            if name not in SUBCOMMANDS:
                return f"no subcommand {name}"
            parser = argparse.ArgumentParser(exit_on_error=False)
            importlib.import_module(SUBCOMMANDS[name].module).add_arguments(parser)
            try:
                _, unknown = parser.parse_known_args(rest)
            except (argparse.ArgumentError, SystemExit):
                unknown = rest or []  # a bare mention needs no arguments
            return f"thimble {name} does not know {unknown}" if unknown else ""
        case "docker", ["compose", *_]:
            return "" if (ROOT / "docker-compose.yml").exists() else "no compose file"
        case "cp", [source, _]:
            return "" if (ROOT / source).exists() else f"no {source}"
        case (("sudo" | "curl"), _):
            return ""
    return f"unknown command {command}"


def test_every_command_is_understood() -> None:
    assert len(commands()) > 15
    assert [said for said in map(trouble, commands()) if said] == []


@pytest.mark.parametrize(
    "command",
    ["make upp", "make up ARGUMENTS=x", "thimble upp", "thimble up --prot 1", "thimble chat --thinking", "frobnicate"],
)
def test_the_command_check_can_fail(command: str) -> None:
    assert trouble(command) != ""


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(
        r"`((?:services|kernels|tests|demo|proto)/[\w./-]+)`", README
    )
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_symptom_is_a_message_of_ours() -> None:
    """A quoted message in the table of troubles must be one that the code can print."""
    table = README[README.index("## When something is wrong") : README.index("## Security")]
    symptoms = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    quoted = [text for symptom in symptoms for text in re.findall(r"`([^`]+)`", symptom)]
    assert len(quoted) > 5
    sources = [p for top in ("services", "kernels") for kind in ("py", "cpp") for p in (ROOT / top).rglob(f"*.{kind}")]
    sources.append(ROOT / "Makefile")
    code = re.sub(r'["`]\s*\n\s*f?["`]|[`"]', "", "\n".join(path.read_text() for path in sources))
    for text in quoted:
        parts = [part.strip() for part in re.split(r"…|\d+", text) if len(part.strip()) > 3]
        assert all(part in code or part in {"cached_tokens"} for part in parts), text


def test_every_figure_is_a_row_of_the_results() -> None:
    rows = [
        row
        for path in (ROOT / "tests/bench/results").glob("*.csv")
        for row in csv.DictReader(path.read_text().splitlines())
    ]
    table = README[README.index("## Measured") : README.index("## When something is wrong")]
    figures = re.findall(r"^\|[^|]+\| ([\d.]+)[^|]*\| `([\w.]+)` in `([\w-]+)\.csv`", table, re.MULTILINE)
    assert figures
    for value, name, machine in figures:
        measured = [float(row["value"]) for row in rows if (row["name"], row["machine"]) == (name, machine)]
        digits = len(value.partition(".")[2])
        assert any(round(number, digits) == float(value) for number in measured), (name, value, measured)


def test_the_table_of_cards_is_the_rows_of_the_results() -> None:
    rows = csv.DictReader((ROOT / "tests/bench/results/build-2core.csv").read_text().splitlines())
    [block] = re.findall(r"<!-- cards -->\n(.*?)<!-- end of cards -->", README, re.DOTALL)
    lines = cards.recorded(rows)
    assert len(lines) > 10
    assert block.splitlines() == list(cards.table(lines))
    slower = [dataclasses.replace(lines[0], tok_s=lines[0].tok_s - 1), *lines[1:]]
    assert block.splitlines() != list(cards.table(slower))


def test_settings_named_here_exist() -> None:
    example = (ROOT / ".env.example").read_text()
    names = set(re.findall(r"THIMBLE_[A-Z_]+", README))
    assert {name for name in names if f"{name}=" not in example} == set()


def test_ports_named_here_are_the_defaults() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    for service, port in (("api", 8000), ("grafana", 3000), ("prometheus", 9090)):
        assert f"http://127.0.0.1:{port}" in README
        assert f":-{port}}}:" in compose[service]["ports"][0]
