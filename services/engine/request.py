"""The vocabulary of the engine's boundary: what a client may ask for and what it is told. Owns no behaviour but checks.

A request is checked whole before any work is done for it; what is wrong with it is named.
"""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from services.engine.errors import ContextError, EngineError, IdsError, PositionError, SamplingError

MOST_SNAPSHOTS = 16  # positions in one request: each is a whole state
MOST_PASSING = 4096
MOST_OFFERS = 64  # each is hashed while the other sequences wait
MOST_LOGPROBS = 20  # most probable ids told with each token


@dataclass(frozen=True)
class Info:
    """Limits and identity of an engine. The fingerprints are hex."""

    model: str
    model_fingerprint: str
    arithmetic_fingerprint: str
    vocab_size: int
    context_tokens: int
    max_sequences: int
    queue_limit: int
    vision: bool
    device: str
    version: str
    exchange: str = ""


@dataclass(frozen=True)
class StateRef:
    """A stored state by name. `tokens` is how many ids it has consumed, `size_bytes` the size of its payload's own
    part, `blocks` the names of the KV blocks that belong to it beside that.

    In an offer, 0 bytes mean that the client has no payload to send: it is of use only while the engine holds it.
    """

    state_id: bytes
    tokens: int
    size_bytes: int
    blocks: tuple[bytes, ...] = field(default=(), repr=False)
    block_bytes: int = 0  # size of each


@dataclass(frozen=True)
class Picture:
    """A picture's place in a prompt: `tokens` ids from `position` on stand for the rows that `handle` names."""

    handle: bytes
    position: int
    tokens: int


@dataclass(frozen=True)
class Thinking:
    """The answer begins as thinking, which any of `end_ids` ends; the first is put in when the budget is used up."""

    end_ids: tuple[int, ...]
    budget_tokens: int | None = None


class Form(enum.Enum):
    """What a grammar is written in. The values are the names of the contract's fields."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer must be, behind its thinking."""

    form: Form
    text: str


@dataclass(frozen=True)
class Request:
    """One generation, as in the contract's Start.

    `snapshot_at` are prompt positions, `passing_at` more of them, of which a newer state takes the place of the older
    one; `offers` states that the client knows of, longest first. With `heads_only` the
    snapshots are named to the client, and kept hot, but their payloads are not sent; with `snapshots_on_request` of
    each only what the client then wants. With `idle` nothing is sampled: the prompt is read for its snapshots, while
    there is nothing else to do. `logprobs` None: not wanted, else of how many of the most probable ids,
    besides the sampled one.
    """

    request_id: str
    ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: frozenset[int] = frozenset()
    snapshot_at: tuple[int, ...] = ()
    passing_at: tuple[int, ...] = ()
    snapshot_answer: bool = False
    offers: tuple[StateRef, ...] = ()
    heads_only: bool = False
    snapshots_on_request: bool = False
    idle: bool = False
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    logprobs: int | None = None
    thinking: Thinking | None = None
    low_priority: bool = False
    grammar: Grammar | None = None
    user: str = ""
    pictures: tuple[Picture, ...] = ()

    def check(self, info: Info) -> None:
        """Raise the RequestError that names the first thing wrong with this request."""
        if not self.ids:
            raise IdsError("ids is empty: a prompt has at least one token")
        if self.max_tokens != 0 if self.idle else self.max_tokens < 1:
            wanted = "an idle request samples none: give 0" if self.idle else "ask for at least one token"
            raise SamplingError(f"max_tokens is {self.max_tokens}: {wanted}")
        if len(self.ids) + self.max_tokens > info.context_tokens:
            raise ContextError(
                f"a prompt of {len(self.ids)} tokens and an answer of up to {self.max_tokens} do not fit the context "
                f"of {info.context_tokens}: shorten the prompt or lower max_tokens"
            )
        ends = () if self.thinking is None else self.thinking.end_ids
        lists = {"ids": self.ids, "stop_ids": self.stop_ids, "logit_bias": self.logit_bias, "thinking.end_ids": ends}
        for name, ids in lists.items():
            for outside in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= outside < info.vocab_size:
                    raise IdsError(f"{name} has {outside}, but the vocabulary is 0 to {info.vocab_size - 1}")
        if self.thinking is not None and not ends:
            raise IdsError("thinking.end_ids is empty: name the id that ends the thinking")
        if self.grammar is not None and not self.stop_ids:
            raise IdsError("stop_ids is empty: an answer with a grammar must be able to end")
        self._check_sampling()
        if len(self.snapshot_at) > MOST_SNAPSHOTS:
            raise PositionError(f"{len(self.snapshot_at)} snapshot positions: at most {MOST_SNAPSHOTS} in one request")
        if len(self.offers) > MOST_OFFERS:
            raise PositionError(f"{len(self.offers)} states offered: at most {MOST_OFFERS} in one request")
        if len(self.passing_at) > MOST_PASSING:
            raise PositionError(f"{len(self.passing_at)} passing positions: at most {MOST_PASSING} in one request")
        for name, positions in (("snapshot_at", self.snapshot_at), ("passing_at", self.passing_at)):
            last = 0
            for position in positions:
                if not last < position < len(self.ids):
                    raise PositionError(
                        f"{name} {list(positions)}: positions ascend from 1 to {len(self.ids) - 1} "
                        "(one less than the prompt's tokens)"
                    )
                last = position
        end = 0
        for picture in self.pictures:
            if not (end <= picture.position and 0 < picture.tokens <= len(self.ids) - picture.position):
                raise PositionError(
                    f"a picture at position {picture.position} of {picture.tokens} tokens: pictures ascend, and lie in "
                    "the prompt"
                )
            end = picture.position + picture.tokens

    def _check_sampling(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SamplingError(f"temperature is {self.temperature}: give 0 (greedy) or a positive finite number")
        if not 0 < self.top_p <= 1:
            raise SamplingError(f"top_p is {self.top_p}: give a number above 0 and at most 1")
        if self.top_k < 0:
            raise SamplingError(f"top_k is {self.top_k}: give 0 (all) or a positive number")
        if not 0 <= self.min_p <= 1:
            raise SamplingError(f"min_p is {self.min_p}: give a number from 0 to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise SamplingError(f"{name} is {getattr(self, name)}: give a finite number, 0 for none")
        if not (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0):
            raise SamplingError(f"repetition_penalty is {self.repetition_penalty}: give a positive number, 1 for none")
        if not all(map(math.isfinite, self.logit_bias.values())):
            raise SamplingError("logit_bias holds a value that is not finite")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise SamplingError(f"min_tokens is {self.min_tokens}: give 0 to max_tokens, which is {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise SamplingError(f"logprobs of {self.logprobs} ids are asked for: at most {MOST_LOGPROBS}")


class Source(enum.Enum):
    """Where the first tokens' state came from. The values are the contract's."""

    NONE = 0
    HOT = 1
    SEND = 2
    SENT = 3
    REFUSED = 4


class Reason(enum.Enum):
    """Why an answer ended. The values are the contract's."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True)
class Restore:
    """First event, and once more after SEND. After SEND the engine waits for `Handle.restore`: the own part's chunks,
    then each block of the state whose number is in `need`. `damaged`: why a payload was refused is in its bytes."""

    source: Source
    state: StateRef | None = None
    reason: str = ""
    need: tuple[int, ...] = ()
    damaged: bool = False


@dataclass(frozen=True)
class Progress:
    """`left_ms`: until the prompt is read, if it goes on as it went; 0: unknown yet, or it is read. `passing`: the
    state that was taken here, if it is one of the request's `passing_at`."""

    done_tokens: int
    total_tokens: int
    left_ms: int = 0
    passing: StateRef | None = None


@dataclass(frozen=True)
class Token:
    """`logprob` and `top` (id, logprob) are set if the request asked for them."""

    id: int
    logprob: float = 0.0
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True)
class Snapshot:
    """A state to store, the own part of its payload in chunks of at most 1 MiB, and its KV blocks; neither of them if
    the request said heads_only."""

    state: StateRef
    chunks: Sequence[bytes] = field(default=(), repr=False)
    blocks: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Finish:
    """The answer is complete; `snapshots` follow it. Tokens are counted as in the contract."""

    reason: Reason
    prompt_tokens: int
    cached_tokens: int
    executed_tokens: int
    generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    snapshots: tuple[Snapshot, ...] = ()


@dataclass(frozen=True)
class Failed:
    error: EngineError


Event = Restore | Progress | Token | Finish | Failed  # Finish or Failed is the last one of a request
Sink = Callable[[Event], None]  # called by the engine's thread: must return at once
