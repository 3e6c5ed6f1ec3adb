"""The engine's exceptions: one tree, each with a stable code. Owns no mapping to gRPC; the server maps codes once.

EngineError
├── CheckpointError   the checkpoint is not ours, incomplete, or contradicts itself
├── StoreError        the repacked store is missing, damaged, or does not fit this build
└── DiskError         a file could not be written: no space, no permission
"""

from typing import ClassVar


class EngineError(Exception):
    """A failure that an operator or client can cause. The message says what is wrong and what to do."""

    code: ClassVar[str] = "engine_error"


class CheckpointError(EngineError):
    code = "bad_checkpoint"


class StoreError(EngineError):
    code = "bad_store"


class DiskError(EngineError):
    code = "disk"
