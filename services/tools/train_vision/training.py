"""Two stages: first the tower learns to tell what is drawn, with a plain head on top; then the projector, and the tower
with it, learns to say it to the frozen language model.

Owns the loops and the file that a run goes on from, not the pictures and not the network.
"""

import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from services.tools.train_vision.batches import IGNORED, Batch, Drawings, Prompts, loader
from services.tools.train_vision.labels import Head
from services.tools.train_vision.language import Language
from services.tools.train_vision.network import Network
from services.tools.train_vision.scenes import TOPICS

TOWER_SHARE = 0.4  # of the minutes
RATES = {"tower": 1e-3, "projector": 6e-4}
LABELS_WEIGHT = 0.2  # of the head's loss beside the words'
TOWER_USES = 3  # of each drawing in the first stage: a GPU is faster than the processors that draw
KEPT_BATCHES = 32  # for that
SAVE_S = 45.0
Say = Callable[[str], None]


class TeachingError(Exception):
    """A run that cannot go on as asked. The message says what to do."""

    code = "bad_teaching"


@dataclass
class Progress:
    """Seconds and steps of each stage that are done, and batches drawn."""

    tower_s: float = 0.0
    projector_s: float = 0.0
    steps: int = 0
    batches: int = 0


class Training:
    def __init__(
        self, language: Language, prompts: Prompts, network: Network, device: str, batch: int, workers: int, say: Say
    ) -> None:
        """All of it on `device`; `batch` drawings a step, drawn by so many processes."""
        self.network, self.language = network.to(device), language.to(device)
        self.head = Head(4 * network.config.width).to(device)
        self._half = device.startswith("cuda")  # matrix products in BF16
        self._device, self._say = device, say
        self._prompts, self._batch, self._workers = prompts, batch, workers
        everything = [*self.network.parameters(), *self.head.parameters()]
        self._optimiser = torch.optim.AdamW(everything, 1e-3, weight_decay=0.02, betas=(0.9, 0.98), fused=self._half)
        self.progress = Progress()

    def run(self, minutes: float, state: Path) -> None:
        """Goes on from `state`, if that is there, and keeps it up to date. Raises TeachingError if it is another's."""
        torch.set_float32_matmul_precision("high")
        if state.exists():
            self._load(state)
        batches = iter(loader(self._drawings(self.progress.batches, held_out=False), self._workers))
        for stage, share in (("tower", TOWER_SHARE), ("projector", 1 - TOWER_SHARE)):
            self._loop(stage, 60 * minutes * share, batches, state)

    @torch.no_grad()
    def score(self, batches: int) -> dict[str, tuple[int, int]]:
        """Of held-out drawings, by topic: how many are answered right, every token the likeliest one, and how many."""
        held_out = iter(loader(self._drawings(0, held_out=True), min(self._workers, batches)))
        found: dict[str, tuple[int, int]] = dict.fromkeys(TOPICS, (0, 0))
        for _ in range(batches):
            batch = next(held_out).to(self._device)
            asked = batch.targets != IGNORED
            wrong = torch.zeros_like(asked)
            wrong[asked] = self._logits(batch)[0].argmax(-1) != batch.targets[asked]
            for topic, is_wrong in zip(batch.topics, wrong.any(1).tolist(), strict=True):
                found[topic] = (found[topic][0] + (not is_wrong), found[topic][1] + 1)
        return found

    def _loop(self, stage: str, seconds: float, batches: Iterator[Batch], state: Path) -> None:
        kept: deque[Batch] = deque(maxlen=KEPT_BATCHES)
        done = self.progress
        before = done.tower_s if stage == "tower" else done.projector_s
        if before >= seconds > 0:
            return
        if stage == "projector" and self._half:
            self.language.compile_layers(self.language.words(next(batches).to(self._device).ids), self._say)
        began = told = saved = time.monotonic()
        steps, recent, waited = 0, 0.0, 0.0
        while (passed := before + time.monotonic() - began) < seconds or not steps:
            share = min(1.0, passed / seconds) if seconds else 0.0
            for group in self._optimiser.param_groups:  # rises over the first steps, falls to nothing by the end
                group["lr"] = RATES[stage] * min(1.0, (steps + 1) / 200) * (1 - share)
            if stage == "tower" and steps % TOWER_USES:
                batch = random.choice(kept)
            else:
                asked = time.monotonic()
                batch = next(batches).to(self._device)
                waited += time.monotonic() - asked
                done.batches += 1
                kept.append(batch)
            now = self._step(self._labels_loss(batch) if stage == "tower" else self._words_loss(batch))
            steps += 1
            if steps % 25 == 1:  # asking waits for the GPU
                recent = float(now) if steps == 1 else 0.7 * recent + 0.3 * float(now)
            done.steps += 1
            setattr(done, f"{stage}_s", passed)
            if time.monotonic() - told > 15:
                told = time.monotonic()
                self._say(
                    f"{stage}: {steps} steps, {passed:.0f} of {seconds:.0f} s, loss {recent:.4f}, waited {waited:.0f} s"
                )
            if time.monotonic() - saved > SAVE_S:
                self._save(state)
                saved = time.monotonic()
        setattr(done, f"{stage}_s", max(seconds, 1e-9))
        self._save(state)
        self._say(f"{stage}: {steps} steps of {self._batch}, loss {recent:.4f}, waited {waited:.0f} s for drawings")

    def _step(self, loss: Tensor) -> Tensor:
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_([p for group in self._optimiser.param_groups for p in group["params"]], 1.0)
        self._optimiser.step()
        return loss.detach()

    def _labels_loss(self, batch: Batch) -> Tensor:
        with self._autocast():
            return self.head.loss(self._features(batch), batch.labels)

    def _words_loss(self, batch: Batch) -> Tensor:
        found, features = self._logits(batch)
        loss = cross_entropy(found, batch.targets[batch.targets != IGNORED])
        with self._autocast():
            return loss + LABELS_WEIGHT * self.head.loss(features, batch.labels)

    def _logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of the places where something is wanted, one after another; and the features."""
        with self._autocast():
            features = self._features(batch)
            rows = self.network.embeddings(features)
            words = self.language.words(batch.ids)
            at = (batch.ids == self._prompts.picture_id)[..., None]
            return self.language(words.masked_scatter(at, rows.float()), batch.targets != IGNORED), features

    def _features(self, batch: Batch) -> Tensor:
        return self.network.features(self.network.patches(batch.pixels), batch.grid)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.split(":")[0], torch.bfloat16, enabled=self._half)

    def _drawings(self, first: int, held_out: bool) -> Drawings:
        return Drawings(self._prompts, self.network.config, self._batch, first, held_out)

    def _save(self, state: Path) -> None:
        whole = {
            "progress": asdict(self.progress),
            "config": self.network.config.to_json(),
            "network": self.network.state_dict(),
            "head": self.head.state_dict(),
            "optimiser": self._optimiser.state_dict(),
        }
        part = state.with_name(state.name + ".part")
        torch.save(whole, part)
        os.replace(part, state)

    def _load(self, state: Path) -> None:
        whole = torch.load(state, map_location=self._device, weights_only=True)
        if whole["config"] != self.network.config.to_json():
            raise TeachingError(f"{state}: of another tower; give its options, or remove the file to start anew")
        self.network.load_state_dict(whole["network"])
        self.head.load_state_dict(whole["head"])
        self._optimiser.load_state_dict(whole["optimiser"])
        self.progress = Progress(**whole["progress"])
        self._say(f"{state}: goes on from there: {self.progress}")
