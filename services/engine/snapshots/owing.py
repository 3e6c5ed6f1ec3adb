"""Taking the state of a sequence as it is now, and owing it to the sequence's client. Owns what a place where that is
wanted costs: room, or what was kept before. Used by the engine's thread only.
"""

from services.engine.metrics import Metrics
from services.engine.request import StateRef
from services.engine.sequence import Sequence
from services.engine.snapshots.hot import HotStates, Stored


def owe(sequence: Sequence, hot: HotStates, metrics: Metrics) -> Stored | None:
    """Without room for it the sequence goes on without."""
    assert sequence.state is not None
    stored, result = hot.take(sequence.state, owed=not sequence.request.heads_only)
    metrics.snapshots[result,].inc()
    if stored is not None:
        metrics.snapshot_bytes["taken",].inc(stored.ref.size_bytes if result == "taken" else 0)
        sequence.owe(stored)
    return stored


def owe_in_passing(sequence: Sequence, hot: HotStates, metrics: Metrics) -> StateRef | None:
    """The same, in the place of the state that was kept in passing before; that one stays if this one cannot."""
    before = sequence.passing
    if before is not None:
        sequence.disown(before)
    after = owe(sequence, hot, metrics)
    if before is not None and after is None:
        sequence.owe(before)
    elif before is not None:
        hot.let_go(before)
    sequence.passing = after or before
    return None if after is None else after.ref
