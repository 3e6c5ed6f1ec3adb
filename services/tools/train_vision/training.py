"""Two stages: first the tower learns to tell what is drawn and where, with plain heads on top; then the projector, and
the tower with it, learns to say it to the frozen language model. Lessons go from easy to hard in both.

Owns the loops and the file that a run goes on from, not the pictures and not the network.
"""

import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from services.tools.train_vision import scoring
from services.tools.train_vision.batches import IGNORED, Batch, Drawings, Prompts, loader
from services.tools.train_vision.labels import Head
from services.tools.train_vision.language import Language
from services.tools.train_vision.lessons import LESSONS, weights
from services.tools.train_vision.network import Network
from services.tools.train_vision.pool import Feed, Pool
from services.tools.train_vision.stopwatch import Stopwatch, floor_ms

STAGES = {"tower": 0.5, "words": 0.5}  # of the minutes
RATES = {"tower": (1e-3, 0.0, 1e-3), "words": (4e-4, 1.2e-3, 4e-4)}  # of tower, projector, head
LABELS_WEIGHT = 0.05  # of the head's loss beside the words'
CHUNK = 32  # drawings that come at once
LEAST = 512  # drawings that there must be before any is learnt from
KNOWN_STEPS = 40  # between two looks at what is known
SAVE_S, TELL_S = 45.0, 10.0
Say = Callable[[str], None]
Told = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class TeachingError(Exception):
    """A run that cannot go on as asked. The message says what to do."""

    code = "bad_teaching"


@dataclass(frozen=True)
class Options:
    """`batch` pictures a step for the tower alone, `words` before the language model; drawn by `workers` processes,
    `pool` of them kept to learn from. `compiled`: as compiled functions, where those give the same."""

    device: str
    batch: int
    words: int
    workers: int
    pool: int
    compiled: bool


@dataclass
class Progress:
    """Seconds of each stage and steps that are done, and batches drawn."""

    tower_s: float = 0.0
    words_s: float = 0.0
    steps: int = 0
    batches: int = 0


class Training:
    def __init__(self, language: Language, prompts: Prompts, network: Network, options: Options, say: Say) -> None:
        """All of it on the options' device."""
        self._device, self._options, self._say, self._prompts = options.device, options, say, prompts
        self.network, self.language = network, language.to(options.device)
        network.prepare()
        network.to(options.device)
        self.head = Head(4 * network.config.width).to(options.device)
        self._half = options.device.startswith("cuda")  # matrix products in BF16
        projector = [p for name, p in network.named_parameters() if name.startswith("projector")]
        tower = [p for name, p in network.named_parameters() if not name.startswith("projector")]
        groups = [{"params": part} for part in (tower, projector, list(self.head.parameters()))]
        self._optimiser = torch.optim.AdamW(groups, 1e-3, weight_decay=0.02, betas=(0.9, 0.98), fused=self._half)
        self.progress = Progress()
        self._tell: Told = self.tell
        self._watch = Stopwatch(options.device)

    def run(self, minutes: float, state: Path) -> None:
        """Goes on from `state`, if that is there, and keeps it up to date. Raises TeachingError if it is another's."""
        torch.set_float32_matmul_precision("high")
        torch.backends.cuda.enable_cudnn_sdp(False)  # the others take masks of any kind
        if state.exists():
            self._load(state)
        drawings = Drawings(self._prompts, self.network.config, CHUNK, self.progress.batches)
        feed = Feed(loader(drawings, self._options.workers), self._half)
        pool = Pool(self._options.pool, self._device)
        try:
            began = time.monotonic()
            while pool.drawn < min(LEAST, self._options.pool):
                self._draw(feed, pool, wait=True)
            self._say(f"{pool.drawn} drawings after {time.monotonic() - began:.0f} s")
            for stage, share in STAGES.items():
                self._loop(stage, 60 * minutes * share, feed, pool, state)
        finally:
            feed.close()

    @torch.no_grad()
    def score(self, rounds: int, rows: int = scoring.ROWS) -> list[str]:
        """Held-out pictures, by examination and topic, as lines of text."""
        held_out = scoring.HeldOut(self._prompts, self.network.config, rounds, rows)
        right, asked = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for batch, topics in scoring.batches(held_out, min(self._options.workers, len(held_out))):
            batch = batch.to(self._device)
            with self._autocast():
                features = self.network.padded(batch.patches, batch.grids)
            is_right = self._words(batch, features)[1].tolist()
            for topic, so in zip(topics, is_right, strict=True):
                asked[topic] += 1
                right[topic] += so
        return list(scoring.lines(right, asked))

    def tell(self, patches: Tensor, grids: Tensor, labels: Tensor, on_patches: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features, the head's loss, and for each picture whether the head tells all of it; see `Batch`. Pictures are
        seen a little lighter or darker, tinted and with grain, every second one."""
        count = len(patches)
        changed = torch.rand(count, 1, 1, device=patches.device) < 0.5
        tint = 1 + 0.04 * torch.randn(count, 1, 3, device=patches.device).repeat_interleave(patches.shape[2] // 3, 2)
        grain = torch.randn_like(patches, dtype=torch.float32) * (6 * torch.rand(count, 1, 1, device=patches.device))
        seen = torch.where(changed, patches.float() * tint + grain, patches.float())
        with self._autocast():
            features = self.network.padded(seen, grids)
            real = self.network.real[grids][:, ::4]
            return features, *self.head.losses(features, real, labels, on_patches)

    def _loop(self, stage: str, seconds: float, feed: Feed, pool: Pool, state: Path) -> None:
        done, watch = self.progress, self._watch
        before = getattr(done, f"{stage}_s")
        if before >= seconds > 0:
            return
        began = told = saved = time.monotonic()
        rows = self._options.batch if stage == "tower" else self._options.words
        known = [0.0] * len(LESSONS)
        if self._options.compiled:
            self._compile(pool.take(rows, [1.0] * len(LESSONS)), stage)
        lost = min(time.monotonic() - began, 0.9 * seconds)  # with that: none of it is for easy lessons and large steps
        tallies = torch.zeros(2, len(LESSONS), device=self._device)
        steps, recent, since, drawn = 0, 0.0, (0, time.monotonic()), pool.drawn
        floor = floor_ms(self.network.config, self.language, rows, stage, self._device)
        self._say(f"{stage}: {floor:.1f} ms a step would be its products alone")
        while (passed := before + time.monotonic() - began) < seconds or not steps:
            part = min(1.0, (passed - lost) / (seconds - lost)) if seconds else 0.0
            for group, rate in zip(self._optimiser.param_groups, RATES[stage], strict=True):  # up, and to nothing
                group["lr"] = rate * min(1.0, (steps + 1) / 200) * 0.5 * (1 + math.cos(math.pi * part))
            watch.start(steps % 50 == 49)
            self._draw(feed, pool, wait=self._options.workers == 0 and steps % 2 == 0)
            watch.mark("draw")
            batch = pool.take(rows, weights(known, part))
            watch.mark("take")
            loss, right = self._step(batch, stage)
            tallies[0].index_add_(0, batch.lessons.int(), right.float())
            tallies[1].index_add_(0, batch.lessons.int(), torch.ones_like(right, dtype=torch.float32))
            steps += 1
            done.steps += 1
            setattr(done, f"{stage}_s", passed)
            if steps % KNOWN_STEPS == 0 or steps == 1:  # asking waits for the GPU
                recent = float(loss) if steps == 1 else 0.6 * recent + 0.4 * float(loss)
                known = [0.5 * k + 0.5 * r / n if n else k for k, r, n in zip(known, *tallies.tolist(), strict=True)]
                tallies.zero_()
            now = time.monotonic()
            if now - told > TELL_S:
                each, told = 1000 * (now - since[1]) / max(1, steps - since[0]), now
                rate, drawn = (pool.drawn - drawn) / (now - since[1]), pool.drawn
                since = (steps, now)
                self._say(
                    f"{stage}: {steps} steps, {passed:.0f} of {seconds:.0f} s, loss {recent:.3f}, {each:.1f} ms a step"
                    f" ({watch.told()}), {rate:.0f} drawn/s, each used {pool.taken / max(1, pool.drawn):.1f} times; "
                    + " ".join(f"{lesson.name} {100 * k:.0f}" for lesson, k in zip(LESSONS, known, strict=True))
                )
            if now - saved > SAVE_S:
                self._save(state)
                saved = now
        setattr(done, f"{stage}_s", max(seconds, 1e-9))
        self._save(state)
        self._say(f"{stage}: {steps} steps of {rows}, loss {recent:.3f}, {pool.drawn} drawings")

    def _draw(self, feed: Feed, pool: Pool, wait: bool) -> None:
        """What has been drawn meanwhile, a few batches at most."""
        for _ in range(1 if wait else 6):
            if (found := feed.next(wait)) is None:
                return
            pool.put(found)
            self.progress.batches += 1

    def _step(self, batch: Batch, stage: str) -> tuple[Tensor, Tensor]:
        features, loss, right = self._tell(batch.patches, batch.grids, batch.labels, batch.on_patches)
        if stage == "words":
            said, right = self._words(batch, features)
            loss = said + LABELS_WEIGHT * loss
        self._watch.mark("forward")
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._watch.mark("backward")
        nn.utils.clip_grad_norm_([p for group in self._optimiser.param_groups for p in group["params"]], 1.0)
        self._optimiser.step()
        self._watch.mark("optimiser")
        return loss.detach(), right

    def _words(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of what is said, and for each picture whether every token of it is the likeliest."""
        ids, targets = batch.ids.long(), batch.targets.long()
        wanted = targets != IGNORED
        with self._autocast():
            rows = self.network.embeddings(features).float()
            at = ids == self._prompts.picture_id
            which = (at.cumsum(1) - 1).clamp(min=0)[..., None].expand(-1, -1, rows.shape[2])
            x = torch.where(at[..., None], rows.gather(1, which), self.language.words(ids))
            found = self.language(x, wanted)
        loss = cross_entropy(found, targets[wanted])
        wrong = torch.zeros_like(wanted)
        wrong[wanted] = found.detach().argmax(-1) != targets[wanted]
        return loss, ~wrong.any(1)

    def _compile(self, batch: Batch, stage: str) -> None:
        """Tower and head as one compiled function, if that works and gives nearly the same loss here."""
        began = time.monotonic()
        given = (batch.patches, batch.grids, batch.labels, batch.on_patches)
        compiled: Told = torch.compile(self.tell, dynamic=False)
        try:
            wanted = float(self.tell(*given)[1].detach())
            features, loss, _ = compiled(*given)
            (loss + 0 * features.float().sum()).backward()  # type: ignore[no-untyped-call]
            found = float(loss.detach())
        except Exception as error:  # whatever a compiler may raise
            self._tell, why = self.tell, f"{type(error).__name__}: {str(error)[:300]}"
        else:
            alike = abs(found - wanted) < 0.05 * wanted + 0.05
            self._tell, why = (compiled, "") if alike else (self.tell, f"a loss of {found:.3f}, not {wanted:.3f}")
        self._optimiser.zero_grad(set_to_none=True)
        said = f"not compiled: {why}" if why else "compiled"
        self._say(f"{stage}: tower {said}, {time.monotonic() - began:.0f} s")
        if stage == "words":
            self.language.compile_layers(self.language.words(batch.ids.long()), self._say)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.split(":")[0], torch.bfloat16, enabled=self._half)

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
        self.progress = replace(Progress(), **whole["progress"])
        self._say(f"{state}: goes on from there: {self.progress}")
