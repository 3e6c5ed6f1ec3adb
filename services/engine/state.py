"""What the model remembers of one sequence: the ids it has consumed, convolution and SSM states, and its KV pages.

Owns the fixed-size tensors; the pages belong to the pool, the state holds their numbers. A recurrent state cannot be
rolled back: to go on from a place twice, `clone` it there. Used by the thread that owns the model, only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS, PagePool, pages_for


@dataclass
class Pending:
    """Drafts that a call has tried: the state is still as before them. `inputs` of each Mamba layer are what its
    recurrence reads of them: rows of x, B and C before the convolution, and of dt. `hidden` float32 [drafts, hidden]
    are the network's last states, for those who read on in them. All of it is some KiB a layer, where a second state
    would be as large as the first: of the real model, 160 MiB."""

    ids: list[int]
    inputs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Drafting:
    """What the multi-token-prediction block remembers: its keys and values are those of tokens from `begin` on, in the
    layer behind the model's own; `hidden` float32 [hidden] is the network's last state of the newest token. Payloads
    hold nothing of it: behind a restored beginning the block begins anew."""

    begin: int
    hidden: Tensor


class State:
    """A fresh state has consumed no id. All tensors are float32.

    conv [mamba layers, conv_channels, conv_kernel - 1]: the last inputs of each convolution, the newest last.
    ssm [mamba layers, mamba_heads, mamba_head_dim, mamba_state].
    """

    pending: Pending | None = None
    drafting: Drafting | None = None

    def __init__(self, config: ModelConfig, pool: PagePool) -> None:
        layers = len(config.mamba_layers)
        self.config = config
        self.pool = pool
        self.ids: list[int] = []
        self._stale = bool(pool.spares)  # the tensors are as another state left them
        if pool.spares:
            self._conv, self._ssm = pool.spares.pop()
        else:
            self._conv = torch.zeros(layers, config.conv_channels, config.conv_kernel - 1)
            self._ssm = torch.zeros(layers, config.mamba_heads, config.mamba_head_dim, config.mamba_state)
        self.pages: list[int] = []
        self.block_names: list[bytes] = []  # of its first KV blocks, as far as snapshots/payload.py has named them
        self._released = False
        self.spoiled = False  # a step failed halfway: nothing here can be trusted, only `release` is allowed

    @property
    def conv(self) -> Tensor:
        return self._fresh(self._conv)

    @property
    def ssm(self) -> Tensor:
        return self._fresh(self._ssm)

    @property
    def can_draft(self) -> bool:
        """The multi-token-prediction block knows of its newest token."""
        return self.drafting is not None

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def size_bytes(self) -> int:
        """Of the fixed-size tensors; pages are counted by the pool."""
        return self._conv.nbytes + self._ssm.nbytes

    @property
    def most_tokens(self) -> int:
        """More can never be reserved."""
        return self.pool.total * PAGE_TOKENS

    def pages_missing(self, tokens: int) -> int:
        """How many pages `reserve(tokens)` will take from the pool."""
        return max(0, pages_for(self.tokens + tokens) - len(self.pages)) + self._writes_into_shared_page(tokens)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more ids. Raises OutOfPagesError and changes nothing if the pool has too few."""
        self.pool.require(self.pages_missing(tokens))
        if self._writes_into_shared_page(tokens):
            last = self.tokens // PAGE_TOKENS
            (own,) = self.pool.allocate(1)
            self.pool.copy(self.pages[last], own)
            self.pool.release([self.pages[last]])
            self.pages[last] = own
        self.pages += self.pool.allocate(max(0, pages_for(self.tokens + tokens) - len(self.pages)))

    def write_kv(self, layer: int, key: Tensor, value: Tensor, skipped: int = 0) -> None:
        """Keys and values [M, kv_heads, head_dim] of the next M tokens of attention layer `layer`, into reserved room,
        behind `skipped` others.

        `ids` grows only when the whole step is done, so each layer writes at the same place.
        """
        start = self.tokens + skipped
        for source, pool in ((key, self.pool.keys[layer]), (value, self.pool.values[layer])):
            done = 0
            while done < len(source):
                page, offset = divmod(start + done, PAGE_TOKENS)
                count = min(PAGE_TOKENS - offset, len(source) - done)
                pool[self.pages[page], offset : offset + count] = source[done : done + count]
                done += count

    def read_kv(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Copies of its first `tokens` keys and values of a layer, both [tokens, kv_heads, head_dim]."""
        pages = torch.tensor(self.pages[: pages_for(tokens)], dtype=torch.long)
        key = self.pool.keys[layer].index_select(0, pages).flatten(0, 1)[:tokens]
        value = self.pool.values[layer].index_select(0, pages).flatten(0, 1)[:tokens]
        return key, value

    @property
    def fixed(self) -> tuple[Tensor, Tensor]:
        """Conv and ssm as they lie, whatever they hold."""
        return self._conv, self._ssm

    def write_fixed(self, target: memoryview) -> None:
        """The bytes of conv and ssm into memory of exactly their size."""
        for piece in (self.conv, self.ssm):
            copy(target[: piece.nbytes], host_view(piece))
            target = target[piece.nbytes :]

    def read_fixed(self, source: memoryview) -> None:
        """The same bytes back, at once."""
        self._stale = False
        for piece in self.fixed:
            copy(host_view(piece), source[: piece.nbytes])
            source = source[piece.nbytes :]

    def import_fixed(self) -> Iterator[memoryview]:
        """The same in pieces to be filled; one is taken over when the next is asked for. All of them are to be filled,
        or the state to be reset: what is to be written over is not cleared first, which takes as long."""
        self._stale = False
        for piece in self.fixed:
            yield host_view(piece)

    def export_kv(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of keys and values of tokens start to stop, all within one page: layer by layer, keys first."""
        page, first = divmod(start, PAGE_TOKENS)
        rows = slice(first, first + stop - start)
        for layer in range(len(self.config.attention_layers)):
            for memory in (self.pool.keys[layer], self.pool.values[layer]):
                yield host_view(memory[self.pages[page], rows])

    def import_kv(self, start: int, stop: int) -> Iterator[memoryview]:
        """The same pieces to be filled, in reserved room."""
        return self.export_kv(start, stop)

    def read_block(self, start: int, stop: int, source: bytes | memoryview) -> None:
        """The same pieces together back, at once."""
        page, first = divmod(start, PAGE_TOKENS)
        layers = len(self.config.attention_layers)
        place = (slice(layers), self.pages[page], slice(first, first + stop - start))
        keys, values = self.pool.keys.numpy()[place], self.pool.values.numpy()[place]
        came = np.frombuffer(source, keys.dtype).reshape(layers, 2, *keys.shape[1:])
        np.copyto(keys, came[:, 0])
        np.copyto(values, came[:, 1])

    def reset(self) -> None:
        """As if it had consumed nothing. Its reserved room stays its own."""
        assert not self.spoiled
        self.ids = []
        self.block_names = []
        self.pending = self.drafting = None
        self._clear()

    def clone(self) -> "State":
        """An independent copy. Pages are shared until one of the two writes into the last one."""
        assert not self.spoiled
        assert self.pending is None, "drafts are settled before the state is copied"
        other = State.__new__(State)
        other.config, other.pool = self.config, self.pool
        other.ids = list(self.ids)
        other._conv, other._ssm, other._stale = self.conv.clone(), self.ssm.clone(), False
        other.pages = self.pages[: pages_for(self.tokens)]
        other.block_names = list(self.block_names)
        other.spoiled = other._released = False
        other.drafting = replace(self.drafting) if self.drafting else None
        self.pool.share(other.pages)
        return other

    def release(self) -> None:
        """Give the pages back. The state is empty and must not be used again; a second release does nothing."""
        if not self._released and len(self.pool.spares) < self.pool.most_spares:
            self.pool.spares.append((self._conv, self._ssm))
        self._released = True
        self.pool.release(self.pages)
        self.pages = []
        self.spoiled = True

    def _fresh(self, tensor: Tensor) -> Tensor:
        """One of its tensors, both of them cleared if that is still to be done."""
        if self._stale:
            self._clear()
        return tensor

    def _clear(self) -> None:
        self._stale = False
        self._conv.zero_()
        self._ssm.zero_()

    def _writes_into_shared_page(self, tokens: int) -> bool:
        last = self.tokens // PAGE_TOKENS
        return tokens > 0 and last < len(self.pages) and self.pool.is_shared(self.pages[last])


def copy(target: memoryview, source: bytes | memoryview) -> None:
    """As target[:] = source, while other threads go on."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def host_view(tensor: Tensor) -> memoryview:
    """The tensor's own memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def state_bytes(config: ModelConfig) -> int:
    """Of one state's fixed-size tensors: what `State.size_bytes` will be."""
    ssm = config.mamba_heads * config.mamba_head_dim * config.mamba_state
    return 4 * len(config.mamba_layers) * (config.conv_channels * (config.conv_kernel - 1) + ssm)
