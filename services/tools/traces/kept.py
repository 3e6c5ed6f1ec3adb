"""Routing for a cache beside which some blocks are kept elsewhere, such as in a card's memory. Owns which ones: those
that the first tokens name most.
"""

from dataclasses import replace

import numpy as np

from kernels.experts.host.replay import Ids, Routing


def without_hottest(routing: Routing, kept: int, warm: int) -> Routing:
    """The same for a cache that need not have the `kept` blocks that the first `warm` tokens, none of a prompt, name
    most: another expert of the same token, which it looks up anyway, stands for each, and none is guessed."""
    rows = np.repeat(routing.layer, routing.rows_of_step).astype(np.int64) * routing.experts
    keys = rows[:, None] + routing.ids
    counts = np.bincount(keys[: warm * routing.layers].ravel(), minlength=routing.layers * routing.experts)
    hottest = np.zeros(len(counts), bool)
    hottest[np.argsort(-counts, kind="stable")[:kept]] = True
    held = hottest[keys]
    other = routing.ids[np.arange(len(keys)), held.argmin(axis=1)]  # the first that is not; or, if all are, one of them
    ids = np.where(held, other[:, None], routing.ids)
    guesses: list[Ids] = []
    for ahead, guess in enumerate(routing.guesses, 1):
        there = rows[:, None] + ahead * routing.experts + np.maximum(guess, 0)
        guesses.append(np.where(hottest[there % len(hottest)], -1, guess).astype(np.int32))
    return replace(routing, ids=ids, guesses=tuple(guesses))
