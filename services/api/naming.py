"""Answers that are over, and whose states have no names yet: to render and tokenise a long dialog takes a while, and a
program asks its next question within milliseconds. It waits then, for those of its own dialog alone: otherwise it would
find nothing of the last turn, and the engine would read that again.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

LONGEST_S = 5.0  # naming has a limit of its own; this is what a question is held up by at most


class Naming:
    """Of one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[bytes, list[asyncio.Future[None]]] = {}

    def begin(self, keys: Mapping[int, bytes]) -> Callable[[], None]:
        """The answer to a prompt with these boundaries (offset -> key) is being named until the result is called, which
        may be done twice. The last boundary is what every next turn shares, and no other dialog."""
        if not keys:
            return lambda: None
        key, named = keys[max(keys)], asyncio.get_running_loop().create_future()
        self._under_way.setdefault(key, []).append(named)

        def end() -> None:
            if named.done():
                return
            named.set_result(None)
            others = self._under_way[key]
            others.remove(named)
            if not others:
                del self._under_way[key]

        return end

    async def ended(self, keys: Iterable[bytes]) -> None:
        """Until nothing is named any more that a prompt with these boundaries may go on from, or it takes too long."""
        pending = [named for key in keys for named in self._under_way.get(key, ())]
        if pending:
            await asyncio.wait(pending, timeout=LONGEST_S)
