"""The multi-token-prediction block on a GPU: drafts, one sequence after the other, as services/engine/mtp.py has them.

Owns its two graphs, of one and of two ids, and the network's last states of each sequence's newest tokens. Keys and
values are in one more layer of the sequence's pages, counted from where the block began to follow. A call computes
them for the ids that it has not seen, two at most: one that was chosen, and one before it that was a draft. Where more
are missing (a prompt was swept, drafts of another kind were right, none were asked for) it begins anew. What it does
not know costs right drafts and no word.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.experts.device.turns import HandoffError, SharedSlots
from services.engine.errors import DeviceError, StepError
from services.engine.gpu.decoder import Decoder, Placement, Row
from services.engine.gpu.head_token import HeadToken
from services.engine.gpu.ledger import HEAD_ROWS, HIDDEN_STATES
from services.engine.gpu.memory import DevicePool, DeviceState, Followed
from services.engine.gpu.token import Replay
from services.engine.gpu.weights import HeadWeights
from services.engine.state import State
from services.engine.vision.ids import FIRST


@dataclass
class HeadPlace:
    """A sequence as the block's pages have it: `tokens` since it began."""

    place: int
    tokens: int
    pages: list[int]


class DeviceHead:
    """For sequences of at most `context_tokens`. Raises what Decoder does."""

    def __init__(
        self,
        weights: HeadWeights,
        pool: DevicePool,
        slots: SharedSlots,
        context_tokens: int,
        placement: Placement,
        told: Callable[[str], str] = str,
        replays: Mapping[int, Replay] | None = None,
    ) -> None:
        """`told` and `replays`, of one layer: as DeviceModel's."""
        self.told = told
        self.decoders: list[Decoder] = []
        hidden = weights.network.config.hidden_size
        self.hidden = torch.zeros(len(pool.conv), HIDDEN_STATES, hidden, device=pool.conv.device)
        for rows in HEAD_ROWS:
            replay = (replays or {}).get(rows)
            self.decoders.append(
                Decoder(weights.network, pool, slots, rows, context_tokens, placement, replay, head=weights)
            )

    def see(self, state: DeviceState, x: Tensor) -> None:
        """The network's last state of the id that comes next in `state`, float32 [hidden] in octet order."""
        if state.followed is None:
            state.followed = Followed()
        at = state.tokens % HIDDEN_STATES
        self.hidden[state.place, at].copy_(x)
        state.followed.seen[at] = state.tokens

    def logits(self, states: Sequence[State], ids: Sequence[int]) -> Tensor:
        """As DraftHead.logits."""
        states[0].pool.require(sum(state.pages_missing(1) for state in states))
        for state in states:
            state.reserve(1)
        return torch.stack([self._one(state, id_) for state, id_ in zip(states, ids, strict=True)])

    def _one(self, state: State, id_: int) -> Tensor:
        assert isinstance(state, DeviceState)
        known, last = state.followed, state.tokens
        assert known is not None, "the block has followed what was fed"
        both = known.has(last - 2) and state.ids[-1] < FIRST  # the id before can be made up for
        if known.end < last - both:
            known.begin = known.end = last - both
        first = min(known.end, last)
        decoder = self.decoders[last - first]
        assert isinstance(decoder.token, HeadToken)
        for row, place in enumerate(range(first - 1, last)):
            decoder.token.before[row].copy_(self.hidden[state.place, place % HIDDEN_STATES])
        there = HeadPlace(state.place, first - known.begin, state.pages)
        try:
            logits = decoder.run([Row(there, each) for each in (*state.ids[first:], id_)])
        except torch.AcceleratorError as error:  # nothing works there any more
            raise DeviceError(f"the GPU has failed: {error}") from error
        except HandoffError as error:
            raise StepError(self.told(str(error))) from error
        known.end = last + 1
        return logits[-1].clone()
