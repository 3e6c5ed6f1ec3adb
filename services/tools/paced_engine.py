"""An engine that computes nothing: a gRPC server that keeps the contract and sends one token a stream at every beat, as
an engine's steps do, and tells when. For measuring what stands in front of an engine. Owns the beat.

Run as a process of its own it prints `listening on ADDRESS`, and for every answer one JSON object a line: `request_id`
and `sent_s`, time.perf_counter() of each token before it is handed to gRPC. On Linux all processes share that clock.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.rpc import engine_pb2 as pb
from services.rpc import engine_pb2_grpc

LISTENING = "listening on "
SILENT = "silent-"  # begins the ids of requests that are never answered
MANY = 4096


class PacedEngine(engine_pb2_grpc.EngineServicer):  # type: ignore[misc]  # generated code has no types
    """Every answer is `token_id` again and again, max_tokens times."""

    def __init__(self, token_id: int, beat_s: float) -> None:
        self._token = pb.GenerateOut(token=pb.Token(id=token_id))
        self._beat_s = beat_s
        self._beat = asyncio.Event()

    async def keep_time(self) -> None:
        upcoming = time.perf_counter()
        while True:
            upcoming += self._beat_s
            await asyncio.sleep(upcoming - time.perf_counter())
            beat, self._beat = self._beat, asyncio.Event()
            beat.set()

    async def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        return pb.InfoResponse(
            model="paced",
            model_fingerprint="0",
            arithmetic_fingerprint="0",
            vocab_size=1 << 17,
            context_tokens=1 << 20,
            max_sequences=MANY,
            queue_limit=MANY,
            device="none",
            version="0",
        )

    async def Generate(self, requests: AsyncIterator[pb.GenerateIn], context: Any) -> AsyncIterator[pb.GenerateOut]:
        start = (await anext(aiter(requests))).start
        await context.send_initial_metadata(())
        yield pb.GenerateOut(restore=pb.Restore(source=pb.Restore.NONE))
        if start.request_id.startswith(SILENT):
            await asyncio.Event().wait()  # until the call is cancelled
        sent_s = []
        for _ in range(start.max_tokens):
            await self._beat.wait()
            sent_s.append(time.perf_counter())
            yield self._token
        print(json.dumps({"request_id": start.request_id, "sent_s": sent_s}), flush=True)
        prompt = len(start.ids)
        finish = pb.Finish(
            reason=pb.Finish.LENGTH,
            prompt_tokens=prompt,
            executed_tokens=prompt,
            generated_tokens=start.max_tokens,
        )
        yield pb.GenerateOut(finish=finish)


async def serve(token_id: int, beat_s: float) -> None:
    """Until the process is stopped."""
    engine, server = PacedEngine(token_id, beat_s), grpc.aio.server()
    engine_pb2_grpc.add_EngineServicer_to_server(engine, server)
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"{LISTENING}127.0.0.1:{port}", flush=True)
    await engine.keep_time()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
