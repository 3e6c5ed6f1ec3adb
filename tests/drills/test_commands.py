"""Each drill runs as the README says: by its path, with the repository's root and its own folder to import from."""

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SAID = "PYTHONPATH=. .venv/bin/python tests/drills/"
LOOK = """
import runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0, path
"""


def test_every_drill_says_what_it_does() -> None:
    assert SAID in (FOLDER / "README.md").read_text()
    commands = [path for path in sorted(FOLDER.glob("*.py")) if "ArgumentParser" in path.read_text()]
    commands = [path for path in commands if path != Path(__file__)]
    assert len(commands) >= 9
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[0] = {str(FOLDER)!r}\n{LOOK}", *map(str, commands)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(commands)
