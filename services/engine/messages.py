"""Between the contract's messages and the engine's own words, both ways. Decides nothing."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from services.engine.errors import GrammarError
from services.engine.request import (
    Finish,
    Form,
    Grammar,
    Info,
    Picture,
    Progress,
    Request,
    Restore,
    Snapshot,
    StateRef,
    Thinking,
    Token,
)
from services.rpc import engine_pb2 as pb


@dataclass(frozen=True)
class Want:
    """Of a snapshot: the own part, and blocks by their numbers; None: all."""

    own_part: bool
    blocks: tuple[int, ...] | None


EVERYTHING, NOTHING = Want(True, None), Want(False, ())


def request_of(start: pb.Start) -> Request:
    """Unset top_p and repetition_penalty (0) are 1; everything else is checked by `Request.check`."""
    sampling = start.sampling
    return Request(
        request_id=start.request_id,
        ids=tuple(start.ids),
        max_tokens=start.max_tokens,
        temperature=sampling.temperature,
        top_p=1.0 if sampling.top_p == 0 else sampling.top_p,
        seed=sampling.seed,
        stop_ids=frozenset(start.stop_ids),
        snapshot_at=tuple(start.snapshot_at),
        passing_at=tuple(start.passing_at),
        snapshot_answer=start.snapshot_answer,
        offers=tuple(StateRef(o.state_id, o.tokens, o.size_bytes, tuple(o.blocks)) for o in start.offers),
        heads_only=start.heads_only,
        snapshots_on_request=start.snapshots_on_request,
        idle=start.idle,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=1.0 if sampling.repetition_penalty == 0 else sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=start.min_tokens,
        logprobs=start.logprobs.top if start.HasField("logprobs") else None,
        thinking=_thinking(start.thinking) if start.HasField("thinking") else None,
        low_priority=start.low_priority,
        pictures=tuple(Picture(p.handle, p.position, p.tokens) for p in start.pictures),
        grammar=_grammar(start.grammar) if start.HasField("grammar") else None,
        user=start.user,
    )


def _thinking(thinking: pb.Thinking) -> Thinking:
    budget_tokens = thinking.budget_tokens if thinking.HasField("budget_tokens") else None
    return Thinking(tuple(thinking.end_ids), budget_tokens)


def _grammar(grammar: pb.Grammar) -> Grammar:
    form = grammar.WhichOneof("form")
    if form is None:
        raise GrammarError("the grammar has no form: give json_schema, regex, lark or gbnf")
    return Grammar(Form(form), getattr(grammar, form))


def message_of(event: Restore | Progress | Token | Finish) -> pb.GenerateOut:
    match event:
        case Restore(source, state, reason, need, damaged):
            ref = None if state is None else _ref(state)
            return pb.GenerateOut(
                restore=pb.Restore(source=source.name, state=ref, reason=reason, need=need, damaged=damaged)
            )
        case Progress(done_tokens, total_tokens, left_ms, passing):
            ref = None if passing is None else _ref(passing)
            progress = pb.Progress(done_tokens=done_tokens, total_tokens=total_tokens, left_ms=left_ms, passing=ref)
            return pb.GenerateOut(progress=progress)
        case Token(id_, logprob, top):
            others = [pb.TopToken(id=other, logprob=value) for other, value in top]
            return pb.GenerateOut(token=pb.Token(id=id_, logprob=logprob, top=others))
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


def snapshot_head(snapshot: Snapshot) -> pb.GenerateOut:
    return pb.GenerateOut(snapshot=pb.SnapshotHead(state=_ref(snapshot.state), chunks=len(snapshot.chunks)))


def snapshot_chunks(snapshot: Snapshot, want: Want) -> Iterator[pb.GenerateOut]:
    """The chunks that are wanted, one at a time: each message copies its chunk."""
    own = snapshot.chunks if want.own_part else ()
    numbers = range(len(snapshot.blocks)) if want.blocks is None else want.blocks
    blocks = (snapshot.blocks[number] for number in numbers if number < len(snapshot.blocks))
    for index, data in enumerate(chain(own, blocks)):
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
        exchange=info.exchange,
    )


def _ref(state: StateRef) -> pb.StateRef:
    return pb.StateRef(
        state_id=state.state_id,
        tokens=state.tokens,
        size_bytes=state.size_bytes,
        blocks=state.blocks,
        block_bytes=state.block_bytes,
    )
