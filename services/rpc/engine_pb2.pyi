from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GenerateIn(_message.Message):
    __slots__ = ("start", "chunk", "stop", "stop_thinking", "want", "unavailable", "lent")
    START_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_THINKING_FIELD_NUMBER: _ClassVar[int]
    WANT_FIELD_NUMBER: _ClassVar[int]
    UNAVAILABLE_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    start: Start
    chunk: SnapshotChunk
    stop: Stop
    stop_thinking: StopThinking
    want: Want
    unavailable: Unavailable
    lent: Lent
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., chunk: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., stop_thinking: _Optional[_Union[StopThinking, _Mapping]] = ..., want: _Optional[_Union[Want, _Mapping]] = ..., unavailable: _Optional[_Union[Unavailable, _Mapping]] = ..., lent: _Optional[_Union[Lent, _Mapping]] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("own_part", "blocks")
    OWN_PART_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    own_part: bool
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, own_part: _Optional[bool] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class Lent(_message.Message):
    __slots__ = ("name", "requests", "sizes", "silence_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    SILENCE_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    silence_ms: int
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[_Iterable[bytes]] = ..., sizes: _Optional[_Iterable[int]] = ..., silence_ms: _Optional[int] = ...) -> None: ...

class Unavailable(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopThinking(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Start(_message.Message):
    __slots__ = ("request_id", "ids", "max_tokens", "sampling", "stop_ids", "snapshot_at", "snapshot_answer", "offers", "heads_only", "min_tokens", "logprobs", "thinking", "low_priority", "grammar", "user", "snapshots_on_request", "idle", "passing_at", "pictures")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_IDS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_ANSWER_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_ONLY_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    THINKING_FIELD_NUMBER: _ClassVar[int]
    LOW_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOTS_ON_REQUEST_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    PASSING_AT_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    ids: _containers.RepeatedScalarFieldContainer[int]
    max_tokens: int
    sampling: Sampling
    stop_ids: _containers.RepeatedScalarFieldContainer[int]
    snapshot_at: _containers.RepeatedScalarFieldContainer[int]
    snapshot_answer: bool
    offers: _containers.RepeatedCompositeFieldContainer[StateRef]
    heads_only: bool
    min_tokens: int
    logprobs: Logprobs
    thinking: Thinking
    low_priority: bool
    grammar: Grammar
    user: str
    snapshots_on_request: bool
    idle: bool
    passing_at: _containers.RepeatedScalarFieldContainer[int]
    pictures: _containers.RepeatedCompositeFieldContainer[PictureRef]
    def __init__(self, request_id: _Optional[str] = ..., ids: _Optional[_Iterable[int]] = ..., max_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stop_ids: _Optional[_Iterable[int]] = ..., snapshot_at: _Optional[_Iterable[int]] = ..., snapshot_answer: _Optional[bool] = ..., offers: _Optional[_Iterable[_Union[StateRef, _Mapping]]] = ..., heads_only: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., logprobs: _Optional[_Union[Logprobs, _Mapping]] = ..., thinking: _Optional[_Union[Thinking, _Mapping]] = ..., low_priority: _Optional[bool] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., user: _Optional[str] = ..., snapshots_on_request: _Optional[bool] = ..., idle: _Optional[bool] = ..., passing_at: _Optional[_Iterable[int]] = ..., pictures: _Optional[_Iterable[_Union[PictureRef, _Mapping]]] = ...) -> None: ...

class PictureRef(_message.Message):
    __slots__ = ("handle", "position", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    position: int
    tokens: int
    def __init__(self, handle: _Optional[bytes] = ..., position: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("top",)
    TOP_FIELD_NUMBER: _ClassVar[int]
    top: int
    def __init__(self, top: _Optional[int] = ...) -> None: ...

class Thinking(_message.Message):
    __slots__ = ("end_ids", "budget_tokens")
    END_IDS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    end_ids: _containers.RepeatedScalarFieldContainer[int]
    budget_tokens: int
    def __init__(self, end_ids: _Optional[_Iterable[int]] = ..., budget_tokens: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("json_schema", "regex", "lark", "gbnf")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    LARK_FIELD_NUMBER: _ClassVar[int]
    GBNF_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    lark: str
    gbnf: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., lark: _Optional[str] = ..., gbnf: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    seed: int
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., seed: _Optional[int] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ...) -> None: ...

class StateRef(_message.Message):
    __slots__ = ("state_id", "tokens", "size_bytes", "blocks", "block_bytes")
    STATE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    state_id: bytes
    tokens: int
    size_bytes: int
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    block_bytes: int
    def __init__(self, state_id: _Optional[bytes] = ..., tokens: _Optional[int] = ..., size_bytes: _Optional[int] = ..., blocks: _Optional[_Iterable[bytes]] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class GenerateOut(_message.Message):
    __slots__ = ("restore", "progress", "token", "finish", "snapshot", "chunk")
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    restore: Restore
    progress: Progress
    token: Token
    finish: Finish
    snapshot: SnapshotHead
    chunk: SnapshotChunk
    def __init__(self, restore: _Optional[_Union[Restore, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., token: _Optional[_Union[Token, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotHead, _Mapping]] = ..., chunk: _Optional[_Union[SnapshotChunk, _Mapping]] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("source", "state", "reason", "need", "damaged")
    class Source(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NONE: _ClassVar[Restore.Source]
        HOT: _ClassVar[Restore.Source]
        SEND: _ClassVar[Restore.Source]
        SENT: _ClassVar[Restore.Source]
        REFUSED: _ClassVar[Restore.Source]
    NONE: Restore.Source
    HOT: Restore.Source
    SEND: Restore.Source
    SENT: Restore.Source
    REFUSED: Restore.Source
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    source: Restore.Source
    state: StateRef
    reason: str
    need: _containers.RepeatedScalarFieldContainer[int]
    damaged: bool
    def __init__(self, source: _Optional[_Union[Restore.Source, str]] = ..., state: _Optional[_Union[StateRef, _Mapping]] = ..., reason: _Optional[str] = ..., need: _Optional[_Iterable[int]] = ..., damaged: _Optional[bool] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done_tokens", "total_tokens", "left_ms", "passing")
    DONE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    PASSING_FIELD_NUMBER: _ClassVar[int]
    done_tokens: int
    total_tokens: int
    left_ms: int
    passing: StateRef
    def __init__(self, done_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ..., left_ms: _Optional[int] = ..., passing: _Optional[_Union[StateRef, _Mapping]] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "logprob", "top")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    top: _containers.RepeatedCompositeFieldContainer[TopToken]
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ..., top: _Optional[_Iterable[_Union[TopToken, _Mapping]]] = ...) -> None: ...

class TopToken(_message.Message):
    __slots__ = ("id", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    logprob: float
    def __init__(self, id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "prompt_tokens", "cached_tokens", "executed_tokens", "generated_tokens", "queue_s", "prefill_s", "decode_s", "taken")
    class Reason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        UNKNOWN: _ClassVar[Finish.Reason]
        STOP: _ClassVar[Finish.Reason]
        LENGTH: _ClassVar[Finish.Reason]
    UNKNOWN: Finish.Reason
    STOP: Finish.Reason
    LENGTH: Finish.Reason
    REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    reason: Finish.Reason
    prompt_tokens: int
    cached_tokens: int
    executed_tokens: int
    generated_tokens: int
    queue_s: float
    prefill_s: float
    decode_s: float
    taken: _containers.RepeatedCompositeFieldContainer[StateRef]
    def __init__(self, reason: _Optional[_Union[Finish.Reason, str]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., executed_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., taken: _Optional[_Iterable[_Union[StateRef, _Mapping]]] = ...) -> None: ...

class SnapshotHead(_message.Message):
    __slots__ = ("state", "chunks")
    STATE_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    state: StateRef
    chunks: int
    def __init__(self, state: _Optional[_Union[StateRef, _Mapping]] = ..., chunks: _Optional[int] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class VisionIn(_message.Message):
    __slots__ = ("data", "ask")
    DATA_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    ask: VisionAsk
    def __init__(self, data: _Optional[bytes] = ..., ask: _Optional[_Union[VisionAsk, _Mapping]] = ...) -> None: ...

class VisionAsk(_message.Message):
    __slots__ = ("pictures", "text_tokens", "count_only", "answer_tokens")
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    TEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNT_ONLY_FIELD_NUMBER: _ClassVar[int]
    ANSWER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    pictures: _containers.RepeatedCompositeFieldContainer[PictureAsk]
    text_tokens: int
    count_only: bool
    answer_tokens: int
    def __init__(self, pictures: _Optional[_Iterable[_Union[PictureAsk, _Mapping]]] = ..., text_tokens: _Optional[int] = ..., count_only: _Optional[bool] = ..., answer_tokens: _Optional[int] = ...) -> None: ...

class PictureAsk(_message.Message):
    __slots__ = ("digest", "resolution", "size_bytes")
    class Resolution(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NORMAL: _ClassVar[PictureAsk.Resolution]
        LOW: _ClassVar[PictureAsk.Resolution]
        HIGH: _ClassVar[PictureAsk.Resolution]
    NORMAL: PictureAsk.Resolution
    LOW: PictureAsk.Resolution
    HIGH: PictureAsk.Resolution
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RESOLUTION_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    resolution: PictureAsk.Resolution
    size_bytes: int
    def __init__(self, digest: _Optional[bytes] = ..., resolution: _Optional[_Union[PictureAsk.Resolution, str]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class VisionOut(_message.Message):
    __slots__ = ("pictures", "missing")
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    pictures: _containers.RepeatedCompositeFieldContainer[SeenPicture]
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, pictures: _Optional[_Iterable[_Union[SeenPicture, _Mapping]]] = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class SeenPicture(_message.Message):
    __slots__ = ("handle", "tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    tokens: int
    def __init__(self, handle: _Optional[bytes] = ..., tokens: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("model", "model_fingerprint", "arithmetic_fingerprint", "vocab_size", "context_tokens", "max_sequences", "queue_limit", "vision", "device", "version", "exchange")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LIMIT_FIELD_NUMBER: _ClassVar[int]
    VISION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_fingerprint: str
    arithmetic_fingerprint: str
    vocab_size: int
    context_tokens: int
    max_sequences: int
    queue_limit: int
    vision: bool
    device: str
    version: str
    exchange: str
    def __init__(self, model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., arithmetic_fingerprint: _Optional[str] = ..., vocab_size: _Optional[int] = ..., context_tokens: _Optional[int] = ..., max_sequences: _Optional[int] = ..., queue_limit: _Optional[int] = ..., vision: _Optional[bool] = ..., device: _Optional[str] = ..., version: _Optional[str] = ..., exchange: _Optional[str] = ...) -> None: ...
