"""The demo's store: made from demo/ when it is missing or of something else than demo/ is now. Owns that decision only.

`thimble demo STORE` is what `thimble up` and the compose stack run first; a store that is fresh costs a hash of demo/.
"""

import argparse
import contextlib
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHECKPOINT = ROOT / "demo"
STAMP = "demo.sha256"  # beside the manifest: what the store was made from
SIZED = (".bin", ".json", ".safetensors")  # files of the store that nothing but a repack changes
# A change of how blocks and stores are laid out makes a store stale as much as other weights do.
LAYOUT_SOURCES = ("kernels/block.py", "services/engine/experts/store.py")


def is_fresh(store: Path) -> bool:
    """Whether it is all there, and of what demo/ is now. What a full disk or a power cut has cut off is made again."""
    try:
        digest, *files = (store / STAMP).read_text().splitlines()
        whole = all((store / name).stat().st_size == int(size) for size, name in (line.split(" ", 1) for line in files))
        return bool(files) and whole and digest == _digest()
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def make(store: Path) -> None:
    """Repack demo/ into `store`, replacing what is there. Raises what `repack` raises."""
    from services.tools.repack import repack  # brings torch along, which `is_fresh` must not wait for

    with contextlib.suppress(NotADirectoryError):  # which repack tells of
        (store / STAMP).unlink(missing_ok=True)
    repack(CHECKPOINT, store, replace=True, say=print)
    sizes = [f"{path.stat().st_size} {path.name}" for path in sorted(store.iterdir()) if path.suffix in SIZED]
    (store / STAMP).write_text("\n".join([_digest(), *sizes]) + "\n")


def _digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(CHECKPOINT.iterdir()) + [ROOT / name for name in LAYOUT_SOURCES]:
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}\n".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder for the demo's store")


def run(args: argparse.Namespace) -> int:
    if is_fresh(args.store):
        print(f"{args.store}: the demo's store is there")
        return 0
    make(args.store)
    print(f"{args.store}: the demo's store is made")
    return 0
