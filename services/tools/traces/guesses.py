"""Guesses at the next layers' experts as good as the published ones: 72 of 100 are right. Owns that loss only."""

import numpy as np

from kernels.experts.host.replay import Ids, Routing

GUESSED_RIGHT = 0.72  # published, one layer ahead
FALL = 0.54  # by so much the last of a list is less often right than the first
TWO_AHEAD_RIGHT = 0.62  # not published: a layer further is worse


def guesses(truth: Ids, experts: int, random: np.random.Generator, right: float) -> Ids:
    """`truth` [rows, k], all of one layer -> the same with 1 - `right` of the ids replaced by others of the layer.

    The wrong ones are mostly experts that are popular in the layer, as a router that is wrong names them, and mostly
    late in the list: nothing was published of that, FALL is what the demo's routers do.
    """
    rows, top_k = truth.shape
    counted = np.bincount(truth.ravel(), minlength=experts) + 0.1 * rows * top_k / experts
    popularity = counted.cumsum() / counted.sum()
    taken = np.zeros((rows, experts), bool)
    np.put_along_axis(taken, truth.astype(np.int64), True, axis=1)
    guessed = truth.copy()
    by_rank = right + FALL * (0.5 - np.arange(top_k) / (top_k - 1))
    guessed[random.random(truth.shape) >= by_rank] = -1
    for _ in range(30):
        at = np.argwhere(guessed < 0)
        if not len(at):
            break
        # One new id for each row at a time, so that none comes twice.
        _, first = np.unique(at[:, 0], return_index=True)
        row, rank = at[first].T
        drawn = np.searchsorted(popularity, random.random(len(row))).astype(np.int32)
        fresh = ~taken[row, drawn]
        guessed[row[fresh], rank[fresh]] = drawn[fresh]
        taken[row[fresh], drawn[fresh]] = True
    return guessed


def truth_ahead(routing: Routing, ahead: int) -> Ids:
    """What the router named `ahead` layers after each row, in the row's order; -1 beyond the last layer."""
    truth = np.full_like(routing.ids, -1)
    layer = np.repeat(routing.layer, routing.rows_of_step)
    has = layer < routing.layers - ahead
    truth[has] = routing.ids[layer >= ahead]  # whole calls, layer by layer: both sides are in the same order
    return truth


def right(routing: Routing, ahead: int) -> float:
    """Share of the experts `ahead` layers on that were guessed."""
    truth, guessed = truth_ahead(routing, ahead), routing.guesses[ahead - 1]
    asked = truth[:, 0] >= 0
    hit = (guessed[asked][:, :, None] == truth[asked][:, None, :]).any(axis=1)
    return float(hit.mean())


def worsen(routing: Routing, ahead: int, random: np.random.Generator, most: float) -> Ids:
    """The recorded guesses, with right ones replaced by nothing at random if more than `most` of them are right."""
    guessed, truth = routing.guesses[ahead - 1].copy(), truth_ahead(routing, ahead)
    found = (guessed[:, :, None] == truth[:, None, :]).any(axis=2) & (guessed >= 0)
    share = right(routing, ahead)
    if share > most:
        guessed[found & (random.random(guessed.shape) > most / share)] = -1
    return guessed
