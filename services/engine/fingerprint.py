"""The arithmetic fingerprint: equal fingerprints, equal bits for the same ids. Part of a snapshot's name and payload.

Whatever may change a bit of a state or a logit is in it: the weights, the path through the kernels that was chosen at
start, the source of every kernel and of the model, and torch. The processor is not: on the CPU path every kernel is
proven equal to its reference on every instruction set, so a dialog may go on on another machine.
"""

import functools
import hashlib
from pathlib import Path

import torch

import kernels
import services.engine.model

SUFFIXES = (".py", ".cpp", ".h")


def arithmetic_fingerprint(model_fingerprint: str, path: str) -> str:
    """Hex, 64 letters. `path` names the kernels and their configurations, "cpu" for the reference arithmetic."""
    parts = {"model": model_fingerprint, "path": path, "sources": _sources(), "torch": torch.__version__}
    text = "\n".join(f"{name}={value}" for name, value in sorted(parts.items()))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash over the text of the kernels and of what puts them together: no edit that changes bits can be forgotten.

    Once a process: an edit of a file after that is not what runs.
    """
    root = Path(kernels.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    digest = hashlib.blake2b(digest_size=32)
    engine = Path(services.engine.model.__file__).parent
    together = [engine / "model.py", engine / "sequence.py", *sorted((engine / "gpu").glob("*.py"))]
    for path in [*files, *together]:
        digest.update(f"{path.relative_to(root.parent)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
