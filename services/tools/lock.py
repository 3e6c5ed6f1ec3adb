"""`python -m services.tools.lock`: what is installed, with the hashes of every file that pip may take. For maintainers.

Versions are those of services/constraints.txt, hashes come from the package index (PyPI or a mirror with its JSON form,
PEP 691), what an extra brings along from the metadata of what is installed here: run it in the tests' environment.
"""

import argparse
import json
import sys
import tomllib
import urllib.request
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "services/locks"
CONSTRAINTS = ROOT / "services/constraints.txt"
INDEX = "https://pypi.org/simple"
EXTRAS = {"api": "api", "engine": "engine", "everything": "test"}  # file: extra of pyproject.toml
# PyPI's torch needs these, a CPU build does not; nothing else needs them.
OF_TORCH = ("cuda-", "nvidia-", "triton")
BUILD = "build"  # what makes the package itself
# Debian 12's Python, the images', and the next one: what is needed differs a little.
PYTHONS = (("3.11", "3.11.2"), ("3.11", "3.11.13"), ("3.12", "3.12.11"))
HEADING = (
    "# Written by `make locks`. Linux, glibc, x86-64 and ARM, Python 3.11 and 3.12: pip install --require-hashes -r"
)


class LockError(Exception):
    """The index has not what is pinned."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default=INDEX, help=f"package index with JSON (default: {INDEX})")
    parser.add_argument("--out", type=Path, default=LOCKS, help="folder to write to (default: services/locks)")
    args = parser.parse_args()
    versions = pins()
    [build] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    try:
        wanted = {name: {pin: versions[pin] for pin in needed(extra, versions)} for name, extra in EXTRAS.items()}
        wanted[BUILD] = dict([build.split("==")])
        found = {
            pin: hashes(args.index, *pin) for pin in sorted({one for part in wanted.values() for one in part.items()})
        }
    except LockError as error:
        print(f"lock: {error}", file=sys.stderr)
        return 1
    args.out.mkdir(exist_ok=True)
    for name, part in wanted.items():
        text = text_of({pin: found[pin] for pin in part.items()}, name)
        (args.out / f"{name}.txt").write_text(text)
        print(f"{name}.txt: {len(part)} packages, {text.count('--hash=')} files")
    return 0


def pins() -> dict[str, str]:
    """Version by name, of services/constraints.txt."""
    lines = CONSTRAINTS.read_text().split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def needed(extra: str, versions: Mapping[str, str]) -> set[str]:
    """Every distribution that an extra of ours brings along, on any of PYTHONS. Raises LockError."""
    todo = [Requirement(f"thimble[{extra}]")]
    seen: set[tuple[str, str]] = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for wanted in requirement.extras | {""}:
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            try:
                below = [Requirement(text) for text in metadata.requires(name) or []]
            except metadata.PackageNotFoundError:
                below = []  # for another Python than this
            todo += [one for one in below if any(holds(one, wanted, *python) for python in PYTHONS)]
    names = {name for name, _ in seen} - {"thimble"}
    if "torch" in names:
        names |= {name for name in versions if name.startswith(OF_TORCH)}
    if unpinned := names - set(versions):
        raise LockError(f"{', '.join(sorted(unpinned))}: not in services/constraints.txt; run `make pins`")
    return names


def holds(requirement: Requirement, extra: str, short: str, full: str) -> bool:
    environment = {"extra": extra, "python_version": short, "python_full_version": full, "sys_platform": "linux"}
    environment |= {"platform_system": "Linux", "os_name": "posix", "platform_machine": "x86_64"}
    return requirement.marker is None or requirement.marker.evaluate(environment)


def text_of(found: Mapping[tuple[str, str], list[str]], name: str) -> str:
    lines = [f"{HEADING} {name}.txt"]
    for (package, version), digests in sorted(found.items()):
        lines.append(" \\\n".join([f"{package}=={version}", *(f"    --hash=sha256:{digest}" for digest in digests)]))
    return "\n".join(lines) + "\n"


def hashes(index: str, name: str, version: str) -> list[str]:
    """Of the wheels that fit. Raises LockError if the index has none."""
    url = f"{index.rstrip('/')}/{canonicalize_name(name)}/"
    request = urllib.request.Request(url, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            page = json.load(answer)
        files = [file for file in page["files"] if is_of(file["filename"], version) and not file.get("yanked")]
        found = sorted(file["hashes"]["sha256"] for file in files)
    except (OSError, ValueError, KeyError) as error:
        raise LockError(f"{url}: {error!r}") from error
    if not found:
        raise LockError(f"{url} has no wheel of {version} for Linux")
    return found


def is_of(filename: str, version: str) -> bool:
    """Whether this is a wheel of the version that Linux with glibc and our Pythons take."""
    if not filename.endswith(".whl"):
        return False
    try:
        _, found, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:
        return False  # there are some on PyPI, of old
    return str(found) == version and any(fits(tag) for tag in tags)


def fits(tag: Any) -> bool:
    """A tag of a wheel: interpreter, ABI, platform."""
    platform = tag.platform == "any" or ("manylinux" in tag.platform and tag.platform.endswith(("x86_64", "aarch64")))
    numbers = tag.interpreter.removeprefix("cp3").removeprefix("py3")
    if tag.interpreter.startswith("py3"):
        return platform and (not numbers or int(numbers) <= 12)
    if not tag.interpreter.startswith("cp3"):
        return False
    return platform and (int(numbers) in (11, 12) if tag.abi != "abi3" else int(numbers) <= 12)


if __name__ == "__main__":
    sys.exit(main())
