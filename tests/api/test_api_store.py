"""The store's troubles: dead, slow, full, evicting, full of rubbish. A chat goes on, rightly and in time."""

import dataclasses
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from running_api import PATIENT_MS, RunningApi
from scripted_engine import ScriptedEngine
from slow_proxy import SlowProxy
from timing import in_time

from services.api.embedded import EmbeddedStore
from services.api.keys import USED, boundary_keys, space_of
from services.api.model_folder import ModelFolder
from services.api.records import Head, Record, RecordMemory, head_from_field, record_from_fields, to_fields

SYSTEM = {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."}
SLOW_S = 10.0
DIALOG = [SYSTEM, {"role": "user", "content": "Please tell me what you can do for me today."}]


def next_turn(reply: Any) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    return [*DIALOG, answer, {"role": "user", "content": "And what else?"}]


def chat(api: RunningApi, *messages: dict[str, Any]) -> tuple[Any, int]:
    """The reply, which must be the right one, and its restored tokens; all snapshots are stored when this returns."""
    reply = api.chat(*messages)
    assert reply["choices"][0]["message"]["content"] == "Hello there, friend."
    api.saved()
    return reply, reply["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def proxy(store: EmbeddedStore) -> Iterator[SlowProxy]:
    with SlowProxy(str(store.socket_path), store.password) as between:
        yield between


@pytest.fixture
def cold(engine: ScriptedEngine) -> ScriptedEngine:
    """An engine that keeps nothing: what is restored came from the store."""
    engine.keeps_hot = False
    return engine


def test_what_is_in_the_store(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, client: Any, cold: ScriptedEngine
) -> None:
    chat(start_api(redis_url=store.url, snapshot_ttl_s=1000), *DIALOG)
    names = [name for name in client.keys("*") if name != USED.encode()]
    texts = [name for name in names if name.startswith(b"thimble:3:text:")]
    states = [name for name in names if name.startswith(b"thimble:3:state:")]
    blocks = [name for name in names if name.startswith(b"thimble:3:block:")]
    assert len(texts) == len(states) == 3
    sent = [count for call in (*cold.calls, *cold.idle_calls) for count in call.sent_blocks]
    assert len(blocks) == sum(sent) > 1
    assert len(names) == 6 + len(blocks)
    for name in names:
        assert 900 < client.ttl(name) <= 1000
    for name in states:
        fields = client.hgetall(name)
        assert int(fields.pop(b"size")) == sum(map(len, fields.values())) == cold.payload_bytes
        assert max(map(len, fields.values())) <= 1024 * 1024


def test_use_renews_the_ttl(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, client: Any, cold: ScriptedEngine
) -> None:
    api = start_api(redis_url=store.url, snapshot_ttl_s=1000)
    reply, _ = chat(api, *DIALOG)
    for name in client.keys("*"):
        client.expire(name, 10)
    assert chat(api, *next_turn(reply))[1] > 0
    assert sum(client.ttl(name) > 900 for name in client.keys("*")) >= 4


def test_a_dead_store_costs_only_its_snapshots(
    start_api: Callable[..., RunningApi], proxy: SlowProxy, cold: ScriptedEngine
) -> None:
    api = start_api(redis_url=proxy.url)
    reply, _ = chat(api, *DIALOG)
    assert chat(api, *next_turn(reply))[1] > 0
    proxy.go_away()
    for _ in range(3):
        began = time.monotonic()
        assert chat(api, *next_turn(reply))[1] == 0
        assert time.monotonic() - began < PATIENT_MS / 2000
    assert api.metric("snapshot_store_available") == 0
    assert cold.calls[-1].start.heads_only
    assert api.client.get("/ready").json()["snapshot_store"] == "not available"
    proxy.come_back()
    assert in_time(lambda: api.metric("snapshot_store_available") == 1), "it does not recover by itself"
    assert chat(api, *next_turn(reply))[1] > 0


def test_a_store_that_was_never_there(start_api: Callable[..., RunningApi], engine: ScriptedEngine) -> None:
    api = start_api(redis_url="redis://127.0.0.1:1")
    reply, _ = chat(api, *DIALOG)
    assert chat(api, *next_turn(reply))[1] > 0, "the engine's hot states are of use all the same"


def test_a_slow_store_delays_one_chat_by_its_timeout(
    start_api: Callable[..., RunningApi], proxy: SlowProxy, cold: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    api = start_api(redis_url=proxy.url)
    reply, _ = chat(api, *DIALOG)
    api.store_may_take(0.3)
    proxy.delay_s = SLOW_S
    for _ in range(4):
        began = time.monotonic()
        api.chat(*next_turn(reply))
        assert time.monotonic() - began < SLOW_S
    assert all(call.start.heads_only for call in cold.calls[-4:])
    assert sum("left alone" in line.message for line in caplog.records) == 1, "more than one waited"


def test_a_store_that_gets_slow_while_it_is_read(
    start_api: Callable[..., RunningApi], proxy: SlowProxy, cold: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It offers what it cannot send: the engine is told, and reads the prompt from its first token."""
    api = start_api(redis_url=proxy.url)
    reply, _ = chat(api, *DIALOG)
    real = api.app.state.chats.snapshots.send

    def slow(*args: Any) -> Any:
        api.store_may_take(0.3)
        proxy.delay_s = SLOW_S
        return real(*args)

    monkeypatch.setattr(api.app.state.chats.snapshots, "send", slow)
    began = time.monotonic()
    answer = api.chat(*next_turn(reply))
    assert time.monotonic() - began < SLOW_S
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert cold.calls[-1].source == "REFUSED"


def test_a_full_store(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, client: Any, cold: ScriptedEngine
) -> None:
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 3_500_000)
    api = start_api(redis_url=store.url)
    reply, _ = chat(api, *DIALOG)
    assert api.metric("snapshot_writes_total", result="refused") > 0
    assert api.metric("snapshot_store_available") == 1
    chat(api, *next_turn(reply))
    for name in client.keys("thimble:3:state:*"):
        assert client.hexists(name, "size"), "half a payload stayed behind"


def test_eviction_takes_whole_payloads(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, client: Any, cold: ScriptedEngine
) -> None:
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 12_000_000)
    api = start_api(redis_url=store.url)
    for number in range(5):
        chat(api, SYSTEM, {"role": "user", "content": f"This is quite another question with the number {number}."})
    assert client.info("stats")["evicted_keys"] > 0
    time.sleep(1.1)  # the server's clock of use has seconds
    reply, _ = chat(api, *DIALOG)
    assert chat(api, *next_turn(reply))[1] > 0
    for name in client.keys("thimble:3:state:*"):
        assert client.hlen(name) in (0, 4), "whole, or gone meanwhile"


def test_two_dialogs_that_take_turns_keep_being_found(
    start_api: Callable[..., RunningApi], store: EmbeddedStore, client: Any, cold: ScriptedEngine
) -> None:
    """In a store that holds six or seven of their eight states: looking at one must not keep others alive."""
    client.config_set("maxmemory", client.info("memory")["used_memory"] + int(9.6 * cold.payload_bytes))
    api = start_api(redis_url=store.url)
    dialogs = [[SYSTEM, {"role": "user", "content": f"This is dialog number {number}."}] for number in range(2)]
    found = []
    for _ in range(5):
        for dialog in dialogs:
            reply, cached_tokens = chat(api, *dialog)
            api.saved()
            found.append(cached_tokens >= 49)  # more than the first turn, which both share
            dialog += [reply["choices"][0]["message"], {"role": "user", "content": "And what else is there to say?"}]
            time.sleep(1.2 - time.time() % 1)  # the server's clock of use has seconds, and is set ten times in each
    assert all(found[2:])
    assert len(client.keys("thimble:3:state:*")) < 8, "they do not all fit"


def spoil_type(client: Any) -> None:
    for name in client.keys("*"):
        client.delete(name)
        client.set(name, b"something else")


def spoil_records(client: Any) -> None:
    for name in client.keys("thimble:3:text:*"):
        client.hset(name, mapping={"head": b"\xff" * 40, "ids": b"\x01"})


def spoil_ids(client: Any) -> None:
    """Well-formed records that claim other ids: the check against the text must find it."""
    for name in client.keys("thimble:3:text:*"):
        ids = bytearray(client.hget(name, "ids"))
        ids[40:44] = (77).to_bytes(4, "little")
        client.hset(name, "ids", bytes(ids))


def add_unknown_ids(client: Any) -> None:
    """The text is spelled right, but by ids that the model does not have between the others."""
    for name in client.keys("thimble:3:text:*"):
        head = head_from_field(client.hget(name, "head"))
        assert head is not None
        ids = array("I", client.hget(name, "ids"))
        ids.insert(8, 999_999)
        fields = to_fields(Record(dataclasses.replace(head, ids=head.ids + 1), ids))
        client.hset(name, mapping={"head": fields["head"], "ids": fields["ids"]})


def spoil_payloads(client: Any) -> None:
    for name in client.keys("thimble:3:state:*"):
        chunk = client.hget(name, "1")
        client.hset(name, "1", b"\0" * len(chunk))


def spoil_lengths(client: Any) -> None:
    for name in client.keys("thimble:3:state:*"):
        client.hset(name, "1", b"short")


def drop_chunks(client: Any) -> None:
    for name in client.keys("thimble:3:state:*"):
        client.hdel(name, "1")


def drop_payloads(client: Any) -> None:
    client.delete(*client.keys("thimble:3:state:*"))


def drop_a_block(client: Any) -> None:
    """The one that all states have."""
    blocks = client.hget(client.keys("thimble:3:text:*")[0], "blocks")
    client.delete(b"thimble:3:block:" + blocks[:16].hex().encode())


def spoil_blocks(client: Any) -> None:
    for name in client.keys("thimble:3:block:*"):
        client.set(name, bytes(client.strlen(name)))


def spoil_block_types(client: Any) -> None:
    for name in client.keys("thimble:3:block:*"):
        client.delete(name)
        client.hset(name, "x", "y")


def spoil_block_names(client: Any) -> None:
    for name in client.keys("thimble:3:text:*"):
        client.hset(name, "blocks", b"\xff" * 7)


def drop_records(client: Any) -> None:
    client.delete(*client.keys("thimble:3:text:*"))


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_type,
        spoil_records,
        spoil_ids,
        add_unknown_ids,
        spoil_payloads,
        spoil_lengths,
        drop_chunks,
        drop_payloads,
        drop_records,
        drop_a_block,
        spoil_blocks,
        spoil_block_types,
        spoil_block_names,
    ],
)
def test_rubbish_under_our_keys(
    start_api: Callable[..., RunningApi],
    store: EmbeddedStore,
    client: Any,
    cold: ScriptedEngine,
    folder: ModelFolder,
    spoil: Callable[[Any], None],
) -> None:
    reply, _ = chat(start_api(redis_url=store.url), *DIALOG)
    spoil(client)
    api = start_api(redis_url=store.url)  # remembers nothing
    again, restored = chat(api, *next_turn(reply))
    assert restored == 0
    ids = list(cold.calls[-1].start.ids)
    prompt = folder.template.prompt(next_turn(reply), None, {"enable_thinking": False})
    assert ids == folder.tokenizer.encode(prompt.text), "the prompt was spoilt"
    if spoil in (spoil_payloads, spoil_blocks):
        assert cold.calls[-1].source == "REFUSED"
    if spoil in (spoil_ids, add_unknown_ids):
        assert api.metric("snapshot_mismatches_total") > 0
    assert chat(api, *next_turn(reply))[1] > 0, "the rubbish was not replaced"
    assert again["usage"]["prompt_tokens"] == len(ids)


def test_a_state_by_other_ids_than_a_longer_one_stays(
    start_api: Callable[..., RunningApi],
    store: EmbeddedStore,
    client: Any,
    cold: ScriptedEngine,
    folder: ModelFolder,
) -> None:
    """One api has the answer as it was written, letter by letter, another one as it is tokenised. The longer dialog is
    the other one's: what is stored of the first still fits its text, and is found where there is no longer one."""

    def names(kind: str) -> set[bytes]:
        return set(client.keys(f"thimble:3:{kind}:*"))

    cold.script, usual = [i for letter in "Hello there, friend." for i in folder.tokenizer.encode(letter)], cold.script
    reply, _ = chat(start_api(redis_url=store.url, read_ahead=False), *DIALOG)
    as_written = {name: client.hgetall(name) for name in names("text")}
    states = names("state")
    client.delete(*as_written)
    cold.script = usual
    chat(start_api(redis_url=store.url, read_ahead=False), *next_turn(reply))
    as_tokenised = names("text")
    client.delete(*names("state") - states)  # evicted
    for name in as_written.keys() - as_tokenised:
        client.hset(name, mapping=as_written[name])

    api = start_api(redis_url=store.url, read_ahead=False)
    assert chat(api, *next_turn(reply))[1] == 0, "ids of two kinds were mixed"
    assert api.metric("snapshot_mismatches_total") == 0
    client.delete(*as_tokenised)
    _, restored = chat(start_api(redis_url=store.url, read_ahead=False), *next_turn(reply))
    assert restored > len(cold.calls[0].start.ids), "up to the end of the answer"


def test_a_server_that_is_no_redis(start_api: Callable[..., RunningApi], engine: ScriptedEngine) -> None:
    api = start_api()
    other = start_api(redis_url=api.url.replace("http", "redis"), redis_timeout_ms=300)
    reply, _ = chat(other, *DIALOG)
    chat(other, *next_turn(reply))


def test_records_survive_their_form_and_nothing_else_does() -> None:
    known = Head(b"\x01" * 16, ids=3, tokens=2, size_bytes=10, chunks=1, blocks=1)
    record = Record(known, array("I", (7, 4095, 131071)), (b"b" * 16,))
    fields = to_fields(record)
    head = head_from_field(fields["head"])
    assert head == record.head
    assert record_from_fields(head, fields["ids"], fields["blocks"]) == record
    for wrong in (None, b"", b"x", fields["head"][:20], b"\0" * 40, 5, ValueError()):
        assert head_from_field(wrong) is None
    for wrong in (None, b"", fields["ids"][:-1], fields["ids"] + b"\0" * 4):
        assert record_from_fields(head, wrong, fields["blocks"]) is None
    for wrong in (None, b"", fields["blocks"][:-1], fields["blocks"] * 2):
        assert record_from_fields(head, fields["ids"], wrong) is None
    with pytest.raises(ValueError, match="fit"):
        Head(b"\x01", ids=2, tokens=3, size_bytes=0, chunks=0)


def test_memory_of_records_is_bounded() -> None:
    memory = RecordMemory(most_records=3, most_ids=100)
    for number in range(5):
        memory.put(bytes([number]), Record(Head(b"s", 10, 10, 0, 0), array("I", range(10))))
    assert len(memory) == 3
    assert set(memory.find({0: b"\0", 2: b"\2", 4: b"\4"})) == {2, 4}
    memory.put(b"x", Record(Head(b"s", 85, 85, 0, 0), array("I", range(85))))
    assert set(memory.find({4: b"\4", 9: b"x"})) == {4, 9}
    assert len(memory) == 2
    memory.forget(b"x")
    assert set(memory.find({9: b"x"})) == set()


def test_a_key_names_all_that_matters() -> None:
    space = space_of("model", "arithmetic")
    key = boundary_keys(space, "some text", [4, 9])
    assert boundary_keys(space, "some other", [4])[4] == key[4]
    others = [
        boundary_keys(space, "some texT", [9])[9],
        boundary_keys(space, "some text ", [10])[10],
        boundary_keys(space_of("other", "arithmetic"), "some text", [9])[9],
        boundary_keys(space_of("model", "other"), "some text", [9])[9],
        boundary_keys(space_of("modela", "rithmetic"), "some text", [9])[9],
        boundary_keys(space, "some text", [9], images=[(2, b"cat")])[9],
        boundary_keys(space, "some text", [9], images=[(2, b"dog")])[9],
        boundary_keys(space, "some \ud80bext", [9])[9],
    ]
    assert len({key[9], *others}) == len(others) + 1
    assert boundary_keys(space, "some text", [4, 9], images=[(5, b"cat")])[4] == key[4], "a picture behind the boundary"
