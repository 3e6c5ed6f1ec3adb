"""What the driver says of the card, through NVML, which comes with it. Owns the few calls that are made; no package is
needed, and without the library there are no figures and no errors.
"""

import contextlib
import ctypes
import functools
from dataclasses import dataclass

LIBRARY = "libnvidia-ml.so.1"
TEMPERATURE_GPU = 0  # nvmlTemperatureSensors_t


@dataclass(frozen=True)
class CardFigures:
    """`busy`: share of the last second or so in which a kernel ran; memory of all processes together."""

    celsius: float
    watts: float
    busy: float
    memory_used_bytes: int
    memory_total_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Rates(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Card:
    """One card, by its UUID as the driver writes it (`GPU-...`). Used by any thread."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def open(uuid: str) -> "Card | None":
        """None if the driver's library is not there or does not know the card."""
        library = _library()
        if library is None:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)):
            return None
        return Card(library, handle)

    def read(self) -> CardFigures:
        """What a card does not tell is 0."""
        degrees, milliwatts, rates, memory = ctypes.c_uint(), ctypes.c_uint(), _Rates(), _Memory()
        library, handle = self._library, self._handle
        library.nvmlDeviceGetTemperature(handle, TEMPERATURE_GPU, ctypes.byref(degrees))
        library.nvmlDeviceGetPowerUsage(handle, ctypes.byref(milliwatts))
        library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(rates))
        library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        return CardFigures(
            float(degrees.value), milliwatts.value / 1e3, rates.gpu / 100, int(memory.used), int(memory.total)
        )


@functools.cache
def _library() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        library = ctypes.CDLL(LIBRARY)
        if library.nvmlInit_v2() == 0:
            return library
    return None
