"""`thimble fetch MODEL`: a checkpoint from a hub into a folder. Resumes, in parallel, every file's checksum compared.

    FOLDER/…                 the files, each put there when it is whole and right
    FOLDER/.fetch/SUM.part   what has come of a file so far
    FOLDER/.fetch/files.json the commit, and each file's size and checksum; with the time of the file that was checked

Owns the folder and the work's order; the hub is in hub.py.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from services.tools.amounts import whole
from services.tools.complaints import UsageError
from services.tools.hub import FetchError, Hub, RemoteFile, Stopped, checksum, offline_asked
from services.tools.progress import Progress

WANTED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.md", "LICENSE*", "NOTICE*")
WORK = ".fetch"
RECORD = "files.json"
SPARE_BYTES = 64 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="OWNER/NAME at the hub")
    parser.add_argument("folder", type=Path, nargs="?", help="where to put it (default: NAME, here)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit (main)")
    parser.add_argument("--endpoint", help="the hub or a mirror of it (default: $HF_ENDPOINT, else huggingface.co)")
    parser.add_argument("--parallel", type=whole, default=4, help="files at a time (4)")
    parser.add_argument(
        "--offline", action="store_true", help="only check what is there; $HF_HUB_OFFLINE does the same"
    )
    parser.add_argument("--check", action="store_true", help="read files again that were checked before")


def run(args: argparse.Namespace) -> int:
    folder = args.folder or Path(args.model.rpartition("/")[2])
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", args.model, re.ASCII) or not folder.name:
        raise UsageError(f"{args.model!r} is no model's name: give OWNER/NAME, as the hub's page has it")
    begun = time.monotonic()
    if args.offline or offline_asked():
        files = check_offline(folder, args.model, args.check)
    else:
        endpoint = (args.endpoint or os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        files = fetch(Hub(endpoint, args.model, args.revision), folder, args.parallel, args.check, print)
    size = sum(file.size_bytes for file in files)
    print(f"{folder}: {len(files)} files, {size / 1e9:.2f} GB, all checksums right, {time.monotonic() - begun:.1f} s")
    return 0


def fetch(hub: Hub, folder: Path, parallel: int, check: bool, say: Callable[[str], None]) -> list[RemoteFile]:
    """Bring `folder` to what the hub has; returns its files. Raises FetchError."""
    commit, listed = hub.files()
    files = [file for file in listed if "/" not in file.name and any(fnmatch(file.name, p) for p in WANTED)]
    if not any(file.name.endswith(".safetensors") for file in files):
        raise FetchError(f"{hub.model}: has no *.safetensors, it is no checkpoint that can be used")
    say(f"{hub.model} at {commit[:12]}: {len(files)} files, {sum(f.size_bytes for f in files) / 1e9:.2f} GB")
    with _work_folder(folder) as record:
        record.begin(hub.model, commit, files)
        missing = [file for file in files if not record.has(file, check)]
        _check_space(folder, missing)
        if missing:
            _download(hub, commit, folder, missing, record, parallel)
    return files


def check_offline(folder: Path, model: str, check: bool) -> list[RemoteFile]:
    """The files of an earlier fetch, all there. Raises FetchError."""
    if not (folder / WORK / RECORD).exists():
        raise FetchError(f"{folder}: nothing was fetched there; fetch without --offline and HF_HUB_OFFLINE first")
    with _work_folder(folder) as record:
        if record.model != model:
            raise FetchError(f"{folder}: holds {record.model}, not {model}")
        missing = [file.name for file in record.files if not record.has(file, check)]
        if missing:
            raise FetchError(f"{folder}: missing or damaged: {', '.join(missing)}; fetch without --offline")
        return record.files


def _download(hub: Hub, commit: str, folder: Path, missing: list[RemoteFile], record: "Record", parallel: int) -> None:
    parts = {file: folder / WORK / f"{file.checksum.partition(':')[2]}.part" for file in missing}
    done = sum(part.stat().st_size for part in parts.values() if part.exists())
    progress = Progress("fetch", sum(file.size_bytes for file in missing), done)
    lock, stop = threading.Lock(), threading.Event()

    def count(size_bytes: int) -> None:
        nonlocal done
        with lock:
            done += size_bytes
            progress.update(done)

    def one(file: RemoteFile) -> None:
        if stop.is_set():
            raise Stopped
        hub.download(file, commit, parts[file], count, stop.is_set)
        os.replace(parts[file], folder / file.name)
        with lock:
            record.checked(file)

    # Largest first, so that none of them is what is waited for at the end.
    with ThreadPoolExecutor(parallel) as pool:
        try:
            order = sorted(missing, key=lambda file: -file.size_bytes)
            for future in as_completed([pool.submit(one, file) for file in order]):
                future.result()
        finally:
            stop.set()
    progress.close()


def _check_space(folder: Path, missing: list[RemoteFile]) -> None:
    there = sum(part.stat().st_size for part in (folder / WORK).glob("*.part"))
    needed, free = sum(file.size_bytes for file in missing) - there + SPARE_BYTES, shutil.disk_usage(folder).free
    if missing and free < needed:
        raise FetchError(
            f"{folder}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free; free space or choose another folder "
            f"(the store that thimble repack makes of it takes about as much again)"
        )


class Record:
    """What files.json says. One process has it at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / WORK / RECORD
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
            self.model, self.commit = str(said["model"]), str(said["commit"])
            self.files = [RemoteFile(name, s["size_bytes"], s["checksum"]) for name, s in said["files"].items()]
            self._times: dict[str, Any] = {name: s.get("checked_ns") for name, s in said["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            self.model, self.commit, self.files, self._times = "", "", [], {}

    def begin(self, model: str, commit: str, files: list[RemoteFile]) -> None:
        """A file that was checked stays so as long as its checksum is still the one that is wanted."""
        before = {file.name: file.checksum for file in self.files}
        self._times = {f.name: self._times.get(f.name) for f in files if before.get(f.name) == f.checksum}
        self.model, self.commit, self.files = model, commit, files
        self._write()

    def has(self, file: RemoteFile, check: bool) -> bool:
        """Whether the file is there and right. Reads it unless it is as it was when it was read before."""
        path = self._folder / file.name
        if not path.exists() or path.stat().st_size != file.size_bytes:
            return False
        if not check and self._times.get(file.name) == path.stat().st_mtime_ns:
            return True
        if checksum(path, file.checksum) != file.checksum:
            return False
        self.checked(file)
        return True

    def checked(self, file: RemoteFile) -> None:
        self._times[file.name] = (self._folder / file.name).stat().st_mtime_ns
        self._write()

    def _write(self) -> None:
        files = {
            f.name: {"size_bytes": f.size_bytes, "checksum": f.checksum, "checked_ns": self._times.get(f.name)}
            for f in self.files
        }
        unfinished = self._path.with_suffix(".new")
        unfinished.write_text(json.dumps({"model": self.model, "commit": self.commit, "files": files}, indent=1))
        os.replace(unfinished, self._path)


@contextmanager
def _work_folder(folder: Path) -> Iterator[Record]:
    try:
        (folder / WORK).mkdir(parents=True, exist_ok=True)
        lock = (folder / WORK / "lock").open("w")
    except OSError as error:
        raise FetchError(f"{folder}: {error.strerror}; choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FetchError(f"{folder}: another thimble fetch is writing there; wait for it or stop it") from error
        yield Record(folder)
