"""Between the contract's messages and the engine's own words, both ways. Decides nothing."""

from collections.abc import Iterator

from services.engine.request import Finish, Info, Progress, Request, Restore, Snapshot, StateRef, Token
from services.rpc import engine_pb2 as pb


def request_of(start: pb.Start) -> Request:
    """Unset top_p (0) is 1; everything else is checked by `Request.check`."""
    return Request(
        request_id=start.request_id,
        ids=tuple(start.ids),
        max_tokens=start.max_tokens,
        temperature=start.sampling.temperature,
        top_p=1.0 if start.sampling.top_p == 0 else start.sampling.top_p,
        seed=start.sampling.seed,
        stop_ids=frozenset(start.stop_ids),
        snapshot_at=tuple(start.snapshot_at),
        snapshot_answer=start.snapshot_answer,
        offers=tuple(StateRef(offer.state_id, offer.tokens, offer.size_bytes) for offer in start.offers),
        heads_only=start.heads_only,
    )


def message_of(event: Restore | Progress | Token | Finish) -> pb.GenerateOut:
    match event:
        case Restore(source, state, reason):
            ref = None if state is None else _ref(state)
            return pb.GenerateOut(restore=pb.Restore(source=source.name, state=ref, reason=reason))
        case Progress(done_tokens, total_tokens):
            return pb.GenerateOut(progress=pb.Progress(done_tokens=done_tokens, total_tokens=total_tokens))
        case Token(id_):
            return pb.GenerateOut(token=pb.Token(id=id_))
        case Finish():
            return pb.GenerateOut(
                finish=pb.Finish(
                    reason=event.reason.name,
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=event.cached_tokens,
                    executed_tokens=event.executed_tokens,
                    generated_tokens=event.generated_tokens,
                    queue_s=event.queue_s,
                    prefill_s=event.prefill_s,
                    decode_s=event.decode_s,
                    taken=[_ref(snapshot.state) for snapshot in event.snapshots],
                )
            )


def snapshot_messages(snapshot: Snapshot) -> Iterator[pb.GenerateOut]:
    """The head and its chunks, one at a time: each message copies its chunk."""
    chunks = snapshot.chunks
    yield pb.GenerateOut(snapshot=pb.SnapshotHead(state=_ref(snapshot.state), chunks=len(chunks)))
    for index, data in enumerate(chunks):
        yield pb.GenerateOut(chunk=pb.SnapshotChunk(index=index, data=data))


def info_message(info: Info) -> pb.InfoResponse:
    return pb.InfoResponse(
        model=info.model,
        model_fingerprint=info.model_fingerprint,
        arithmetic_fingerprint=info.arithmetic_fingerprint,
        vocab_size=info.vocab_size,
        context_tokens=info.context_tokens,
        max_sequences=info.max_sequences,
        queue_limit=info.queue_limit,
        vision=info.vision,
        device=info.device,
        version=info.version,
    )


def _ref(state: StateRef) -> pb.StateRef:
    return pb.StateRef(state_id=state.state_id, tokens=state.tokens, size_bytes=state.size_bytes)
