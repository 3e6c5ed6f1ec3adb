"""Names of stored things. A snapshot is found by the text it has read, so its key is a hash of that text and of what
else decides the state's bits: fingerprints of model and arithmetic, the pictures in the text. Owns no I/O."""

import hashlib
from collections.abc import Iterable, Sequence

VERSION = 3  # of everything the api writes to the store; another version is another key
USED = f"thimble:{VERSION}:used"  # Redis key of a sorted set: when each own part was used last


def space_of(model_fingerprint: str, arithmetic_fingerprint: str) -> bytes:
    """What all keys of one engine build on one model begin with."""
    parts = (f"thimble text {VERSION}", model_fingerprint, arithmetic_fingerprint)
    return hashlib.sha256("\0".join(parts).encode()).digest()


def boundary_keys(
    space: bytes, marked: str, offsets: Iterable[int], images: Sequence[tuple[int, bytes]] = ()
) -> dict[int, bytes]:
    """Offset -> key of the text before it, hashed in one pass. `images`: offset in the text and hash of each picture;
    it counts for every boundary behind it. A surrogate in marked text is hashed as such: text that only looks like a
    special token has another key than the token."""
    running = hashlib.sha256(space)
    keys: dict[int, bytes] = {}
    start = 0
    shown = 0
    for offset in sorted(set(offsets)):
        running.update(marked[start:offset].encode("utf-8", "surrogatepass"))
        start = offset
        named = running.copy()
        while shown < len(images) and images[shown][0] < offset:
            shown += 1
        named.update(b"".join(b"\xff" + digest for _, digest in images[:shown]))
        keys[offset] = named.digest()
    return keys


def record_name(key: bytes) -> str:
    """Redis key of a boundary's record."""
    return f"thimble:{VERSION}:text:{key.hex()}"


def payload_name(state_id: bytes) -> str:
    """Redis key of the own part of a state's payload."""
    return f"thimble:{VERSION}:state:{state_id.hex()}"


def block_name(block: bytes) -> str:
    """Redis key of a KV block, which several states may share."""
    return f"thimble:{VERSION}:block:{block.hex()}"
