"""The engine's exceptions: one tree, each with a stable code. Owns no mapping to gRPC; the server maps codes once.

EngineError
├── CheckpointError         the checkpoint is not ours, incomplete, or contradicts itself
├── StoreError              the repacked store is missing, damaged, or does not fit this build
├── TraceError              a file of recorded routing is damaged, none of ours, or cannot be written
├── DiskError               a file could not be read or written: no space, no permission, an I/O error
├── MemoryPlanError         what is asked for does not fit into this machine's memory
├── DeviceError             there is no GPU that this engine can use, or it has failed
├── OutOfPagesError         the KV pool has too few free pages; nothing was changed
├── PayloadError            a snapshot's bytes do not fit this model, or are damaged
├── TransferError           a snapshot's bytes did not come, which says nothing about them
├── RequestError            the client asked for something that cannot be done
│   ├── IdsError            no prompt, or an id outside the vocabulary
│   ├── ContextError        prompt and answer do not fit the context
│   ├── SamplingError       temperature, top_p or max_tokens out of range
│   ├── PositionError       a snapshot is wanted where there is none
│   ├── GrammarError        a grammar that is wrong, that nothing fits, or that takes too much
│   ├── PictureError        a picture that is damaged, too large, or of a kind that is not read
│   └── StreamError         messages of a stream in an order that the contract does not have
├── PictureGoneError        a picture's embeddings are not held, or not any more: it must be sent again
├── UnsupportedError        declared in the contract, not built
├── QueueFullError          as many requests as the engine takes are under way or waiting
├── CancelledError          the client has gone
├── StepError               a model step failed; the requests in it are lost, the engine goes on
└── StoppingError           the engine is loading, stopping, or has stopped
"""

from typing import ClassVar


class EngineError(Exception):
    """A failure that an operator or client can cause. The message says what is wrong and what to do."""

    code: ClassVar[str] = "engine_error"

    @classmethod
    def tree(cls) -> "list[type[EngineError]]":
        """This class and all below it."""
        return [cls, *(kind for child in cls.__subclasses__() for kind in child.tree())]


class CheckpointError(EngineError):
    code = "bad_checkpoint"


class StoreError(EngineError):
    code = "bad_store"


class TraceError(EngineError):
    code = "bad_trace"


class DiskError(EngineError):
    code = "disk"


class MemoryPlanError(EngineError):
    code = "memory_plan"


class DeviceError(EngineError):
    code = "device"


class OutOfPagesError(EngineError):
    code = "out_of_pages"


class PayloadError(EngineError):
    code = "bad_snapshot"


class TransferError(EngineError):
    code = "snapshot_transfer"


class RequestError(EngineError):
    code = "bad_request"


class IdsError(RequestError):
    code = "bad_ids"


class ContextError(RequestError):
    code = "context_too_long"


class SamplingError(RequestError):
    code = "bad_sampling"


class PositionError(RequestError):
    code = "bad_snapshot_position"


class GrammarError(RequestError):
    code = "bad_grammar"


class PictureError(RequestError):
    code = "bad_picture"


class StreamError(RequestError):
    code = "bad_stream"


class PictureGoneError(EngineError):
    code = "picture_gone"


class UnsupportedError(EngineError):
    code = "unsupported"


class QueueFullError(EngineError):
    code = "queue_full"

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        """`retry_after_s`: when there will probably be room."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class CancelledError(EngineError):
    code = "cancelled"


class StepError(EngineError):
    code = "step_failed"


class StoppingError(EngineError):
    code = "engine_stopping"


def of_the_device(error: BaseException) -> bool:
    """Whether it says that nothing works on the GPU any more, wherever it was raised: torch's own kind, or Triton's,
    which has none but words. Memory that ran out there is neither."""
    return type(error).__name__ == "AcceleratorError" or str(error).startswith("Triton Error [CUDA]")


def as_engine_error(error: Exception) -> EngineError:
    """What a client is told of an exception that no client can have caused."""
    if isinstance(error, EngineError):
        return error
    if of_the_device(error):
        return DeviceError(f"the GPU has failed: {error}")
    said = f"{type(error).__name__}: {error}"
    return StepError(f"the engine failed in this request ({said}): its log says more, ask again")
