"""Pictures through a real engine on a small random model that sees: what a request with one is answered."""

import asyncio
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plain_kernels
import pytest
import torch
from demo_engine import Demo, demo
from drawn import corners, encoded, with_orientation
from PIL import Image
from toy_engine import Call

from services.engine.errors import ContextError, PictureError, PictureGoneError, PositionError, UnsupportedError
from services.engine.experts.store import Store
from services.engine.request import Picture, Request, Restore, Snapshot, Source
from services.engine.vision.device import DeviceTower
from services.engine.vision.ids import FIRST, picture_ids
from services.engine.vision.sight import Ask, Missing, Resolution, Seen
from services.tools import oracle, small_checkpoint
from services.tools.repack import repack


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("sees")
    return repack(small_checkpoint.write(folder / "c", "3.5-super-vl"), folder / "store", say=lambda text: None)


@pytest.fixture(scope="module")
def engine(store: Store) -> Iterator[Demo]:
    with demo(store, prefill_chunk_tokens=8) as running:
        yield running


def ask(data: bytes, resolution: Resolution = Resolution.NORMAL, sent: bool = True) -> Ask:
    return Ask(hashlib.sha256(data).digest(), resolution, data if sent else None)


def see(engine: Demo, *asks: Ask, text_tokens: int = 10, **more: Any) -> list[Seen] | Missing:
    return asyncio.run(engine.engine.see(asks, text_tokens, **more))


def seen(engine: Demo, *pictures: bytes, **more: Any) -> list[Seen]:
    found = see(engine, *map(ask, pictures), **more)
    assert isinstance(found, list)
    return found


def question(*pictures: Seen, **more: Any) -> Request:
    """5 ids, each picture behind two tags, 3 ids."""
    ids, places = [1, 2, 3, 4, 5], []
    for picture in pictures:
        ids.append(19)
        places.append(Picture(picture.handle, len(ids), picture.tokens))
        ids += [18] * picture.tokens + [20]
    return Request("r", (*ids, 6, 7, 8), 6, pictures=tuple(places), logprobs=5, **more)


def answer(engine: Demo, request: Request) -> tuple[list[int], list[Any], Call]:
    """Ids, what the model thought of them, and the call."""
    call = Call(engine.engine, request)
    call.finish()
    call.handle.cancel()
    return call.tokens, [e.top for e in call.events if hasattr(e, "top")], call


FLAT = encoded(Image.new("RGB", (20, 12), (200, 30, 60)))
CORNERS = encoded(corners(20, 12))


def test_a_picture_is_asked_for_by_its_name_first(engine: Demo) -> None:
    fresh = encoded(Image.new("RGB", (14, 14), (1, 2, 3)))
    assert see(engine, ask(fresh, sent=False)) == Missing((0,))
    (sent,) = seen(engine, fresh)
    assert sent.tokens == 16  # 7 x 7 patches grow to 8 x 8
    assert see(engine, ask(fresh, sent=False)) == [sent]
    assert see(engine, ask(FLAT), ask(fresh, sent=False)) == [seen(engine, FLAT)[0], sent]


def test_the_same_pixels_are_worked_on_once(engine: Demo) -> None:
    """Another file of the same picture, turned by a note or not, is the same picture."""
    plain = seen(engine, encoded(corners(), "PNG"))
    cache = engine.engine.sight.cache
    used_bytes = cache.used_bytes
    assert seen(engine, encoded(corners(), "WEBP", lossless=True), with_orientation(6, "PNG")) == plain * 2
    assert cache.used_bytes == used_bytes
    cache.check()


def test_a_picture_is_read_by_what_the_engine_was_given(
    engine: Demo, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that a card goes, here on the processor: through the same cache, and as near as BF16 is."""
    sight = engine.engine.sight
    fresh = encoded(Image.effect_noise((14, 14), 60).convert("RGB"))
    (plain,) = seen(engine, fresh)
    plain_kernels.use(monkeypatch)
    tower = DeviceTower(sight.weights, torch.device("cpu"))
    with demo(store) as other:
        monkeypatch.setattr(other.engine.sight, "_read", tower.embed)
        (found,) = seen(other, fresh)
        assert found.tokens == plain.tokens
        kept = [each.engine.sight.cache._entries for each in (engine, other)]
        rows = [next(e.rows for e in entries.values() if e.handle in (plain.handle, found.handle)) for entries in kept]
        assert float((rows[0] - rows[1]).abs().max() / rows[0].abs().max()) < 0.05
        assert float((rows[0].roll(1, 0) - rows[1]).abs().max() / rows[0].abs().max()) > 0.1
        assert len(tower.ring._reads) == len(tower.ring.order), "the other way was not taken"
    tower.close()


def test_what_a_picture_shows_changes_the_answer(engine: Demo) -> None:
    (flat,), (other,) = seen(engine, FLAT), seen(engine, CORNERS)
    assert flat.tokens == other.tokens
    assert flat.handle != other.handle
    first = answer(engine, question(flat))
    assert answer(engine, question(flat))[:2] == first[:2]
    assert answer(engine, question(other))[1] != first[1]
    words = Request("r", question(flat).ids, 6, logprobs=5)
    assert answer(engine, words)[1] != first[1], "without the picture its places are the token's own embedding"


def test_the_language_model_reads_rows_as_transformers_does(engine: Demo, store: Store) -> None:
    """A prompt with a picture through transformers, which gets the same rows in the same places."""
    (flat,) = seen(engine, FLAT)
    request = question(flat)
    reference = oracle.load(store.folder.parent / "c")
    with torch.inference_mode():
        words = reference.get_input_embeddings()(torch.tensor([request.ids]))
        (place,) = request.pictures
        rows = engine.engine.sight.cache.hold(request.pictures)
        words[0, place.position : place.position + place.tokens] = torch.cat(rows.rows(0, len(request.ids)))
        rows.release()
        wanted = reference(inputs_embeds=words).logits[0, -1].log_softmax(-1)
        blind = reference(torch.tensor([request.ids])).logits[0, -1].log_softmax(-1)
    told = answer(engine, request)[1][0]
    ids = [id_ for id_, _ in told]
    assert torch.allclose(torch.tensor([logprob for _, logprob in told]), wanted[ids], atol=2e-3)
    assert not torch.allclose(blind[ids], wanted[ids], atol=0.02), "the control: without the rows it would be seen"


def test_order_and_number_of_pictures_count(engine: Demo) -> None:
    flat, other = seen(engine, FLAT, CORNERS)
    told = [answer(engine, question(*order))[1] for order in ((flat, other), (other, flat), (flat, flat), (flat,))]
    assert all(one != another for one, another in itertools.combinations(told, 2))


def test_neither_chunks_nor_batch_mates_change_an_answer(engine: Demo, store: Store) -> None:
    (flat,) = seen(engine, FLAT)
    wanted = answer(engine, question(flat))[:2]
    with demo(store, prefill_chunk_tokens=500) as whole:
        assert seen(whole, FLAT) == [flat], "the same picture has the same name in another engine"
        mates = [Call(whole.engine, Request("m", (9, 8, 7, 6), 20)) for _ in range(2)]
        assert answer(whole, question(flat))[:2] == wanted
        for mate in mates:
            mate.finish()
            mate.handle.cancel()


def test_usage_counts_the_pictures_tokens(engine: Demo) -> None:
    (flat,) = seen(engine, FLAT)
    call = answer(engine, question(flat))[2]
    finish = call.events[-1]
    assert finish.prompt_tokens == 5 + 2 + flat.tokens + 3  # type: ignore[union-attr]


def test_a_stored_state_is_of_its_pictures(engine: Demo) -> None:
    """The same ids with another picture in their places are another prompt: the state does not fit."""
    flat, other = seen(engine, FLAT, CORNERS)
    end = 5 + 2 + flat.tokens
    call = Call(engine.engine, question(flat, snapshot_at=(end,)))
    call.finish()
    snapshot = call.events[-1].snapshots[0]  # type: ignore[union-attr]
    assert isinstance(snapshot, Snapshot)
    assert snapshot.state.tokens == end
    plain = answer(engine, question(flat))[:2]
    again = answer(engine, question(flat, offers=(snapshot.state,)))
    assert again[:2] == plain
    assert Restore(Source.HOT, snapshot.state) in again[2].events
    mixed = answer(engine, question(other, offers=(snapshot.state,)))
    assert Restore(Source.NONE) in mixed[2].events
    assert mixed[1] == answer(engine, question(other))[1]
    call.handle.cancel()


def test_a_sent_state_with_a_picture_is_taken(engine: Demo, store: Store) -> None:
    (flat,) = seen(engine, FLAT)
    call = Call(engine.engine, question(flat, snapshot_at=(5 + 2 + flat.tokens,)))
    call.finish()
    snapshot = call.events[-1].snapshots[0]  # type: ignore[union-attr]
    with demo(store) as other:
        seen(other, FLAT)
        offered = Call(other.engine, question(flat, offers=(snapshot.state,)))
        wanted = offered.until(Restore)
        assert isinstance(wanted, Restore)
        assert wanted.source is Source.SEND
        for chunk in [*snapshot.chunks, *(snapshot.blocks[number] for number in wanted.need)]:
            offered.handle.restore(chunk)
        finish = offered.finish()
        assert finish.cached_tokens == snapshot.state.tokens
        assert offered.tokens == call.tokens
        offered.handle.cancel()
    call.handle.cancel()


def test_several_share_what_the_context_leaves(engine: Demo) -> None:
    large = encoded(Image.effect_noise((100, 100), 50).convert("RGB"))
    alone = seen(engine, large)[0].tokens
    asks = [ask(large, Resolution.HIGH)] * 3
    room = engine.engine.info.context_tokens
    shared = see(engine, *asks, text_tokens=room - 100)
    assert isinstance(shared, list)
    assert sum(one.tokens for one in shared) <= 100
    assert shared[0].tokens > alone
    assert see(engine, ask(large, Resolution.LOW)) == [Seen(shared[0].handle, 4)] or alone > 4


def test_what_does_not_fit_is_refused_before_anything_is_computed(engine: Demo) -> None:
    fresh = encoded(Image.effect_noise((64, 64), 51).convert("RGB"))
    room = engine.engine.info.context_tokens
    with pytest.raises(ContextError, match=rf"do not fit the context of {room}"):
        see(engine, ask(fresh), text_tokens=room - 3)
    assert see(engine, ask(fresh, sent=False)) == Missing((0,)), "only its size is known"
    counted = see(engine, ask(fresh, sent=False), count_only=True)
    assert counted == [Seen(b"", seen(engine, fresh)[0].tokens)]


def test_wrong_pictures_are_refused(engine: Demo) -> None:
    with pytest.raises(PictureError, match="it is PDF"):
        see(engine, ask(b"%PDF-1.4"))
    with pytest.raises(PictureError, match="damaged or incomplete PNG"):
        see(engine, ask(CORNERS[: len(CORNERS) // 2]))
    with pytest.raises(PictureError, match="not those that its digest names"):
        see(engine, Ask(b"0" * 32, Resolution.LOW, CORNERS))
    with pytest.raises(PictureError, match="65 pictures"):
        see(engine, *[ask(CORNERS)] * 65)
    (found,) = seen(engine, CORNERS)
    for picture, error in (
        (Picture(b"unknown" * 5, 2, 4), PictureGoneError),
        (Picture(found.handle, 2, found.tokens - 1), PictureError),
        (Picture(found.handle, 15, found.tokens), PositionError),
        (Picture(found.handle, 0, 0), PositionError),
    ):
        with pytest.raises(error):
            engine.engine.submit(Request("r", (1,) * 20, 2, pictures=(picture,)), print)


def test_ids_of_pictures_cannot_be_sent(engine: Demo) -> None:
    """Only a picture that is held gets them."""
    with pytest.raises(Exception, match="the vocabulary is 0 to 95"):
        engine.engine.submit(Request("r", (1, FIRST), 2), print)
    ids = picture_ids(b"x", 300)
    assert min(ids) >= FIRST
    assert max(ids) < 1 << 32
    assert ids != picture_ids(b"y", 300)
    assert ids[:100] == picture_ids(b"x", 100)


def test_a_model_without_eyes_says_so(tmp_path: Path) -> None:
    blind = repack(small_checkpoint.write(tmp_path / "c"), tmp_path / "store", say=lambda text: None)
    with demo(blind) as running:
        assert not running.engine.info.vision
        with pytest.raises(UnsupportedError, match="cannot see"):
            see(running, ask(FLAT))
        with pytest.raises(UnsupportedError, match="cannot see"):
            running.engine.submit(Request("r", (1, 2), 2, pictures=(Picture(b"x", 0, 1),)), print)


def test_others_go_on_while_a_picture_is_read(engine: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two blocks of the tower a token is due to whoever is answering."""
    weights = engine.engine.sight.weights
    blocks = weights.blocks
    calls: list[Call] = []
    before: list[int] = []

    def watched() -> Iterator[Any]:
        for block in blocks():
            if not calls:  # asked while the first block is at work
                calls.append(Call(engine.engine, Request("r", (1, 2, 3), 300)))
            while not calls[0]._queue.empty():
                calls[0].events.append(calls[0]._queue.get())
            before.append(len(calls[0].tokens))
            yield block

    monkeypatch.setattr(weights, "blocks", watched)
    seen(engine, encoded(Image.effect_noise((30, 30), 77).convert("RGB")))
    calls[0].handle.cancel()
    assert len(before) == 2
    assert before[1] > before[0], "the answer had another token between the two blocks"


def test_a_failing_tower_costs_only_its_picture(engine: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Any]:
        raise RuntimeError("the disk is gone")
        yield

    monkeypatch.setattr(engine.engine.sight.weights, "blocks", broken)
    with pytest.raises(Exception, match="the disk is gone"):
        seen(engine, encoded(Image.effect_noise((33, 30), 78).convert("RGB")))
    monkeypatch.undo()
    assert answer(engine, question(*seen(engine, FLAT)))[0]


def test_the_control_rows_reach_the_model(engine: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    """If rows were lost on their way, two pictures would be answered alike: that is what the tests above look at."""
    flat, other = seen(engine, FLAT, CORNERS)
    cache = engine.engine.sight.cache
    for entry in cache._entries.values():
        monkeypatch.setattr(entry, "rows", torch.zeros_like(entry.rows))
    assert answer(engine, question(flat))[1] == answer(engine, question(other))[1]
