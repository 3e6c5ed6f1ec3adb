"""The host library under ThreadSanitizer: no data race, no wrong bit, while everything happens at once."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from kernels import build

SECONDS = 4
SANITIZER = ("-fsanitize=thread", "-g1", "-O1")  # lines of what races are enough, and a quarter less to compile
FOLDERS = ("workers", "experts/cpu", "experts/host")
# One thread after the other: of what two do in the same instant the sanitizer sees nothing (9 of 2500 times). But in an
# order that nothing guarantees.
RACE = """
#include <atomic>
#include <thread>
int shared;
std::atomic<bool> done{false};
int main() {
  std::thread other([] { shared++; done.store(true, std::memory_order_relaxed); });
  while (!done.load(std::memory_order_relaxed)) std::this_thread::yield();
  shared++;
  other.join();
}
"""


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*fixed_layout(), str(program), *arguments], capture_output=True, text=True, check=False, timeout=100
    )


@cache
def fixed_layout() -> list[str]:
    """The sanitizer's memory map does not fit every address layout that the kernel may draw: fix it, where that is
    allowed (in some containers it is not)."""
    fixed = ["setarch", "-R"]
    able = shutil.which(fixed[0]) and subprocess.run([*fixed, "true"], capture_output=True, check=False).returncode == 0
    return fixed if able else []


@pytest.fixture(scope="module")
def sanitizer_works(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Also the control: a program with a race is caught."""
    folder = tmp_path_factory.mktemp("race")
    (folder / "race.cpp").write_text(RACE)
    compiler, _ = build.compiler()
    command = [compiler, *SANITIZER, "-pthread", str(folder / "race.cpp"), "-o", str(folder / "race")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this compiler has no ThreadSanitizer")
    found = run(folder / "race")
    if "unexpected memory mapping" in found.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert "data race" in found.stderr


@pytest.mark.timeout(400)
def test_no_race_and_no_wrong_bit(sanitizer_works: None, tmp_path: Path) -> None:
    program = build.program(Path(__file__).parent / "host_stress.cpp", "host-stress", SANITIZER, FOLDERS)
    done = run(program, str(tmp_path), str(SECONDS))
    assert done.returncode == 0, done.stderr[-6000:]
    assert done.stderr == ""
    found = re.fullmatch(r"(\d+) steps, (\d+) of them failed as they had to, (\d+) blocks fed\n", done.stdout)
    assert found
    assert all(int(number) > 0 for number in found.groups())
