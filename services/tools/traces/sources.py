"""What `thimble simulate` replays: recorded files, or generators by name. Owns how either becomes routing and shape."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.experts.host.replay import Routing
from services.engine.errors import TraceError
from services.engine.experts.trace import read_trace
from services.tools.predict import SUPER, Shape
from services.tools.traces.generators import GENERATORS, generate
from services.tools.traces.guesses import GUESSED_RIGHT, worsen


@dataclass(frozen=True)
class Source:
    """`note` is what a live engine counted while it was recorded, empty if nothing was."""

    name: str
    routing: Routing
    shape: Shape
    prompt_tokens: int
    decoded_tokens: int
    note: dict[str, Any]
    cut: bool = False  # the recording did not end in order

    @property
    def size(self) -> str:
        what = f"{self.decoded_tokens} decoded tokens"
        return f"{what} after {self.prompt_tokens} of prompts" if self.prompt_tokens else what


def source(word: str, tokens: int) -> Source:
    """A generator's name, for `tokens` decoded tokens, or the path of a trace. Raises TraceError."""
    if word in GENERATORS:
        routing = generate(word, tokens)
        rows = routing.rows_of_step[:: routing.layers]
        prompt = int(rows[rows > 1].sum())
        return Source(word, routing, SUPER, prompt, int(rows.sum()) - prompt, {})
    trace = read_trace(Path(word))
    header, routing = trace.header, trace.routing()
    if not trace.decoded_tokens or not len(routing.layer):
        raise TraceError(f"{word}: nothing was decoded while it was recorded")
    shape = Shape(
        dense_bytes=header.dense_bytes,
        moe_layers=header.layers,
        experts=header.experts,
        experts_per_token=header.top_k,
        latent=header.latent,
        width=header.width,
        block_bytes=header.block_bytes,
    )
    # The engine's own guesses may be better than what was published: the replay must not gain by that.
    random = np.random.default_rng(1)
    guesses = tuple(worsen(routing, ahead, random, GUESSED_RIGHT) for ahead in range(1, len(routing.guesses) + 1))
    routing = replace(routing, guesses=guesses)
    return Source(
        Path(word).stem, routing, shape, trace.prompt_tokens, trace.decoded_tokens, trace.note, not trace.whole
    )
