"""The arithmetic fingerprint: equal fingerprints, equal bits for the same ids. Part of a snapshot's name and payload.

Whatever may change a bit of a state or a logit is in it: the weights, the source of every kernel and of the model, the
variant of each kernel that was chosen at start, and the libraries and the machine those variants lean on.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

import kernels
import services.engine.model

SUFFIXES = (".py", ".cpp", ".h")


def arithmetic_fingerprint(model_fingerprint: str, variants: Mapping[str, str]) -> str:
    """Hex, 64 letters. `variants` names what was chosen for each kernel, such as {"linear": "avx2"}."""
    parts = {
        "model": model_fingerprint,
        "sources": _sources(),
        "torch": torch.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        **{f"kernel {name}": variant for name, variant in variants.items()},
    }
    text = "\n".join(f"{name}={value}" for name, value in sorted(parts.items()))
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


@functools.cache
def _sources() -> str:
    """A hash over the text of the kernels and of the model: no edit that changes bits can be forgotten.

    Once a process: an edit of a file after that is not what runs.
    """
    root = Path(kernels.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES)
    digest = hashlib.blake2b(digest_size=32)
    for path in [*files, Path(services.engine.model.__file__)]:
        digest.update(f"{path.relative_to(root.parent)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
