"""What sequences remember, in a card's memory: KV pages and a fixed number of places for convolution and SSM states.

Owns the memory, all of it taken at construction, so that a captured graph finds every state at the address it was
captured with. Kernels name a state by its place. Used by the thread that owns the model, only.
"""

import logging
import mmap
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.attention.pages import Pages
from kernels.mamba.gpu import Sizes
from services.engine.errors import OutOfPagesError
from services.engine.gpu.ledger import HIDDEN_STATES, Kv
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS, PagePool, pages_for
from services.engine.state import State, copy, host_view

log = logging.getLogger(__name__)

KV_TYPES: dict[Kv, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


class DevicePool(PagePool):
    """`keys` and `values` as in PagePool, in BF16 or FP8; `conv` and `ssm` as in State, with a place first.

    With `drafts` there is room for what the Mamba layers keep of a draft of each place, until it is settled: `kept`
    float32 [places, mamba layers, Sizes.kept], 3 MiB a place of the real model. The recurrent states are then as before
    the draft; of keys and values only a length says that they are there. `head`: one more layer of these, the
    multi-token-prediction block's.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        places: int,
        pages: int,
        kv: Kv = "bf16",
        drafts: bool = False,
        head: bool = False,
    ) -> None:
        shape = (len(config.attention_layers) + head, pages, PAGE_TOKENS, config.kv_heads, config.head_dim)
        self.keys = torch.zeros(shape, dtype=torch.uint8, device=device).to(KV_TYPES[kv])
        self.values = self.keys.clone()
        self._own(pages)
        layers = len(config.mamba_layers)
        self.conv = torch.zeros(places, layers, config.conv_channels, config.conv_kernel - 1, device=device)
        self.ssm = torch.zeros(
            places, layers, config.mamba_heads, config.mamba_head_dim, config.mamba_state, device=device
        )
        sizes = Sizes(config.mamba_heads, config.mamba_head_dim, config.mamba_state, config.mamba_groups)
        self.kept = torch.zeros(places, layers, sizes.kept, device=device) if drafts else None
        self._free_places = list(range(places - 1, -1, -1))
        page_bytes = self.keys[0, 0].nbytes if self.keys.numel() else 1
        self._staging = torch.zeros(page_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        block_bytes = 2 * self.keys[:, :1].nbytes if pages else 0
        self._landing = torch.zeros(block_bytes, dtype=torch.uint8, device=device)

    def pages_of(self, layer: int, key_scale: float, value_scale: float) -> Pages:
        """One attention layer's pages, as the kernels take them. The scales are those of FP8 pages only."""
        if self.keys.dtype != torch.float8_e4m3fn:
            key_scale = value_scale = 1.0
        return Pages(self.keys[layer], self.values[layer], key_scale, value_scale)

    def take_place(self) -> int:
        """A place whose states are zero. Raises OutOfPagesError if none is free."""
        if not self._free_places:
            raise OutOfPagesError(
                f"all {len(self.conv)} states on the GPU are in use: wait for other sequences to end, or raise "
                "THIMBLE_ENGINE_MAX_SEQUENCES"
            )
        place = self._free_places.pop()
        self.conv[place].zero_()
        self.ssm[place].zero_()
        return place

    def give_place(self, place: int) -> None:
        assert place not in self._free_places
        self._free_places.append(place)

    def to_host(self, piece: Tensor) -> memoryview:
        """A piece's bytes, valid until the next call."""
        staged = self._staging[: piece.nbytes]
        staged.copy_(piece.reshape(-1).view(torch.uint8))
        return host_view(staged)

    def from_host(self, piece: Tensor) -> Iterator[memoryview]:
        """The buffer to fill with a piece's bytes; it goes to the device when the next is asked for. A buffer of its
        own: a state may arrive slowly, and others come and go meanwhile."""
        staged = staging(piece.nbytes, piece.is_cuda)
        yield host_view(staged)
        piece.copy_(staged.view(piece.dtype).view(piece.shape))

    def stage(self, data: bytes | memoryview) -> Tensor:
        """At most a block's bytes on the device, as a tensor of them that is good until the next call's."""
        here = staging(len(data), self.conv.is_cuda)
        copy(host_view(here), data)
        return self._landing[: len(data)].copy_(here)

    def check(self, held: list[list[int]]) -> None:
        super().check(held)
        assert len(self._free_places) == len(set(self._free_places)) == len(self.conv) - len(held)


@dataclass
class Followed:
    """What the multi-token-prediction block knows of a sequence: keys and values of places `begin` to `end`, and the
    network's last states of the places in `seen`, of which place p is at p % HIDDEN_STATES of the block's memory."""

    begin: int = 0
    end: int = 0
    seen: list[int] = field(default_factory=lambda: [-1] * HIDDEN_STATES)

    def has(self, place: int) -> bool:
        """The network's state of it."""
        return place >= 0 and self.seen[place % HIDDEN_STATES] == place


class DeviceState(State):
    """`conv` and `ssm` are its place in the pool; they and the pages never move.

    Keys and values that are exported go through one page-locked buffer, piece by piece.
    """

    pool: DevicePool
    followed: Followed | None = None

    def __init__(self, config: ModelConfig, pool: DevicePool) -> None:
        self.config, self.pool = config, pool
        self.place = pool.take_place()
        self.ids: list[int] = []
        self._conv, self._ssm, self._stale = pool.conv[self.place], pool.ssm[self.place], False
        self.pages: list[int] = []
        self.block_names: list[bytes] = []
        self.spoiled = self._released = False

    def reset(self) -> None:
        super().reset()
        self.followed = None

    @property
    def can_draft(self) -> bool:
        return self.followed is not None and self.followed.has(self.tokens - 1)

    def write_fixed(self, target: memoryview) -> None:
        for piece in self.fixed:
            _as_bytes(target[: piece.nbytes]).copy_(_bytes_of(piece))
            target = target[piece.nbytes :]

    def read_fixed(self, source: memoryview) -> None:
        for piece in self.fixed:
            _bytes_of(piece).copy_(_as_bytes(source[: piece.nbytes]))
            source = source[piece.nbytes :]

    def import_fixed(self) -> Iterator[memoryview]:
        for piece in (*self.conv, *self.ssm):
            yield from self.pool.from_host(piece)

    def export_kv(self, start: int, stop: int) -> Iterator[memoryview]:
        for piece in self._kv_pieces(start, stop):
            yield self.pool.to_host(piece)

    def import_kv(self, start: int, stop: int) -> Iterator[memoryview]:
        for piece in self._kv_pieces(start, stop):
            yield from self.pool.from_host(piece)

    def read_block(self, start: int, stop: int, source: bytes | memoryview) -> None:
        page, first = divmod(start, PAGE_TOKENS)
        place = (slice(len(self.config.attention_layers)), self.pages[page], slice(first, first + stop - start))
        keys, values = self.pool.keys[place], self.pool.values[place]
        layers, *shape = keys.shape
        staged = self.pool.stage(source).view(keys.dtype).view(layers, 2, *shape)
        keys.copy_(staged[:, 0])
        values.copy_(staged[:, 1])

    def clone(self) -> "DeviceState":
        """An independent copy in another place. Raises OutOfPagesError if there is none."""
        assert not self.spoiled
        assert self.pending is None, "drafts are settled before the state is copied"
        other = DeviceState(self.config, self.pool)
        other.ids, other.block_names = list(self.ids), list(self.block_names)
        other.conv.copy_(self.conv)
        other.ssm.copy_(self.ssm)
        other.pages = self.pages[: pages_for(self.tokens)]
        self.pool.share(other.pages)
        return other

    def release(self) -> None:
        if not self._released:
            self.pool.give_place(self.place)
        super().release()

    def _kv_pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        page, first = divmod(start, PAGE_TOKENS)
        for layer in range(len(self.config.attention_layers)):
            for memory in (self.pool.keys[layer], self.pool.values[layer]):
                yield memory[self.pages[page], first : first + stop - start]


def _bytes_of(piece: Tensor) -> Tensor:
    return piece.view(-1).view(torch.uint8)


def _as_bytes(memory: memoryview) -> Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def staging(size_bytes: int, locked: bool) -> Tensor:
    """Host memory for bytes on their way to the card; where the system locks no more, as after all that the engine has
    locked it may not, memory as any other: a slower copy, and no failure."""
    if locked:
        with suppress(RuntimeError):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    return torch.empty(size_bytes, dtype=torch.uint8)


def page_locked(size_bytes: int) -> npt.NDArray[np.uint8]:
    """New host memory that the card reads and writes by itself, at the link's speed; where the system locks no more,
    memory as any other."""
    memory = np.frombuffer(mmap.mmap(-1, size_bytes), np.uint8)
    address, runtime = memory.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = int(runtime.cudaHostRegister(address, size_bytes, 0))
    if status:
        with suppress(RuntimeError):  # the runtime keeps a refused call's error for the next launch to report: this one
            torch.zeros(1, device="cuda")
        log.warning("a hot state of %.0f MB could not be page-locked (CUDA error %d)", size_bytes / 1e6, status)
    else:
        weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return memory
