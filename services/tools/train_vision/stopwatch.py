"""Where a step's time goes, and how short it could be. Owns no step."""

import time

import torch

from services.engine.vision.config import VisionConfig
from services.tools.train_vision.batches import LENGTH
from services.tools.train_vision.language import Language
from services.tools.train_vision.network import MOST_PATCHES


class Clock:
    """Seconds that a run has had: what is long between two looks, for the process was stopped or waited, is cut."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s, self._last, self.passed_s = longest_s, time.monotonic(), 0.0

    def tick(self, longest_s: float | None = None) -> float:
        """Adds what has passed since the last look, at most the longest; all so far."""
        now = time.monotonic()
        self.passed_s += min(now - self._last, longest_s or self._longest_s)
        self._last = now
        return self.passed_s


class Stopwatch:
    """Milliseconds of the parts of those steps that are watched; only then does it wait for the GPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")
        self._watching, self._last = False, 0.0
        self._ms: dict[str, float] = {}

    def start(self, watching: bool) -> None:
        self._watching = watching
        if watching:
            self._ms = {}
            self._last = self._now()

    def mark(self, part: str) -> None:
        """What has passed since the last mark was for that part."""
        if self._watching:
            now = self._now()
            self._ms[part] = 1000 * (now - self._last)
            self._last = now

    def told(self) -> str:
        return ", ".join(f"{part} {ms:.1f}" for part, ms in self._ms.items())

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.monotonic()


def floor_ms(config: VisionConfig, language: Language, rows: int, stage: str, device: str) -> float:
    """A step's matrix products at the rate that this device multiplies large matrices; the tower's gradients are two
    thirds of its work, the frozen language model's half, all experts counted as they are computed."""
    tokens = rows * (MOST_PATCHES + config.prefix)
    weights = (
        config.blocks * (4 * config.width**2 + 2 * config.width * config.inner) + 3 * config.patch**2 * config.width
    )
    flops = 6.0 * tokens * weights + 12.0 * config.blocks * tokens * MOST_PATCHES * config.width
    if stage == "words":
        frozen = sum(p.numel() for p in language.parameters())
        flops += 4.0 * rows * LENGTH * frozen
    return 1000 * flops / _rate(device)


def _rate(device: str) -> float:
    """Operations a second, of BF16 matrices on a GPU."""
    cuda = device.startswith("cuda")
    side = 8192 if cuda else 512
    one = torch.ones(side, side, dtype=torch.bfloat16 if cuda else torch.float32, device=device)
    seconds = []
    for _ in range(4):
        if cuda:
            torch.cuda.synchronize()
        began = time.monotonic()
        one @ one
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return 2.0 * side**3 / min(seconds)
