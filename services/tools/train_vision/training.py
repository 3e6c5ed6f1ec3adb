"""Two steps: first the tower learns to tell what is drawn, with plain classifiers on top; then the projector, and the
tower with it, learns to say it to the frozen language model, which is transformers' with the demo's own weights.

Owns the loops, not the pictures and not the network.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from services.api.model_folder import load_model_folder
from services.api.pictures import PLACE
from services.api.shown import TOKEN, Shown
from services.engine.vision.preprocess import patches
from services.tools import oracle
from services.tools.train_vision.drawings import COLOURS, DIGITS, HELD_OUT, KINDS, MOST, SHAPES, Drawing, drawing
from services.tools.train_vision.network import Network

SIZES = (len(COLOURS), len(SHAPES), MOST, *(10,) * DIGITS)
IGNORED = -100
Say = Callable[[str], None]


@dataclass(frozen=True)
class Batch:
    """Of `n` drawings: patches [n, patches, values], labels [n, 7], ids and targets [n, longest]."""

    patches: Tensor
    labels: Tensor
    ids: Tensor
    targets: Tensor


class Prompts:
    """Drawings as the served model reads them: the demo's template and tokenizer, each picture `tokens` long."""

    def __init__(self, checkpoint: Path, tokens: int) -> None:
        self._folder = load_model_folder(checkpoint)
        self._shown = [Shown(b"", tokens)]
        self.picture_id = self._folder.tokenizer.added[TOKEN].id

    def ids(self, drawn: Drawing) -> tuple[list[int], list[int]]:
        """Of the prompt, and of the answer with the id that ends it."""
        message = {"role": "user", "content": f"{PLACE}\n{drawn.question}"}
        prompt = self._folder.template.prompt([message], None, {"enable_thinking": False}, self._shown)
        encode = self._folder.tokenizer.encode
        return encode(prompt.text), [*encode(drawn.answer), self._folder.defaults.stop_ids[-1]]


class Drawings(IterableDataset[Batch]):
    """Batches without end, each worker's own."""

    def __init__(self, checkpoint: Path, network: Network, size: int, first_seed: int) -> None:
        config = network.config
        self._checkpoint, self._config, self._grid = checkpoint, config, (network.side, network.side)
        self._size, self._first = size, first_seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        prompts = Prompts(self._checkpoint, self._grid[0] * self._grid[1] // 4)
        torch.set_num_threads(1)
        start = self._first + number * self._size
        while True:
            yield self.batch([drawing(seed) for seed in range(start, start + self._size)], prompts)
            start += count * self._size

    def batch(self, drawn: list[Drawing], prompts: Prompts) -> Batch:
        config = self._config
        pixels = [torch.from_numpy(np.array(one.image)) for one in drawn]
        cut = torch.stack([patches(one, self._grid, config.patch, config.mean, config.std) for one in pixels])
        texts = [prompts.ids(one) for one in drawn]
        longest = max(len(prompt) + len(answer) for prompt, answer in texts)
        ids = torch.zeros(len(drawn), longest, dtype=torch.long)
        targets = torch.full_like(ids, IGNORED)
        for row, (prompt, answer) in enumerate(texts):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            targets[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
        return Batch(cut, torch.tensor([one.labels for one in drawn]), ids, targets)


class Training:
    """`minutes` are split among the two steps: a third, two thirds."""

    def __init__(self, checkpoint: Path, network: Network, device: str, batch: int, workers: int, say: Say) -> None:
        self.network = network.to(device)
        self._precision = torch.bfloat16 if device.startswith("cuda") else torch.float32
        self.language: Any = oracle.load(checkpoint).to(device, self._precision)
        self._device, self._say = device, say
        self._checkpoint, self._batch, self._workers = checkpoint, batch, workers
        tokens = network.side**2 // 4
        self._classifier = nn.Sequential(
            nn.Linear(4 * network.config.width, 64), nn.ReLU(), nn.Flatten(), nn.Linear(64 * tokens, sum(SIZES))
        ).to(device)
        self._picture_id = Prompts(checkpoint, 1).picture_id

    def run(self, minutes: float) -> None:
        torch.set_float32_matmul_precision("high")
        batches = iter(self._batches(0))
        tower = [*self.network.parameters(), *self._classifier.parameters()]
        self._loop("tower", tower, 1e-3, 20 * minutes, lambda batch: self._labels_loss(batch), batches)
        self._loop(
            "projector",
            [*self.network.parameters()],
            5e-4,
            40 * minutes,
            lambda batch: self._words_loss(batch),
            batches,
        )

    @torch.no_grad()
    def score(self, batches: int) -> dict[str, tuple[int, int]]:
        """Of held-out drawings, by kind: how many are answered right, every token the likeliest one, and how many."""
        held_out = iter(self._batches(HELD_OUT))
        found: dict[str, tuple[int, int]] = dict.fromkeys(KINDS, (0, 0))
        for number in range(batches):
            batch = self._moved(next(held_out))
            said, wanted = self._logits(batch).argmax(-1), batch.targets
            right = ((said == wanted) | (wanted == IGNORED)).all(1).tolist()
            first = HELD_OUT + number * self._batch
            for kind, is_right in zip((drawing(first + row).kind for row in range(self._batch)), right, strict=True):
                found[kind] = (found[kind][0] + is_right, found[kind][1] + 1)
        return found

    def _loop(
        self,
        name: str,
        parameters: list[nn.Parameter],
        rate: float,
        seconds: float,
        loss_of: Callable[[Batch], Tensor],
        batches: Iterator[Batch],
    ) -> None:
        optimiser = torch.optim.AdamW(parameters, rate, weight_decay=0.02, betas=(0.9, 0.98))
        began = told = time.monotonic()
        steps, recent = 0, 0.0
        while (passed := time.monotonic() - began) < seconds or not steps:
            share = min(1.0, passed / seconds) if seconds else 0.0
            for group in optimiser.param_groups:  # rises over the first steps, falls to nothing by the end
                group["lr"] = rate * min(1.0, (steps + 1) / 100) * (1 - share)
            loss = loss_of(self._moved(next(batches)))
            optimiser.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimiser.step()
            steps += 1
            now = float(loss.detach())
            recent = now if steps == 1 else 0.95 * recent + 0.05 * now
            if time.monotonic() - told > 20:
                told = time.monotonic()
                self._say(f"{name}: {steps} steps, {passed:.0f} of {seconds:.0f} s, loss {recent:.4f}")
        self._say(f"{name}: {steps} steps of {self._batch}, loss {recent:.4f}")

    def _labels_loss(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device.split(":")[0], self._precision, enabled=self._precision != torch.float32):
            found = self._classifier(self.network.features(batch.patches)).float().split(SIZES, dim=1)
        losses = [
            cross_entropy(one, batch.labels[:, i], ignore_index=-1, reduction="sum") for i, one in enumerate(found)
        ]
        return torch.stack(losses).sum() / len(batch.labels)

    def _words_loss(self, batch: Batch) -> Tensor:
        return cross_entropy(self._logits(batch).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORED)

    def _logits(self, batch: Batch) -> Tensor:
        with torch.autocast(self._device.split(":")[0], self._precision, enabled=self._precision != torch.float32):
            features = self.network.features(batch.patches)
        rows = self.network.embeddings(features.float())
        words = self.language.get_input_embeddings()(batch.ids)
        words = words.masked_scatter((batch.ids == self._picture_id)[..., None], rows.to(words.dtype))
        logits: Tensor = self.language(inputs_embeds=words, use_cache=False).logits
        return logits.float()

    def _batches(self, first_seed: int) -> DataLoader[Batch]:
        drawings = Drawings(self._checkpoint, self.network, self._batch, first_seed)
        return DataLoader(drawings, batch_size=None, num_workers=self._workers)

    def _moved(self, batch: Batch) -> Batch:
        return Batch(*(getattr(batch, name).to(self._device) for name in ("patches", "labels", "ids", "targets")))
