"""The loop: steps of one stage, for some minutes, from where the last run ended. Owns state.pt and loss.csv of a run.

    state.pt   stage, steps, position in the rows, weights, moments; replaced at once, a kill loses minutes at most
    loss.csv   a line every few steps

A run ends at a step where scales are looked for anew, so that one that is resumed takes the very same steps.
"""

import csv
import math
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from services.engine.model_config import ModelConfig, read_config
from services.tools.train_demo import documents
from services.tools.train_demo.documents import Batch, Position, Rows
from services.tools.train_demo.export import load
from services.tools.train_demo.fused import Fused
from services.tools.train_demo.network import Network
from services.tools.train_demo.rehearsal import rehearsed
from services.tools.train_demo.rounding import Rounding
from services.tools.train_demo.shapes import MIXTURE, STAGES, Recipe

PERIOD = 16  # steps between two searches for scales; runs end at multiples of it
TIMED_STEPS = 3 * PERIOD  # after which the length of a stage is worked out from its minutes
SAVE_S = 150.0
KEPT = ("gate.weight", "conv1d.weight")  # no weight decay: too few to know anything by heart
COLUMNS = ("stage", "step", "tokens", "loss", "draft_loss", "rate", "load_max_over_mean", "zeros", "seconds")


class TrainingError(Exception):
    """A run that cannot go on as asked. The message says what to do."""

    code = "bad_training"


@dataclass
class Progress:
    """`steps` of `stage` that are done, of `planned`; None until that is known."""

    stage: str
    steps: int = 0
    planned: int | None = None
    tokens: int = 0  # of all stages
    first: str = STAGES[0]  # where this run began


@dataclass(frozen=True)
class Losses:
    """Of the model and of its draft block; tokens per expert by layer's name; means over layers of what was watched."""

    model: Tensor
    draft: Tensor
    loads: dict[str, Tensor]
    sparsity: Tensor
    zeros: Tensor


class Training:
    def __init__(self, run: Path, recipe: Recipe, device: str, say: Callable[[str], None]) -> None:
        """Raises TrainingError if the folder was not prepared."""
        for name in ("config.json", "documents"):
            if not (run / name).exists():
                raise TrainingError(f"{run}: holds no {name}; run `thimble train-demo prepare` first")
        self.run_folder, self.recipe, self.device, self.say = run, recipe, device, say
        self.half = device.startswith("cuda")  # matrix products in BF16
        self.network = Network(ModelConfig.from_hf(read_config(run))).to(device)
        decayed = {name: p.dim() > 1 and not name.endswith(KEPT) for name, p in self.network.named_parameters()}
        matrices = [p for name, p in self.network.named_parameters() if decayed[name]]
        others = [p for name, p in self.network.named_parameters() if not decayed[name]]
        self.optimiser = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=device.startswith("cuda"),
        )
        self.progress = Progress(STAGES[0])
        self.position = Position()
        self._sources = documents.load(run / "documents")
        self.fused: Fused | None = None
        if (run / "state.pt").exists():
            self._load()

    def stage(self, stage: str, minutes: float, steps: int | None, stage_minutes: float, sparsity: float = 0.0) -> bool:
        """Train for at most `minutes`; True if the stage is done. `steps` of the whole stage, or else as many as fit
        `stage_minutes` at the speed of its first ones; both are remembered from the run that began it.
        """
        self._enter(stage, steps)
        done = self.progress
        if done.planned is not None and done.steps >= done.planned:
            self.say(f"{stage}: all {done.planned} steps are done")
            return True
        rounding = Rounding() if stage == "quantise" else None
        batches = self._batches(stage)
        if self.half:
            batch, _ = next(batches)
            batches.close()
            self.fused = rehearsed(self, batch, rounding, sparsity > 0)
            batches = self._batches(stage)
        began = saved = timed = time.monotonic()
        first = timed_from = done.steps
        while done.planned is None or done.steps < done.planned:
            if done.steps % PERIOD == 0:
                if rounding is not None:
                    rounding.fresh()
                if time.monotonic() - began > 60 * minutes and done.steps > first:
                    break
                if time.monotonic() - saved > SAVE_S:
                    self.save()
                    saved = time.monotonic()
            if done.planned is None and done.steps >= TIMED_STEPS and done.steps > timed_from:
                self._synchronise()
                a_step = (time.monotonic() - timed) / (done.steps - timed_from)
                done.planned = max(TIMED_STEPS, int(60 * stage_minutes / a_step) // PERIOD * PERIOD)
                self.say(f"{stage}: {1e3 * a_step:.1f} ms a step, {done.planned} steps in {stage_minutes:g} minutes")
                continue
            batch, self.position = next(batches)
            self._step(stage, batch, rounding, sparsity, began)
            if done.steps == PERIOD:
                self._synchronise()
                timed, timed_from = time.monotonic(), done.steps
        batches.close()
        self.save()
        self.say(f"{stage}: {done.steps} of {done.planned} steps")
        return done.planned is not None and done.steps >= done.planned

    def begin_from(self, checkpoint: Path, stage: str) -> None:
        """A new run whose weights are those of a checkpoint that was exported, and whose first stage is `stage`.

        Raises TrainingError if the run has begun, CheckpointError if the checkpoint is another model's.
        """
        if (self.run_folder / "state.pt").exists():
            raise TrainingError(f"{self.run_folder}: has begun already; go on with it without --from")
        load(self.network, checkpoint)
        self.progress = Progress(stage, first=stage)

    def losses(
        self,
        batch: Batch,
        rounding: Rounding | None,
        watch: bool = False,
        sparsity: bool = False,
        drop: float = 0.0,
    ) -> "Losses":
        """Sparsity and zeros are 0 unless watched, or fused; then sparsity is 0 unless wanted."""
        ids, targets, places = (
            torch.from_numpy(t).to(self.device, non_blocking=True) for t in (batch.ids, batch.targets, batch.documents)
        )
        nobody = torch.full_like(targets[:, :1], documents.NOT_SCORED)
        after = torch.where(places[:, :-1] == places[:, 1:], targets[:, 1:], documents.NOT_SCORED)
        after = torch.cat((after, nobody), dim=1)
        with torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.half):
            hidden, run = self.network(ids, places, rounding, watch, self.fused, sparsity, drop)
            states = self.network.draft(hidden, ids, run)
            loss, draft = self._loss(hidden, targets, rounding, False), self._loss(states, after, rounding, True)
        nothing = loss.new_zeros(())
        dense = torch.stack(run.sparsity).mean() if run.sparsity else nothing
        zeros = torch.stack(run.zeros).mean() if run.zeros else nothing
        return Losses(loss, draft, run.loads, dense, zeros)

    def _loss(self, states: Tensor, targets: Tensor, rounding: Rounding | None, of_draft: bool) -> Tensor:
        weight = self.network.lm_head.value(rounding)
        weight = weight.detach() if of_draft else weight
        if self.fused is not None and self.fused.head is not None:
            return self.fused.head(states, weight, targets, self.fused.kind)
        kept = targets != documents.NOT_SCORED
        return cross_entropy(linear(states[kept], weight).float(), targets[kept])

    def save(self) -> None:
        whole = {
            "progress": asdict(self.progress),
            "position": asdict(self.position),
            "network": self.network.state_dict(),
            "optimiser": self.optimiser.state_dict(),
        }
        part = self.run_folder / "state.part"
        torch.save(whole, part)
        os.replace(part, self.run_folder / "state.pt")

    def _load(self) -> None:
        whole = torch.load(self.run_folder / "state.pt", map_location=self.device, weights_only=True)
        self.network.load_state_dict(whole["network"])
        self.optimiser.load_state_dict(whole["optimiser"])
        self.progress, self.position = Progress(**whole["progress"]), Position(**whole["position"])

    def _enter(self, stage: str, steps: int | None) -> None:
        now = self.progress
        if now.stage == stage:
            now.planned = steps if now.planned is None else now.planned
            return
        if STAGES.index(stage) < STAGES.index(now.stage):
            raise TrainingError(f"{stage}: this run is in {now.stage} already; go on with that")
        if now.planned is None or now.steps < now.planned:
            raise TrainingError(f"{stage}: {now.stage} is not done ({now.steps} of {now.planned} steps); finish it")
        self.progress, self.position = Progress(stage, 0, steps, now.tokens, now.first), Position()

    def _batches(self, stage: str) -> Generator[tuple[Batch, Position], None, None]:
        """Each with the position behind it; the next one is made meanwhile."""
        shares = {name: share for name, share in MIXTURE[stage].items() if name in self._sources}
        if missing := MIXTURE[stage].keys() - shares.keys():
            self.say(f"{stage}: no documents of {', '.join(sorted(missing))}")
        seed = MIXTURE["seed"] + STAGES.index(stage)
        rows = Rows(self._sources, shares, self.recipe.tokens, self.recipe.rows, seed)

        def following(position: Position) -> tuple[Batch, Position]:
            position = deepcopy(position)
            return rows.batch(position), position

        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(following, self.position)
            while True:
                batch, position = coming.result()
                coming = pool.submit(following, position)
                yield batch, position

    def _step(self, stage: str, batch: Batch, rounding: Rounding | None, sparsity: float, began: float) -> None:
        done, recipe = self.progress, self.recipe
        told = done.steps % PERIOD == 0
        rate = self._rate(stage)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        # What is dropped depends on the step alone, so that a run that goes on drops the same.
        torch.manual_seed(MIXTURE["seed"] + 1_000_000 * STAGES.index(stage) + done.steps)
        found = self.losses(batch, rounding, told or sparsity > 0, sparsity > 0, recipe.drop[STAGES.index(stage)])
        self.optimiser.zero_grad(set_to_none=True)
        (found.model + recipe.draft_weight * found.draft + sparsity * found.sparsity).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip)
        self.optimiser.step()
        busiest = self.balance(found.loads, recipe.balance[stage])
        done.steps += 1
        done.tokens += int(batch.ids.size)
        if told:
            values = (
                float(found.model.detach()),
                float(found.draft.detach()),
                rate,
                float(busiest),
                float(found.zeros),
            )
            self._tell(
                (done.stage, done.steps, done.tokens, *(f"{v:.6g}" for v in values), f"{time.monotonic() - began:.1f}")
            )
            if not math.isfinite(values[0]):
                raise TrainingError(f"{stage}, step {done.steps}: the loss is {values[0]}; state.pt is from before")

    @torch.no_grad()
    def balance(self, loads: dict[str, Tensor], amount: float) -> Tensor:
        """Experts with fewer tokens than the mean become likelier, others less; no gradient is involved.

        Returns the busiest expert's load over the mean, the largest of all layers.
        """
        shares = []
        for mixture in self.network.mixtures():
            load = loads[mixture.name].float()
            mixture.gate.e_score_correction_bias += amount * torch.sign(load.mean() - load)
            shares.append(load.max() / load.mean())
        return torch.stack(shares).max()

    def _rate(self, stage: str) -> float:
        begin, end = self.recipe.rates[stage]
        done = self.progress
        share = min(1.0, done.steps / done.planned) if done.planned else 0.0
        rate = end + (begin - end) * (1 + math.cos(math.pi * share)) / 2
        warm = min(1.0, (done.steps + 1) / self.recipe.warm_up_steps) if stage == done.first else 1.0
        return rate * warm

    def _tell(self, line: tuple[object, ...]) -> None:
        path = self.run_folder / "loss.csv"
        new = not path.exists()
        with path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, lineterminator="\n")
            if new:
                rows.writerow(COLUMNS)
            rows.writerow(line)
        if self.progress.steps % (20 * PERIOD) == 1:
            self.say("  ".join(f"{name} {value}" for name, value in zip(COLUMNS, line, strict=True)))

    def _synchronise(self) -> None:
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()
