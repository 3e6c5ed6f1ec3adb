"""Routing of the full shape, 40 layers of 512 experts of which a token names 22, made up in five ways that differ in
structure. Owns no claim about the real model but the three figures that calibration.py checks.

  calibrated   scores drift: a fixed part, a slow one (the subject) and a fast one (the word)
  zipf         a fixed popularity by rank in each layer, drawn anew for every token; every session reorders some of it
  markov       each expert stays for the next token with a chance of 40 %, else another comes in, by popularity
  dialogs      subjects with experts of their own; prompts of hundreds of tokens, then answers
  scan         the adversary of recency: an answer goes through most experts in a circle, after every prompt
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernels.experts.host.replay import Ids, Routing
from services.tools.traces.guesses import GUESSED_RIGHT, TWO_AHEAD_RIGHT, guesses

Scores = npt.NDArray[np.float32]
Random = np.random.Generator
CHUNK_TOKENS = 64  # of a prompt, in one step; as the engine's setting


@dataclass(frozen=True)
class Sizes:
    layers: int = 40
    experts: int = 512
    top_k: int = 22


FULL = Sizes()


@dataclass(frozen=True)
class Piece:
    """`ids` [tokens, layers, k] of a prompt, or of an answer's tokens one by one."""

    ids: Ids
    prompt: bool = False


def top(scores: Scores, count: int) -> Ids:
    """The `count` highest of the last axis, highest first."""
    chosen = np.argpartition(scores, -count, axis=-1)[..., -count:]
    order = np.argsort(-np.take_along_axis(scores, chosen, -1), axis=-1)
    return np.take_along_axis(chosen, order, -1).astype(np.int32)


def normal(random: Random, *shape: int) -> Scores:
    return random.standard_normal(shape, np.float32)


def gumbel(random: Random, *shape: int) -> Scores:
    """Added to log popularities, the highest k are a draw of k without putting back."""
    return -np.log(np.maximum(random.standard_exponential(shape, np.float32), 1e-30))


def by_rank(random: Random, sizes: Sizes, exponent: float) -> Scores:
    """Log popularities [layers, experts], in an order of its own in each layer."""
    ranks = np.argsort(random.random((sizes.layers, sizes.experts)), axis=1) + 1
    return (-exponent * np.log(ranks)).astype(np.float32)


def drift(random: Random, sizes: Sizes, keeps: float) -> Iterator[Scores]:
    """A stationary normal process [layers, experts], correlated by `keeps` from token to token."""
    now = normal(random, sizes.layers, sizes.experts)
    while True:
        yield now
        now = keeps * now + float(np.sqrt(1 - keeps**2)) * normal(random, sizes.layers, sizes.experts)


def calibrated(random: Random, sizes: Sizes, tokens: int) -> list[Piece]:
    fixed, slow, fast = (
        normal(random, sizes.layers, sizes.experts),
        drift(random, sizes, 0.98),
        drift(random, sizes, 0.33),
    )
    return [Piece(spoken(fixed, slow, fast, sizes, tokens))]


def spoken(fixed: Scores, slow: Iterator[Scores], fast: Iterator[Scores], sizes: Sizes, tokens: int) -> Ids:
    """[tokens, layers, k]. The three weights are what calibration.py's figures were met with."""
    scores = (0.8 * fixed + 0.75 * next(slow) + 0.9 * next(fast) for _ in range(tokens))
    return np.stack([top(score, sizes.top_k) for score in scores])


def zipf(random: Random, sizes: Sizes, tokens: int) -> list[Piece]:
    popularity, pieces = by_rank(random, sizes, 1.0), []
    for begin in range(0, tokens, 100):
        drawn = popularity + gumbel(random, min(100, tokens - begin), sizes.layers, sizes.experts)
        pieces.append(Piece(top(drawn, sizes.top_k)))
        moved = random.choice(sizes.experts, sizes.experts // 7, replace=False)
        popularity[:, moved] = popularity[:, random.permutation(moved)]
    return pieces


def markov(random: Random, sizes: Sizes, tokens: int) -> list[Piece]:
    popularity = by_rank(random, sizes, 0.7)
    found = [top(popularity + gumbel(random, sizes.layers, sizes.experts), sizes.top_k)]
    while len(found) < tokens:
        scores, last = popularity + gumbel(random, sizes.layers, sizes.experts), found[-1].astype(np.int64)
        stays = random.random(last.shape) < 0.4
        np.put_along_axis(scores, last, np.where(stays, np.inf, -np.inf).astype(np.float32), axis=1)
        found.append(top(scores, sizes.top_k))
    return [Piece(np.stack(found))]


def dialogs(random: Random, sizes: Sizes, tokens: int) -> list[Piece]:
    fixed, pieces, answered = normal(random, sizes.layers, sizes.experts), [], 0
    while answered < tokens:
        slow, fast = drift(random, sizes, 0.99), drift(random, sizes, 0.33)  # another subject
        for _ in range(int(random.integers(1, 4))):
            prompt, answer = int(random.integers(100, 500)), min(int(random.integers(40, 160)), tokens - answered)
            if answer < 1:
                break
            pieces.append(Piece(spoken(fixed, slow, fast, sizes, prompt), prompt=True))
            pieces.append(Piece(spoken(fixed, slow, fast, sizes, answer)))
            answered += answer
    return pieces


def scan(random: Random, sizes: Sizes, tokens: int) -> list[Piece]:
    popularity, pieces = by_rank(random, sizes, 1.5), []
    half, circle = sizes.top_k // 2, sizes.experts * 3 // 4
    order = np.argsort(random.random((sizes.layers, sizes.experts)), axis=1)
    np.put_along_axis(popularity, order[:, :circle], np.float32(-1e9), axis=1)  # the rest are drawn by popularity
    for begin in range(0, tokens, 100):
        everything = gumbel(random, 2 * CHUNK_TOKENS, sizes.layers, sizes.experts)
        pieces.append(Piece(top(everything, sizes.top_k), prompt=True))
        count = min(100, tokens - begin)
        drawn = top(popularity + gumbel(random, count, sizes.layers, sizes.experts), sizes.top_k - half)
        at = (np.arange(begin, begin + count)[:, None] * half + np.arange(half)) % circle
        pieces.append(Piece(np.concatenate([drawn, order[:, at].swapaxes(0, 1).astype(np.int32)], axis=2)))
    return pieces


GENERATORS: dict[str, Callable[[Random, Sizes, int], list[Piece]]] = {
    "calibrated": calibrated,
    "zipf": zipf,
    "markov": markov,
    "dialogs": dialogs,
    "scan": scan,
}


def generate(name: str, tokens: int, sizes: Sizes = FULL, seed: int = 1) -> Routing:
    """Routing of `tokens` decoded tokens, and of the prompts before them, with guesses one and two layers ahead."""
    random = np.random.default_rng(seed)
    pieces = GENERATORS[name](random, sizes, tokens)
    return assemble(pieces, sizes, random)


def assemble(pieces: list[Piece], sizes: Sizes, random: Random) -> Routing:
    """Steps as the engine makes them: a token through all layers, or a chunk of a prompt."""
    truth = np.concatenate([piece.ids for piece in pieces])
    guessed = [guesses_ahead(truth, sizes, random, *ahead) for ahead in ((1, GUESSED_RIGHT), (2, TWO_AHEAD_RIGHT))]
    lengths: list[int] = []
    for piece in pieces:
        whole, rest = divmod(len(piece.ids), CHUNK_TOKENS)
        lengths += [CHUNK_TOKENS] * whole + [rest] * (rest > 0) if piece.prompt else [1] * len(piece.ids)
    cuts = np.cumsum(lengths)[:-1]

    def rows(of_tokens: Ids) -> Ids:
        chunks = np.split(of_tokens, cuts)
        return np.concatenate([chunk.swapaxes(0, 1).reshape(-1, sizes.top_k) for chunk in chunks])

    steps = np.repeat(lengths, sizes.layers)
    layer = np.tile(np.arange(sizes.layers, dtype=np.int32), len(lengths))
    first = np.concatenate([[0], np.cumsum(steps)]).astype(np.int64)
    return Routing(sizes.layers, sizes.experts, layer, first, rows(truth), tuple(map(rows, guessed)))


def guesses_ahead(truth: Ids, sizes: Sizes, random: Random, ahead: int, right: float) -> Ids:
    """[tokens, layers, k]: what was guessed in a layer for the one `ahead` of it, -1 beyond the last."""
    guessed = np.full_like(truth, -1)
    for layer in range(sizes.layers - ahead):
        guessed[:, layer] = guesses(truth[:, layer + ahead], sizes.experts, random, right)
    return guessed
