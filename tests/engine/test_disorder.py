"""Clients that do whatever clients do, seeded: every answer that is finished is right, and nothing is left behind."""

import queue
import random
import threading
from dataclasses import replace

from toy_engine import INFO, Toy, answer, toy

from services.engine.errors import StoreError
from services.engine.model import Segment
from services.engine.request import MOST_OFFERS, Event, Failed, Finish, Request, Restore, Snapshot, Source, Token

CLIENTS, ROUNDS = 5, 40
PROMPTS = [tuple(random.Random(n).choices(range(49), k=5 + 9 * n)) for n in range(6)]
DEADLY = 49  # an id whose step fails


class Client:
    """Asks, reads, stops, cancels, sends good and bad payloads. `kept` is where clients store what they are given."""

    def __init__(self, t: Toy, seed: int, kept: dict[bytes, Snapshot]) -> None:
        self.t, self.random, self.kept = t, random.Random(seed), kept
        self.finished = self.failed = 0

    def run(self) -> None:
        for _ in range(ROUNDS):
            self.ask(self.random.choice(PROMPTS))

    def ask(self, prompt: tuple[int, ...]) -> None:
        choose = self.random
        ids = (*prompt, DEADLY) if choose.random() < 0.1 else prompt
        known = [snapshot.state for snapshot in list(self.kept.values())]
        offers = sorted(known, key=lambda ref: -ref.tokens)[:MOST_OFFERS]
        positions = tuple(sorted(choose.sample(range(1, len(ids)), k=choose.randrange(2))))
        request = Request("r", ids, 1 + choose.randrange(30), snapshot_at=positions, snapshot_answer=True)
        events: queue.Queue[Event] = queue.Queue()
        handle = self.t.engine.submit(replace(request, offers=tuple(offers)), events.put)
        patience = choose.choice([1, 5, 1000, 1000])
        tokens: list[int] = []
        try:
            while patience:
                patience -= 1
                event = events.get(timeout=60)
                match event:
                    case Token(id_):
                        tokens.append(id_)
                        if choose.random() < 0.02:
                            handle.stop()
                    case Restore(source=Source.SEND, state=state):
                        assert state is not None
                        kept = self.kept[state.state_id]
                        chunks, blocks = kept.chunks, kept.blocks
                        whole = [*chunks, *(blocks[number] for number in event.need)]
                        for chunk in whole if choose.random() < 0.6 else [bytes([1 ^ chunks[0][0]]) + chunks[0][1:]]:
                            handle.restore(chunk)
                    case Failed(error):
                        assert isinstance(error, StoreError)
                        self.failed += 1
                        return
                    case Finish() as finish:
                        assert tokens == answer(list(ids), finish.generated_tokens)
                        self.kept.update((s.state.state_id, s) for s in finish.snapshots if s.state.tokens < len(ids))
                        self.finished += 1
                        return
        finally:
            handle.cancel()


def strike(segments: list[Segment]) -> None:
    if any(DEADLY in segment.ids for segment in segments):
        raise StoreError("this block is damaged")


def test_disorder_leaves_nothing_behind() -> None:
    with toy(replace(INFO, max_sequences=3, queue_limit=100), pages=5, hot_bytes=12_000) as t:
        t.model.before = strike
        kept: dict[bytes, Snapshot] = {}
        clients = [Client(t, seed, kept) for seed in range(CLIENTS)]
        threads = [threading.Thread(target=client.run) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=100)
            assert not thread.is_alive()
        t.engine.close(20.0)
        assert t.engine.ended.exception() is None, "conservation held whenever nothing ran"
        assert t.scheduler.sequences == []
        assert len(t.engine._open) == 0
        assert all(not stored.pins for stored in t.hot._states.values())
        assert t.pool.free == t.pool.total
        answered = sum(t.value("request_success_total", finished_reason=reason) for reason in ("stop", "length"))
        assert 0 < sum(client.finished for client in clients) <= answered
        results = {s: t.value("snapshot_lookups_total", result=s) for s in ("none", "hot", "sent", "refused")}
        assert min(results.values()) > 0, f"every way to begin was taken: {results}"
        assert sum(client.failed for client in clients) > 0
