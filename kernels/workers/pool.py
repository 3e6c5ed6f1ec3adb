"""The native library's loading, its instruction sets, and the worker pool. Owns no operation."""

import ctypes
import functools
import os
import weakref

from kernels.build import BuildError, library

ISAS = ("plain", "avx2", "avxvnni", "avx512")  # the numbers of workers/isa.h
SPIN_US = 50  # an idle worker watches for work this long before it sleeps


@functools.cache
def native() -> ctypes.CDLL:
    """The library; built at the first call if it must be. Raises BuildError. Calls into it release the GIL."""
    path = library()
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path} was built but cannot be loaded: {error}") from error
    lib.thimble_workers_open.restype = ctypes.c_void_p
    lib.thimble_workers_open.argtypes = (ctypes.c_int, ctypes.c_int)
    lib.thimble_workers_close.argtypes = (ctypes.c_void_p,)
    assert lib.thimble_isas() == len(ISAS)
    return lib


@functools.cache
def available_isas() -> tuple[str, ...]:
    """What this processor can run, the slowest first."""
    return tuple(name for number, name in enumerate(ISAS) if native().thimble_processor_has(number))


def isa_number(name: str | None) -> int:
    """The number of an instruction set, the best one for None. Raises ValueError if this processor lacks it."""
    name = available_isas()[-1] if name is None else name
    if name not in available_isas():
        raise ValueError(f"instruction set {name!r} is not available here; there are {', '.join(available_isas())}")
    return ISAS.index(name)


class Workers:
    """A pool of `threads` threads, the caller's counted. One caller at a time; others wait their turn."""

    def __init__(self, threads: int, spin_us: int = SPIN_US) -> None:
        if threads < 1 or spin_us < 0:
            raise ValueError(f"workers: {threads} threads and {spin_us} us: at least 1 and 0")
        self.threads = threads
        self.handle = native().thimble_workers_open(threads, spin_us)
        if not self.handle:
            raise OSError(f"the system refused {threads} threads: lower the number of workers or raise its limit")
        self._closing = weakref.finalize(self, native().thimble_workers_close, self.handle)

    def close(self) -> None:
        """Ends the threads. Nothing may be using the pool."""
        self._closing()


_pool = functools.cache(Workers)  # one for each number of threads, until the process ends: asleep it costs nothing
_threads, _spin_us = 0, SPIN_US


def default_threads() -> int:
    """The cores this process may use, less two for the rest of the machine; at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores - 2)


def use_threads(threads: int, spin_us: int = SPIN_US) -> Workers:
    """From now on the process's shared pool has this many threads (0: the default), which stay awake for `spin_us`
    after their work. Returns it."""
    global _threads, _spin_us
    _threads, _spin_us = threads, spin_us
    return default_workers()


def default_workers() -> Workers:
    """The pool that everything in this process shares unless it is given another. Made at the first call."""
    return _pool(_threads or default_threads(), _spin_us)
