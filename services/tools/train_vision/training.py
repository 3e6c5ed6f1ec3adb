"""Two stages: first the tower learns to tell what is drawn and where, with plain heads on top; then the projector, and
the tower with it, learns to say it to the frozen language model. Lessons go from easy to hard in both.

Owns the loops and the file that a run goes on from, not the pictures and not the network.
"""

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from services.tools.train_vision import scoring
from services.tools.train_vision.batches import IGNORED, MOST_SAID, Batch, Drawings, Prompts, loader
from services.tools.train_vision.captured import Captured, CaptureError, Step
from services.tools.train_vision.labels import Head
from services.tools.train_vision.language import Language
from services.tools.train_vision.lessons import LESSONS, weights
from services.tools.train_vision.network import Network
from services.tools.train_vision.pool import Feed, Pool
from services.tools.train_vision.stopwatch import Clock, Stopwatch, floor_ms

RATES = {"tower": (1e-3, 0.0, 1e-3), "words": (4e-4, 1.2e-3, 4e-4)}  # of tower, projector, head
WARM_RATE = 7e-4  # alone, of a tower that sees already: what is anew must not undo what it knows
WARM_SOONER = 2.0  # its lessons before the language model, where the projector is anew; alone all begin at once
RISING_STEPS, WARM_RISING_STEPS = 200, 800  # of rates, the second of a tower's that sees already
LABELS_WEIGHT = 0.05  # of the head's loss beside the words'
CHUNK = 32  # drawings that come at once
LEAST = 512  # drawings that there must be before any is learnt from
KNOWN_STEPS = 40  # between two looks at what is known
SAVE_S, TELL_S = 45.0, 10.0
LONGEST_STEP_S, LONGEST_COMPILING_S = 3.0, 120.0  # on a GPU; more is no time of the run: it was stopped
ALIKE = 0.3  # cosine of gradients as a graph and without: other grain on the pictures, but the same pictures
Say = Callable[[str], None]
Told = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class TeachingError(Exception):
    """A run that cannot go on as asked. The message says what to do."""

    code = "bad_teaching"


@dataclass(frozen=True)
class Options:
    """`batch` pictures a step for the tower alone, `words` before the language model; drawn by `workers` processes,
    `pool` of them kept to learn from. `compiled`: as compiled functions, where those give the same; `graph`: then as
    CUDA graphs. `warm`: the tower sees already. `alone`: its share of the minutes before there is a language model."""

    device: str
    batch: int
    words: int
    workers: int
    pool: int
    compiled: bool
    graph: bool = False
    warm: bool = False
    alone: float = 0.5


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
        self._optimiser = torch.optim.AdamW(
            groups, 1e-3, weight_decay=0.02, betas=(0.9, 0.98), fused=self._half, capturable=self._half
        )
        self._own_rates()
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
            for stage, share in (("tower", self._options.alone), ("words", 1 - self._options.alone)):
                self._loop(stage, 60 * minutes * share, feed, pool, state)
        finally:
            feed.close()

    @torch.no_grad()
    def score(self, rounds: int, rows: int = scoring.ROWS) -> tuple[scoring.Counted, scoring.Counted]:
        """Of held-out pictures, by examination and topic: how many are right, and how many were asked."""
        held_out = scoring.HeldOut(self._prompts, self.network.config, rounds, rows)
        right, asked = scoring.Counted(), scoring.Counted()
        for batch, topics in scoring.batches(held_out, min(self._options.workers, len(held_out))):
            batch = batch.to(self._device)
            with self._autocast():
                features = self.network.padded(batch.patches, batch.grids)
            is_right = self._words(batch, features)[1].tolist()
            for topic, so in zip(topics, is_right, strict=True):
                asked[topic] += 1
                right[topic] += so
        return right, asked

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
        clock = Clock(LONGEST_STEP_S if self._half else math.inf)
        rows = self._options.batch if stage == "tower" else self._options.words
        known, all_alike = [0.0] * len(LESSONS), [1.0] * len(LESSONS)
        step: Step = partial(self._step, stage=stage)
        if self._options.compiled:
            self._compile(pool.take(rows, all_alike), stage)
        if self._options.graph:
            with feed.pinning:
                step = self._capture(pool.take(rows, all_alike), step, stage)
        # With that: none of it is for easy lessons and large steps.
        lost = min(clock.tick(LONGEST_COMPILING_S), 0.9 * seconds)
        told = saved = time.monotonic()
        sooner = 1.0 if not self._options.warm else WARM_SOONER if stage == "words" else math.inf
        tallies = torch.zeros(2, len(LESSONS), device=self._device)
        steps, recent, since, drawn = 0, 0.0, (0, time.monotonic()), pool.drawn
        floor = floor_ms(self.network.config, self.language, rows, stage, self._device)
        self._say(f"{stage}: {floor:.1f} ms a step would be its products alone")
        while (passed := before + clock.tick()) < seconds or not steps:
            part = min(1.0, max(1e-6, (passed - lost) / (seconds - lost))) if seconds else 0.0
            self._set_rates(stage, steps, part)
            watch.start(steps % 50 == 49)
            self._draw(feed, pool, wait=self._options.workers == 0 and steps % 2 == 0)
            watch.mark("draw")
            batch = pool.take(rows, weights(known, part, sooner if part else 1.0))
            watch.mark("take")
            loss, right = step(batch)
            watch.mark("step")
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
            in_words, right = self._words(batch, features)
            loss = in_words + LABELS_WEIGHT * loss
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
        ids = batch.ids.long()
        places, targets = said(batch.targets.long())
        with self._autocast():
            rows = self.network.embeddings(features).float()
            at = ids == self._prompts.picture_id
            which = (at.cumsum(1) - 1).clamp(min=0)[..., None].expand(-1, -1, rows.shape[2])
            x = torch.where(at[..., None], rows.gather(1, which), self.language.words(ids))
            found = self.language(x, places)
        loss = cross_entropy(found.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
        return loss, ((found.detach().argmax(-1) == targets) | (targets == IGNORED)).all(1)

    def _own_rates(self) -> None:
        """Each group's rate is a number on the GPU, which a graph reads anew each time."""
        for group in self._optimiser.param_groups:
            group["lr"] = torch.zeros((), device=self._device) if self._half else 0.0

    def _set_rates(self, stage: str, steps: int, part: float) -> None:
        """Up with the first steps, and with the stage's time to nothing."""
        tower, *others = RATES[stage]
        rising = RISING_STEPS
        if self._options.warm:
            tower, rising = min(tower, WARM_RATE), WARM_RISING_STEPS
        falling = 0.5 * (1 + math.cos(math.pi * part))
        risings = (rising, RISING_STEPS, RISING_STEPS)
        for group, rate, rises in zip(self._optimiser.param_groups, (tower, *others), risings, strict=True):
            now = rate * min(1.0, (steps + 1) / rises) * falling
            group["lr"] = group["lr"].fill_(now) if self._half else now

    def _capture(self, batch: Batch, step: Step, stage: str) -> Step:
        """The step as a CUDA graph. Raises CaptureError where it is none, or does not give the same."""
        began = time.monotonic()
        self._watch.start(False)
        self._own_rates()  # 0: nothing is learnt from this one batch
        wanted, before = self._learnt(step, batch)
        captured = Captured(step, batch)
        found, after = self._learnt(captured, batch)
        alike = float(torch.cosine_similarity(before, after, dim=0))
        losses = f"loss {found:.3f} for {wanted:.3f}"
        self._say(f"{stage}: a CUDA graph after {time.monotonic() - began:.0f} s, gradients {alike:.3f}, {losses}")
        if not (alike > ALIKE and abs(found - wanted) < 0.2 * wanted):
            raise CaptureError(f"{stage}: the step as a CUDA graph is not the step; go on with --no-graph")
        return captured

    def _learnt(self, step: Step, batch: Batch) -> tuple[float, Tensor]:
        loss = float(step(batch)[0])
        parameters = [p for group in self._optimiser.param_groups for p in group["params"]]
        return loss, torch.cat([p.grad.detach().flatten().clone() for p in parameters if p.grad is not None])

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
        self._own_rates()
        self.progress = replace(Progress(), **whole["progress"])
        self._say(f"{state}: goes on from there: {self.progress}")


def said(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of targets [rows, ids], IGNORED where nothing is wanted: the first MOST_SAID places where something is, and what,
    both int64 [rows, MOST_SAID]; IGNORED where there are fewer. A mask would have a size that the GPU alone knows."""
    wanted = targets != IGNORED
    order = wanted.cumsum(1) - 1
    slots = torch.where(wanted & (order < MOST_SAID), order, MOST_SAID)  # the last one is for all others
    numbers = torch.arange(targets.shape[1], device=targets.device).expand_as(targets)
    room = (len(targets), MOST_SAID + 1)
    places = torch.zeros(room, dtype=torch.int64, device=targets.device).scatter_(1, slots, numbers)
    found = torch.full(room, IGNORED, device=targets.device).scatter_(1, slots, targets)
    return places[:, :MOST_SAID], found[:, :MOST_SAID]
