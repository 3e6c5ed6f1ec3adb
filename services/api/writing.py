"""What is said to an engine on a call under way, one message after another. Owns that a message which comes too late
leaves alone what the engine has said.

grpc.aio has no room for two writes at once: it ends the call. And where a write finds the call over, it puts a status
of its own (INTERNAL, "Internal error from Core") in the place of the engine's, which is lost then, with all messages
that were not read yet: who has an answer's thinking ended a moment too late would end the answer with a 500. So the
message goes to the call that lies under grpc.aio's, as there, and a failure is told to who wrote, and to nobody else.
"""

import asyncio
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message

from services.unbroken import unbroken


class Writing:
    """To one call, whose request has no iterator."""

    def __init__(self, call: Any) -> None:  # grpc.aio's own types are not published
        self._call = call
        self._turn = asyncio.Lock()

    async def say(self, message: Message) -> bool:
        """False: the call has ended or is about to, and who reads is told why. Raises what `wait_for_connection` does:
        how the call ended, if it never began."""
        await self._call.wait_for_connection()
        return await unbroken(self._in_turn(message.SerializeToString()))

    async def end(self) -> None:
        """Nothing more is said."""
        with suppress(grpc.aio.InternalError):
            await unbroken(self._call.done_writing())

    async def _in_turn(self, message: bytes) -> bool:
        async with self._turn:
            if self._call.done():
                return False
            try:
                await self._call._cython_call.send_serialized_message(message)
            except grpc.aio.InternalError:
                return False
            return True
