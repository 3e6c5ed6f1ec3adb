"""A model's files at a Hugging Face hub or a mirror of one: which there are, and one of them onto the disk.

Owns the conversation: endpoints, tokens, resumption, checksums and what each refusal means. huggingface_hub speaks the
protocol, but drops the part of a file that it has when the process ends; here it is kept and gone on with.
"""

import hashlib
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

HUGGINGFACE_HUB = "2.4.0"
ATTEMPTS = 5  # without a single new byte, or with a checksum that is wrong
PAUSE_S = 2.0
CHUNK_BYTES = 256 << 10  # what a connection that breaks may cost


class FetchError(Exception):
    """The checkpoint cannot be had. The message says why and what to do."""

    code = "fetch"


class Stopped(Exception):
    """Another file has failed or the owner has interrupted: this one stops where it is."""


@dataclass(frozen=True)
class RemoteFile:
    """`checksum` is sha256:HEX of large files, git:HEX (SHA-1 of git's blob) of small ones."""

    name: str
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Hub:
    """`endpoint`: the hub or a mirror of it; `revision` a branch, tag or commit."""

    endpoint: str
    model: str
    revision: str

    def __post_init__(self) -> None:
        if importlib.util.find_spec("huggingface_hub") is None:
            raise FetchError(f"fetch needs huggingface_hub: pip install huggingface_hub=={HUGGINGFACE_HUB}")

    def files(self) -> tuple[str, list[RemoteFile]]:
        """The commit that the revision is now, and all its files. Raises FetchError."""
        from huggingface_hub import HfApi

        try:
            found = HfApi(endpoint=self.endpoint).model_info(self.model, revision=self.revision, files_metadata=True)
            files = [_remote_file(sibling) for sibling in found.siblings or []]
        except Exception as error:
            raise self.explained(error) from error
        if not found.sha or not files:
            raise FetchError(f"{self.model}: {self.endpoint} lists no files for it; is it a hub or a mirror of one?")
        return found.sha, files

    def download(
        self, file: RemoteFile, commit: str, part: Path, count: Callable[[int], None], stopped: Callable[[], bool]
    ) -> None:
        """Bring `part` from what it holds to the whole file with the right checksum.

        `count` is told of bytes that came, negative when bytes are thrown away. Raises FetchError, Stopped.
        """
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils._headers import build_hf_headers
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()
        constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
        url = hf_hub_url(self.model, file.name, revision=commit, endpoint=self.endpoint)
        failures, furthest, wrong = 0, 0, ""
        while failures < ATTEMPTS:
            before = part.stat().st_size if part.exists() else 0
            if before > file.size_bytes:
                _throw_away(part, before, count)
                before = 0
            try:
                with part.open("ab") as output:
                    http_get(
                        url,
                        _Counted(output, count, stopped),  # type: ignore[arg-type]
                        resume_size=before,
                        headers=build_hf_headers(),
                        expected_size=file.size_bytes,
                        displayed_filename=file.name,
                    )
            except Exception as error:
                explained = self.explained(error)  # passes on what must not be tried again
                # Only what no attempt had before counts: a server that always stops at one place is not getting on.
                failures = 0 if part.stat().st_size > furthest else failures + 1
                furthest = max(furthest, part.stat().st_size)
                wrong = str(explained)
                if isinstance(error, HfHubHTTPError) and error.response.status_code == 416:
                    _throw_away(part, part.stat().st_size, count)
                if failures < ATTEMPTS:
                    _pause(stopped)
                continue
            if checksum(part, file.checksum) == file.checksum:
                return
            wrong = "what came has another checksum than the hub says"
            failures += 1
            _throw_away(part, part.stat().st_size, count)
        raise FetchError(f"{file.name}: given up after {ATTEMPTS} attempts: {wrong}")

    def explained(self, error: Exception) -> FetchError:
        """What to do about it. Raises `error` if it is a bug of ours, FetchError if trying again cannot help."""
        from huggingface_hub import errors

        again = "the same command goes on where this one stopped"
        if isinstance(error, FetchError | Stopped):
            raise error
        if isinstance(error, errors.GatedRepoError):
            raise FetchError(
                f"{self.model} is gated: accept its licence at {self.endpoint}/{self.model} in a browser, make a token "
                f"at {self.endpoint}/settings/tokens, then set HF_TOKEN to it (or run `hf auth login`) and fetch again"
            ) from error
        if isinstance(error, errors.HFValidationError):
            raise FetchError(f"{self.model!r} is no model's name: give OWNER/NAME, as the hub's page has it") from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise FetchError(f"{self.model} has no revision {self.revision!r} at {self.endpoint}") from error
        if isinstance(error, errors.RemoteEntryNotFoundError):
            raise FetchError(f"{self.model}: a file that the hub lists is not there: {error}") from error
        if isinstance(error, errors.RepositoryNotFoundError):
            raise FetchError(
                f"{self.endpoint} has no model {self.model!r}, or it is private: check the name (OWNER/NAME), "
                f"or set HF_TOKEN to a token that may read it"
            ) from error
        if isinstance(error, errors.OfflineModeIsEnabled):
            raise FetchError("HF_HUB_OFFLINE is set: unset it, or give --offline to check what is there") from error
        if isinstance(error, errors.HfHubHTTPError):
            return FetchError(f"{self.endpoint} answered {error.response.status_code}: {error}; {again}")
        if isinstance(error, OSError) and error.errno:
            raise FetchError(f"cannot be written: {error.strerror}; free space and fetch again, {again}") from error
        if isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
            return FetchError(
                f"{self.endpoint}: {error or type(error).__name__}; check the network, or name a mirror with "
                f"--endpoint or HF_ENDPOINT; {again}"
            )
        raise error


def offline_asked() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def checksum(path: Path, like: str) -> str:
    """Of a file on the disk, of the same kind as `like`."""
    kind = like.partition(":")[0]
    with path.open("rb") as file:
        if kind == "sha256":
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        digest = hashlib.sha1(b"blob %d\0" % os.fstat(file.fileno()).st_size)
        while piece := file.read(1 << 20):
            digest.update(piece)
        return f"git:{digest.hexdigest()}"


def _remote_file(sibling: Any) -> RemoteFile:
    sums = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}"
    if sibling.size is None or sums == "git:None":
        raise FetchError(f"{sibling.rfilename}: listed without its size or checksum; this mirror cannot be used")
    return RemoteFile(sibling.rfilename, int(sibling.size), sums)


def _throw_away(part: Path, size_bytes: int, count: Callable[[int], None]) -> None:
    part.unlink()
    count(-size_bytes)


def _pause(stopped: Callable[[], bool]) -> None:
    end = time.monotonic() + PAUSE_S
    while time.monotonic() < end:
        if stopped():
            raise Stopped
        time.sleep(0.05)


class _Counted:
    """The file that huggingface_hub writes to; it seeks only to start again."""

    def __init__(self, file: IO[bytes], count: Callable[[int], None], stopped: Callable[[], bool]) -> None:
        self._file, self._count, self._stopped = file, count, stopped

    def write(self, data: bytes) -> int:
        if self._stopped():
            raise Stopped
        self._count(len(data))
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int) -> int:
        self._count(offset - self._file.tell())
        return self._file.seek(offset)

    def truncate(self) -> int:
        return self._file.truncate()
