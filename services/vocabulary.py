"""A tokenizer.json, tried in a process that may end before a library of ours gets it. Owns the file's size, the trial
and its limits; what a tokenizer means is its readers'.

The libraries that read it are native. Of most damaged files they say so, but some end the process instead, or ask for
all memory there is, and no `except` helps. So vocabulary_trial.py, a process with limits, reads each file once; only
what it came through with is read here, from the same bytes.
"""

import hashlib
import os
import signal
import site
import subprocess
import sys
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal

PROGRAM = Path(__file__).with_name("vocabulary_trial.py")
MOST_BYTES = 256 << 20  # the real model's has 17 MB
MEMORY_BYTES = 2 << 30  # of address space; the real model's takes 0.3 GB
CPU_S = 30  # the real model's takes 0.5 s, llguidance's reader 1.5 s
WALL_S = 300.0  # a machine that swaps
MOST_KEPT = 32
Library = Literal["tokenizers", "llguidance"]
_kept: OrderedDict[tuple[str, int, bytes], str] = OrderedDict()  # the empty string: nothing is wrong
_turn = threading.Lock()


class VocabularyError(Exception):
    """A tokenizer.json that cannot be used. Says why, and what to do."""


def read_vocabulary(path: Path, library: Library, ids: int = 0) -> str:
    """The file's text, which `library` can be given. Raises OSError, and VocabularyError, which names the file."""
    if path.stat().st_size > MOST_BYTES:
        raise VocabularyError(f"{path} has more than {MOST_BYTES >> 20} MiB: it is no tokenizer's")
    try:
        text = path.read_text(encoding="utf-8")
        try_out(text, library, ids)
    except UnicodeDecodeError as error:
        raise VocabularyError(f"{path} is no text: {error}") from error
    except VocabularyError as error:
        raise VocabularyError(f"{path} cannot be used: {error}") from error
    return text


def try_out(text: str, library: Library, ids: int = 0, memory_bytes: int = MEMORY_BYTES, cpu_s: int = CPU_S) -> None:
    """Raises VocabularyError if the library refuses it, does not come back from it or takes too much for it. `ids`: how
    many the model has, for llguidance. What was tried in this process is not tried again."""
    data = text.encode("utf-8", "surrogatepass")
    key = (library, ids, hashlib.sha256(data).digest())
    with _turn:
        trouble = _kept.get(key)
        if trouble is None:
            trouble = _trouble(data, library, ids, memory_bytes, cpu_s)
            _kept[key] = trouble
            while len(_kept) > MOST_KEPT:
                _kept.popitem(last=False)
    if trouble:
        raise VocabularyError(
            f"{trouble}. If it should be whole, fetch the checkpoint again (thimble fetch compares every file with its "
            "checksum) and repack it"
        )


def is_panic(error: BaseException) -> bool:
    """Whether it is what pyo3 makes of a panic in Rust: no Exception, and its class is not to be had by import."""
    return type(error).__name__ == "PanicException"


def _folders() -> list[str]:
    """Where this process finds its libraries, so that the trial is of the same ones. But for the working directory, by
    whatever name, which anybody may have filled, and the user's own packages."""
    out = {os.path.realpath(os.curdir), os.path.realpath(site.getusersitepackages())}
    return [folder for folder in sys.path if os.path.isabs(folder) and os.path.realpath(folder) not in out]


def _trouble(data: bytes, library: Library, ids: int, memory_bytes: int, cpu_s: int) -> str:
    command = [sys.executable, "-I", str(PROGRAM), library, str(memory_bytes), str(cpu_s), str(ids), *_folders()]
    for _ in range(2):
        try:
            done = subprocess.run(command, input=data, capture_output=True, timeout=WALL_S, env={})
        except subprocess.TimeoutExpired:
            return f"the {library} library was not done with it after {WALL_S:g} s"
        if done.returncode != -signal.SIGKILL:
            break  # else somebody else ended it, as a system does that is short of memory: once more
    if done.returncode == 0:
        return done.stdout.decode("utf-8", "replace")
    if done.returncode == -signal.SIGXCPU:
        return f"the {library} library takes more than {cpu_s} s of processor time for it"
    if done.returncode > 0:  # no fault of the file's
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return f"the {library} library could not be tried: {said[-1] if said else 'it says nothing'}"
    name = signal.Signals(-done.returncode).name
    return f"the {library} library ends its process at it ({name}), or takes more than {memory_bytes >> 20} MiB for it"
