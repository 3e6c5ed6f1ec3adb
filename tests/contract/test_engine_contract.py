"""What proto/thimble/v1/engine.proto promises, asked of real engine processes by a client that knows only the proto."""

import queue
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from engine_process import TESTED_DEVICE, EngineProcess
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from services.engine.experts.store import Store
from services.engine.request import Reason, Source
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub

MIB = 1 << 20
STOP = [2, 11]


def prompt(store: Store, question: str) -> list[int]:
    text = f"<|im_start|>system\n<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
    text += "<|im_start|>assistant\n<think></think>"
    tokenizer = Tokenizer.from_file(str(store.folder / "tokenizer.json"))
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="session")
def ids(demo_store: Store) -> list[int]:
    return prompt(demo_store, "What is the capital of France?")


@pytest.fixture(scope="session")
def story(demo_store: Store) -> list[int]:
    """A question with many answers."""
    return prompt(demo_store, "Tell me a short story about a fox.")


def start(ids: list[int], **fields: Any) -> pb.GenerateIn:
    return pb.GenerateIn(start=pb.Start(**{"ids": ids, "max_tokens": 24, "stop_ids": STOP, **fields}))


def ask(channel: grpc.Channel, *messages: pb.GenerateIn) -> list[pb.GenerateOut]:
    return list(EngineStub(channel).Generate(iter(messages), timeout=100))


def kinds(messages: list[pb.GenerateOut]) -> list[str | None]:
    """Their kinds, runs of one kind shown once."""
    every = [message.WhichOneof("message") for message in messages]
    return [kind for kind, before in zip(every, [None, *every], strict=False) if kind != before]


def tokens(messages: list[pb.GenerateOut]) -> list[int]:
    return [message.token.id for message in messages if message.WhichOneof("message") == "token"]


def finish(messages: list[pb.GenerateOut]) -> pb.Finish:
    (found,) = (message.finish for message in messages if message.WhichOneof("message") == "finish")
    return found


def payloads(messages: list[pb.GenerateOut]) -> list[tuple[pb.StateRef, list[bytes]]]:
    """Each snapshot with its chunks, checked against its head."""
    found: list[tuple[pb.StateRef, list[bytes]]] = []
    for message in messages:
        if message.WhichOneof("message") == "snapshot":
            found.append((message.snapshot.state, []))
            due = message.snapshot.chunks
        elif message.WhichOneof("message") == "chunk":
            chunks = found[-1][1]
            assert message.chunk.index == len(chunks) < due
            assert 0 < len(message.chunk.data) <= MIB
            chunks.append(message.chunk.data)
    return found


def test_a_generation_has_the_order_that_the_contract_gives(channel: grpc.Channel, ids: list[int]) -> None:
    messages = ask(channel, start(ids, snapshot_at=[5, len(ids) - 1], snapshot_answer=True))
    assert kinds(messages) == ["restore", "progress", "token", "finish", *["snapshot", "chunk"] * 3]
    assert messages[0].restore.source == pb.Restore.NONE
    progress = [m.progress for m in messages if m.WhichOneof("message") == "progress"]
    assert [p.done_tokens for p in progress][:1] == [5]
    assert (progress[-1].done_tokens, progress[-1].total_tokens) == (len(ids), len(ids))
    end = finish(messages)
    assert (end.reason, end.prompt_tokens, end.cached_tokens, end.executed_tokens) == (1, len(ids), 0, len(ids))
    sampled = tokens(messages)
    assert (end.generated_tokens, sampled[-1]) == (len(sampled), 11), "the stop id is reported"
    assert [(state.tokens, sum(map(len, chunks))) for state, chunks in payloads(messages)] == [
        (count, state.size_bytes)
        for (state, _), count in zip(payloads(messages), (5, len(ids) - 1, len(ids) + len(sampled) - 1), strict=True)
    ]


def test_hot_sent_and_refused_states_all_give_the_same_answer(
    channel: grpc.Channel, scarce_channel: grpc.Channel, ids: list[int]
) -> None:
    """On the engine that took it, on another one with another cache, and after a payload that is no good."""
    first = ask(channel, start(ids, snapshot_at=[len(ids) - 2]))
    ((state, chunks),) = payloads(first)
    offer = pb.StateRef(state_id=state.state_id, tokens=state.tokens, blocks=state.blocks)
    hot = ask(channel, start(ids, offers=[offer]))
    assert hot[0].restore.source == pb.Restore.HOT

    def offered(data: list[bytes]) -> list[pb.GenerateOut]:
        uploads = [pb.GenerateIn(chunk=pb.SnapshotChunk(index=i, data=part)) for i, part in enumerate(data)]
        return ask_when_told(scarce_channel, start(ids, offers=[state]), uploads)

    refused = offered([chunks[0][:-1] + bytes([chunks[0][-1] ^ 1]), *chunks[1:]])
    missing = offered(chunks[:-1])
    sent = offered(chunks)
    assert [m.restore.source for m in refused[:2]] == [pb.Restore.SEND, pb.Restore.REFUSED]
    assert [m.restore.source for m in missing[:2]] == [pb.Restore.SEND, pb.Restore.REFUSED]
    assert [m.restore.source for m in sent[:2]] == [pb.Restore.SEND, pb.Restore.SENT]
    executed = [finish(m).executed_tokens for m in (first, hot, refused, missing, sent)]
    assert executed == [len(ids), 2, len(ids), len(ids), 2]
    assert tokens(first) == tokens(hot) == tokens(refused) == tokens(missing) == tokens(sent)


def ask_when_told(channel: grpc.Channel, begin: pb.GenerateIn, uploads: list[pb.GenerateIn]) -> list[pb.GenerateOut]:
    """Send `uploads` once the engine asks for them, then half-close."""
    outbox: queue.SimpleQueue[pb.GenerateIn | None] = queue.SimpleQueue()
    outbox.put(begin)
    call = EngineStub(channel).Generate(iter(outbox.get, None), timeout=100)
    asked = next(call)
    for message in (*uploads, None):
        outbox.put(message)
    return [asked, *call]


def test_heads_only_names_states_without_their_payloads(channel: grpc.Channel, ids: list[int]) -> None:
    messages = ask(channel, start(ids, snapshot_answer=True, heads_only=True))
    assert kinds(messages) == ["restore", "progress", "token", "finish", "snapshot"]
    assert messages[-1].snapshot.chunks == 0
    assert messages[-1].snapshot.state.size_bytes > 100_000, "of the payload that does not come"


def test_sampling_is_a_function_of_the_seed(
    channel: grpc.Channel, scarce_channel: grpc.Channel, story: list[int]
) -> None:
    def sampled(channel: grpc.Channel, seed: int) -> list[int]:
        return tokens(ask(channel, start(story, sampling=pb.Sampling(temperature=1.5, top_p=0.95, seed=seed))))

    assert sampled(channel, 7) == sampled(scarce_channel, 7)
    assert len({tuple(sampled(channel, seed)) for seed in range(4)}) > 1


def test_an_unset_top_p_is_one(channel: grpc.Channel, story: list[int]) -> None:
    unset, one = (pb.Sampling(temperature=1.5, seed=3, top_p=top_p) for top_p in (0, 1))
    assert tokens(ask(channel, start(story, sampling=unset))) == tokens(ask(channel, start(story, sampling=one)))


def test_max_tokens_is_the_length(channel: grpc.Channel, ids: list[int]) -> None:
    messages = ask(channel, start(ids, max_tokens=3, stop_ids=[]))
    assert (finish(messages).reason, len(tokens(messages))) == (pb.Finish.LENGTH, 3)


def test_three_calls_at_once_answer_as_they_do_alone(channel: grpc.Channel, ids: list[int]) -> None:
    prompts = [ids, ids[:-8], ids[3:]]
    alone = [tokens(ask(channel, start(prompt))) for prompt in prompts]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda prompt: tokens(ask(channel, start(prompt))), prompts))
    assert together == alone


def test_limits_come_from_info_and_hold(channel: grpc.Channel, scarce_channel: grpc.Channel, ids: list[int]) -> None:
    info, scarce = (EngineStub(c).Info(pb.InfoRequest()) for c in (channel, scarce_channel))
    assert (info.vocab_size, info.context_tokens, info.vision) == (4096, 4096, True)
    assert (info.device == "cpu") == (TESTED_DEVICE == "cpu")
    assert (scarce.max_sequences, scarce.queue_limit) == (2, 1)
    assert info.model_fingerprint == scarce.model_fingerprint
    assert info.arithmetic_fingerprint == scarce.arithmetic_fingerprint, "a cache size is not arithmetic"
    fits = info.context_tokens - len(ids)
    assert finish(ask(channel, start(ids, max_tokens=fits))).generated_tokens > 0
    for wrong in (start(ids, max_tokens=fits + 1), start([info.vocab_size]), start([])):
        with pytest.raises(grpc.RpcError) as caught:
            ask(channel, wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert dict(caught.value.trailing_metadata())["thimble-code"] in ("context_too_long", "bad_ids")


def test_a_full_queue_is_refused_before_it_is_taken_in(scarce_channel: grpc.Channel, ids: list[int]) -> None:
    stub = EngineStub(scarce_channel)
    calls = [stub.Generate(iter([start(ids, max_tokens=3000, stop_ids=[])]), timeout=100) for _ in range(3)]
    for call in calls:
        assert call.initial_metadata() is not None, "taken in, though one of them waits"
    with pytest.raises(grpc.RpcError) as caught:
        ask(scarce_channel, start(ids))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(caught.value.trailing_metadata())["thimble-code"] == "queue_full"
    assert 1 <= int(dict(caught.value.trailing_metadata())["thimble-retry-after-s"]) <= 600
    for call in calls:
        call.cancel()


def test_vision_wants_an_ask_before_data(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        EngineStub(channel).Vision(iter([pb.VisionIn(data=b"\x89PNG")]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_health_and_reflection_are_the_standard_services(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "thimble.v1.Engine"):
        status = health.Check(health_pb2.HealthCheckRequest(service=service)).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    database = ProtoReflectionDescriptorDatabase(channel)
    assert "thimble.v1.Engine" in database.get_services()
    ours = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(ours)
    assert database.FindFileContainingSymbol("thimble.v1.Engine") == ours


def test_the_engines_words_are_the_contracts() -> None:
    assert {source.name: source.value for source in Source} == dict(pb.Restore.Source.items())
    assert {reason.name: reason.value for reason in Reason} | {"UNKNOWN": 0} == dict(pb.Finish.Reason.items())


def test_metrics_are_served_beside_it(ample: EngineProcess, channel: grpc.Channel, ids: list[int]) -> None:
    before = scrape(ample.metrics_url)
    end = finish(ask(channel, start(ids)))
    after = scrape(ample.metrics_url)
    assert after["thimble_prompt_tokens_total"] - before["thimble_prompt_tokens_total"] == end.executed_tokens
    assert after["thimble_generation_tokens_total"] - before["thimble_generation_tokens_total"] == end.generated_tokens


def scrape(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {sample.name: sample.value for family in families for sample in family.samples}
