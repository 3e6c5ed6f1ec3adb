"""A measured figure is a row of a machine's CSV file, appended by the command that measured it.

The columns are `date,commit,machine,name,value,unit,note`; the machine is the file's name.
"""

import csv
import datetime
import os
import subprocess
from pathlib import Path

COLUMNS = ("date", "commit", "machine", "name", "value", "unit", "note")
_ROOT = Path(__file__).parents[2]


def append(path: Path, name: str, value: float, unit: str, note: str) -> None:
    """Add one row to `path`, with its heading if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            if new:
                rows.writerow(COLUMNS)
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            rows.writerow((today, commit(), path.stem, name, f"{value:.6g}", unit, note))
    except OSError as error:  # a full disk's does not say where
        raise OSError(error.errno, error.strerror, str(path)) from error


def commit() -> str:
    """What THIMBLE_COMMIT says, on a machine that has a copy of the tree alone or inside of another repository; else
    the short id of the checked out commit, with a plus sign if tracked files differ; else "unknown"."""
    if told := os.environ.get("THIMBLE_COMMIT"):
        return told
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=_ROOT, capture_output=True, text=True
        )
    except FileNotFoundError:
        return "unknown"
    return described.stdout.strip() or "unknown"
