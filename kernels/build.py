"""Builds the project's C++ into one shared library at first use. Owns the list of flags and the cache of built files.

Every kernels/**/*.cpp goes into the library, C ABI only, no CUDA. A file named for an instruction set is compiled for
it, or to "not available" if the compiler is too old; which one runs is decided at run time. A built file is named by a
hash of the sources and one of the compiler and its flags, so a stale one is never loaded, and an image can carry a
library without a compiler: `python -m kernels.build` builds it ahead of time.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = ("c++", "g++", "clang++")
# No contraction: a multiply and an add are fused only where the source says so, on every machine alike.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-pthread", "-Wall", f"-I{ROOT}")
AVX2 = ("-mavx2", "-mfma", "-mf16c")
INSTRUCTION_SETS = {  # a file's last word -> its flags, on x86-64
    "avx2": AVX2,
    "avxvnni": (*AVX2, "-mavxvnni"),
    "avx512": (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
}


class BuildError(RuntimeError):
    """There is no compiler, or it refuses our sources. The message says which, and what to do."""

    code = "no_compiler"


def library() -> Path:
    """The shared library, built now unless it already is. Raises BuildError. Safe in many processes at once."""
    sources = _sources()
    try:
        path, version = compiler()
    except BuildError:
        pattern = f"libthimble-{_hash_of_sources(sources)}-*.so"
        ready = [path for folder in _folders() for path in sorted(folder.glob(pattern))]
        if not ready:
            raise
        return ready[0]
    return _built("libthimble", ".so", sources, path, version, ("-shared",), ())


def program(main: Path, name: str, extra: Sequence[str] = (), folders: Sequence[str] = (".",)) -> Path:
    """An executable of `main` and the sources under `folders` of kernels/, with extra flags everywhere (a sanitizer's,
    say). Files that are there for Python alone (abi.cpp, *_abi.cpp) are left out. Raises BuildError."""
    path, version = compiler()
    sources = [source for source in _sources(folders) if source.stem.split("_")[-1] != "abi"]
    return _built(name, "", [*sources, main], path, version, (), extra)


def _built(
    name: str,
    suffix: str,
    sources: list[Path],
    compiler: str,
    version: str,
    kind: Sequence[str],
    extra: Sequence[str],
) -> Path:
    """The target appears whole or not at all; one process builds, the others wait for it."""
    how = repr((version, FLAGS, INSTRUCTION_SETS, kind, extra)).replace(str(ROOT), "")
    file = f"{name}-{_hash_of_sources(sources)}-{_hash([how.encode()])}{suffix}"
    beside, cache = _folders()
    for folder in (beside, cache):
        if (folder / file).exists():
            return folder / file
    target = (beside if os.access(beside if beside.exists() else ROOT, os.W_OK) else cache) / file
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock_file = (target.parent / "lock").open("w")
    except OSError as error:
        raise BuildError(
            f"the C++ library cannot be built: neither {beside} nor {target.parent} can be written ({error.strerror}). "
            "Build it ahead of time with `python -m kernels.build`, or set XDG_CACHE_HOME to a writable folder"
        ) from error
    with lock_file as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            objects = [Path(scratch) / f"{number}.o" for number in range(len(sources))]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda source, output: _compile(compiler, source, output, extra), sources, objects))
            made = Path(scratch) / "made"
            _run([compiler, *kind, *extra, "-pthread", *map(str, objects), "-o", str(made)])
            os.replace(made, target)
    return target


def _compile(compiler: str, source: Path, output: Path, extra: Sequence[str]) -> None:
    wanted = INSTRUCTION_SETS.get(source.stem.split("_")[-1], ()) if platform.machine() in ("x86_64", "AMD64") else ()
    # An older compiler may not know an instruction set; the file then compiles to "not available".
    flags = wanted if all(_accepts(compiler, flag) for flag in wanted) else ()
    _run([compiler, *FLAGS, *extra, *flags, "-c", str(source), "-o", str(output)])


def _accepts(compiler: str, flag: str) -> bool:
    command = [compiler, flag, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"the C++ build failed: {' '.join(command)}\n{done.stderr[-4000:]}")


def compiler() -> tuple[str, str]:
    """The path and the version text of the C++ compiler. Raises BuildError if there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path:
            return path, subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    raise BuildError(
        f"no C++ compiler found (looked for {', '.join(COMPILERS)}): install one, on Debian or Ubuntu with "
        "`apt-get install g++`; until then experts are computed many times slower"
    )


def _sources(folders: Sequence[str] = (".",)) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / "kernels" / folder).rglob("*.cpp"))


def _hash_of_sources(sources: list[Path]) -> str:
    files = sources + sorted((ROOT / "kernels").rglob("*.h"))
    return _hash(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes() for file in files)


def _folders() -> tuple[Path, Path]:
    """Where built files may be: `.build` beside the code, and the user's cache, for where the code is read-only."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return ROOT / ".build", (Path(cache) if cache else Path.home() / ".cache") / "thimble"


def _hash(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    try:
        print(library())
    except BuildError as error:
        sys.exit(str(error))
