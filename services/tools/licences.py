"""`python -m services.tools.licences`: each dependency's licence, by its own metadata. For maintainers.

Writes services/locks/licences.tsv. What is not installed here (CUDA's libraries beside a CPU build of torch) is listed
as such: nothing is guessed.
"""

import sys
from importlib import metadata

from services.tools.lock import LOCKS, pins

FILE = LOCKS / "licences.tsv"
NOT_HERE = "not installed where this was written; see the package's page on PyPI"
UNSTATED = "not stated in its metadata"
CLASSIFIER = "License :: "


def main() -> int:
    FILE.write_text(table())
    print(f"{FILE.name}: {len(table().splitlines()) - 1} packages")
    return 0


def table() -> str:
    rows = ["package\tversion\tlicence"]
    rows += [f"{name}\t{version}\t{licence(name)}" for name, version in sorted(pins().items())]
    return "\n".join(rows) + "\n"


def licence(name: str) -> str:
    """By the expression in a distribution's metadata, its classifiers, or the first line of the old free field."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return NOT_HERE
    if "License-Expression" in found:
        return str(found["License-Expression"])
    classifiers = [text.removeprefix(CLASSIFIER) for text in found.get_all("Classifier") or [] if CLASSIFIER in text]
    stated = [text.rpartition(" :: ")[2] for text in classifiers if text != "OSI Approved"]
    free = str(found.json.get("license", "")).strip().splitlines()
    return ", ".join(stated) or (free[0][:80] if free else UNSTATED)


if __name__ == "__main__":
    sys.exit(main())
