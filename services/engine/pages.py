"""The bounded pool of KV pages that all sequences share: one allocation at start, a free list, reference counts.

Owns the memory of every key and value. Owns no sequence: a state holds page numbers and says what is in them. A page
may belong to several states (a state and its copy); whoever wants to write into it needs it alone (`State.reserve`).
Used by the thread that owns the model, only.
"""

import torch

from services.engine.errors import OutOfPagesError
from services.engine.model_config import ModelConfig

PAGE_TOKENS = 64


class PagePool:
    """`keys` and `values` are float32 [attention layers, pages, PAGE_TOKENS, kv_heads, head_dim]; with `drafts` there
    is one more layer, the multi-token-prediction block's."""

    def __init__(self, config: ModelConfig, pages: int, drafts: bool = False) -> None:
        shape = (len(config.attention_layers) + drafts, pages, PAGE_TOKENS, config.kv_heads, config.head_dim)
        self.keys = torch.zeros(shape)
        self.values = torch.zeros(shape)
        self._own(pages)

    def _own(self, pages: int) -> None:
        """All are free."""
        self.total = pages
        self.spares: list[tuple[torch.Tensor, ...]] = []  # fixed tensors of released states, as they left them
        self.most_spares = 0  # to be kept: the memory of a large state costs more to get than to clear
        self._free = list(range(pages - 1, -1, -1))
        self._owners = [0] * pages

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def allocate(self, count: int) -> list[int]:
        """`count` pages with one owner each. Raises OutOfPagesError, and takes none, if fewer are free."""
        self.require(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def require(self, count: int) -> None:
        """Raise OutOfPagesError unless `count` pages are free."""
        if count > self.free:
            raise OutOfPagesError(
                f"{count} KV pages of {PAGE_TOKENS} tokens are needed, {self.free} of {self.total} are free: "
                "wait for other sequences to end, or raise THIMBLE_ENGINE_KV_GB; on a GPU, shorten the context"
            )

    def share(self, pages: list[int]) -> None:
        """One more owner for each page."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free"
            self._owners[page] += 1

    def release(self, pages: list[int]) -> None:
        """One owner less for each page; a page without owners is free again."""
        for page in pages:
            assert self._owners[page] > 0, f"page {page} is free"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        return self._owners[page] > 1

    def copy(self, source: int, target: int) -> None:
        """The content of page `source`, in all layers, into `target`."""
        self.keys[:, target] = self.keys[:, source]
        self.values[:, target] = self.values[:, source]

    def check(self, held: list[list[int]]) -> None:
        """Conservation: `held` is the page list of every live state. Raises AssertionError with the numbers."""
        owners = [0] * self.total
        for page in (page for pages in held for page in pages):
            owners[page] += 1
        used = sum(1 for count in owners if count)
        assert owners == self._owners, f"states hold pages {owners}, the pool counts {self._owners}"
        assert used + self.free == self.total == used + len(set(self._free)), (
            f"{used} used + {self.free} free pages, {self.total} in all"
        )


def page_bytes(config: ModelConfig, drafts: bool = False) -> int:
    """Of one page: keys and values of PAGE_TOKENS tokens in all attention layers."""
    return 2 * 4 * (len(config.attention_layers) + drafts) * PAGE_TOKENS * config.kv_heads * config.head_dim


def pages_for(tokens: int) -> int:
    """How many pages hold `tokens` tokens."""
    return -(-tokens // PAGE_TOKENS)
