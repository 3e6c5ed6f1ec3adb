"""Random and damaged messages to every method of the engine's contract, over real gRPC, by the thousand. The engine
refuses each with a status, leaves nothing behind, and answers the next honest request as before.

    python tests/drills/hostile_messages.py --minutes 10 --seed 1
"""

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import grpc

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from toy_engine import Toy, answer, soon, toy
from toy_server import channel_to, serving, start

from services.rpc import engine_pb2 as pb
from services.tools import figures

HONEST = (1, 2, 3, 4, 5) * 5
MOST_S = 60.0  # for one call, on a machine that does other things too
SERVICE = pb.DESCRIPTOR.services_by_name["Engine"]
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.OK,
    grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.CANCELLED,
    grpc.StatusCode.NOT_FOUND,
}  # fmt: skip


class Report:
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.slowest_s = 0.0
        self.honest = 0
        self.findings: list[str] = []

    def __str__(self) -> str:
        each = ", ".join(f"{name} {count}" for name, count in sorted(self.calls.items()))
        ends = ", ".join(f"{name} {count}" for name, count in self.statuses.most_common())
        return (
            f"{sum(self.calls.values())} calls ({each}), ended with {ends}; slowest {self.slowest_s:.2f} s; "
            f"{self.honest} honest ones between, findings {len(self.findings)}"
        )


def seeds() -> list[bytes]:
    """Sound messages to be damaged."""
    whole = start(*HONEST, snapshot_at=[13], sampling=pb.Sampling(temperature=1.0, top_p=0.9, seed=3))
    state = pb.StateRef(state_id=b"x" * 32, tokens=13, size_bytes=2004)
    messages = [
        pb.GenerateIn(start=whole),
        pb.GenerateIn(start=start(*HONEST, offers=[state])),
        pb.GenerateIn(chunk=pb.SnapshotChunk(index=0, data=b"y" * 100)),
        pb.GenerateIn(stop=pb.Stop()),
        pb.VisionIn(data=b"\x89PNG"),
        pb.InfoRequest(),
    ]
    return [message.SerializeToString() for message in messages]


def damaged(choose: random.Random, sound: list[bytes]) -> bytes:
    data = bytearray(choose.choice(sound) if choose.random() < 0.8 else choose.randbytes(choose.randrange(200)))
    for _ in range(choose.choice((0, 1, 1, 2, 8))):
        at = choose.randrange(len(data) + 1)
        match choose.randrange(4):
            case 0:
                data[at : at + 1] = choose.randbytes(1)
            case 1:
                data[at:at] = choose.randbytes(choose.randrange(1, 12))
            case 2:
                del data[at : at + choose.randrange(1, 12)]
            case _:
                data[at:at] = b"\xff" * 9 + b"\x01"  # the largest varint
    return bytes(data)


def fuzz(seconds: float, seed: int, t: Toy, channel: grpc.Channel, least: int = 0) -> Report:
    """For so long, and `least` calls at least."""
    report, choose, sound = Report(), random.Random(seed), seeds()
    until = time.monotonic() + seconds
    while time.monotonic() < until or sum(report.calls.values()) < least:
        method = choose.choice(SERVICE.methods)
        least = 0 if method.client_streaming else 1  # a unary call without its message waits for it, by gRPC's rules
        count = max(least, choose.choice((0, 1, 1, 2, 5)))
        one_call(report, channel, method.name, [damaged(choose, sound) for _ in range(count)])
        if sum(report.calls.values()) % 50 == 0:
            honest(report, t, channel)
    honest(report, t, channel)
    return report


def one_call(report: Report, channel: grpc.Channel, name: str, messages: list[bytes]) -> None:
    """Streams of bytes, whatever the method takes."""
    call = channel.stream_stream(f"/{SERVICE.full_name}/{name}")(iter(messages), timeout=MOST_S)
    began = time.monotonic()
    try:
        for number, _ in enumerate(call):
            if number > 20:
                call.cancel()
        status = grpc.StatusCode.OK
    except grpc.RpcError as error:
        status = error.code()
    report.slowest_s = max(report.slowest_s, time.monotonic() - began)
    report.calls[name] += 1
    report.statuses[status.name] += 1
    if status not in REFUSALS and not (
        name == "Info" and status is grpc.StatusCode.UNKNOWN
    ):  # gRPC's own, of unary ones
        report.findings.append(f"{name} ended with {status.name}: {[message.hex() for message in messages]}")


def honest(report: Report, t: Toy, channel: grpc.Channel) -> None:
    """Whatever came before, this is answered, and then nothing is held."""
    call = channel.stream_stream(
        f"/{SERVICE.full_name}/Generate",
        request_serializer=pb.GenerateIn.SerializeToString,
        response_deserializer=pb.GenerateOut.FromString,
    )
    try:
        messages = list(call(iter([pb.GenerateIn(start=start(*HONEST))]), timeout=MOST_S))
        got = [message.token.id for message in messages if message.WhichOneof("message") == "token"]
        if got != answer(list(HONEST), len(got)) or not got:
            report.findings.append(f"an honest request got {got}")
    except grpc.RpcError as error:
        report.findings.append(f"an honest request got {error.code().name}")
    if not soon(lambda: t.pool.free == t.pool.total):
        report.findings.append(f"{t.pool.total - t.pool.free} pages are still held")
    report.honest += 1


def run(seconds: float, seed: int, least: int = 0) -> Report:
    with toy() as t, serving(t.engine, snapshot_timeout_s=0.2) as running, channel_to(running) as channel:
        return fuzz(seconds, seed, t, channel, least)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    args = parser.parse_args()
    report = run(60 * args.minutes, args.seed)
    print(f"seed {args.seed}: {report}", *report.findings[:20], sep="\n  ")
    if args.out:
        note = f"{args.minutes:g} minutes, seed {args.seed}; {report}"
        figures.append(args.out, "hostile.messages_findings", len(report.findings), "calls", note)
    return bool(report.findings)


if __name__ == "__main__":
    sys.exit(main())
