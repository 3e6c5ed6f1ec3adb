"""The api's settings: every number an owner may set, with its unit and its limits. Owns no fact found at run time:
context length, queue and fingerprints come from the engine by Info.

Variables are THIMBLE_API_ + FIELD.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from services.settings import SettingError, load, setting

PREFIX = "THIMBLE_API_"
SECRET = frozenset({"api_key", "redis_url", "redis_reader_url"})  # a URL may hold a password
EMBEDDED = "embedded"


@dataclass(frozen=True)
class ApiConfig:
    """Read once at start by `read_config`. A value out of range raises SettingError, which names the variable."""

    model_dir: Path = setting(
        Path("store"),
        "",
        "folder with tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json",
    )
    engines: str = setting("127.0.0.1:8600", "", "gRPC addresses of engines, with commas; a name may stand for several")
    host: str = setting("127.0.0.1", "", "address that HTTP listens on")
    port: int = setting(8000, "", "port of HTTP; 0: any free one, printed at start")
    api_key: str = setting("", "", "key that clients must send as a bearer token; empty: none is asked for")
    api_key_file: str = setting("", "", "file whose first line is the key, instead of api_key")
    cors_origins: str = setting("", "", "origins whose pages may call the api from a browser, with commas; * for all")

    redis_url: str = setting(
        "", "", "Redis or Valkey that keeps snapshots (redis://, rediss://, unix://), or `embedded`; empty: nowhere"
    )
    redis_reader_url: str = setting(
        "", "", "the same, as a user that may only read: for connections lent to engines; empty: those are redis_url's"
    )
    redis_timeout_ms: int = setting(
        250, "ms", "longest wait for one answer; a store that is slower is left alone a while"
    )
    embedded_memory_mb: int = setting(1024, "MB", "most memory of the embedded server; oldest snapshots go first")
    snapshot_ttl_s: int = setting(3 * 86400, "s", "how long an unused snapshot is kept")
    exchange_dir: str = setting(
        "", "", "folder in memory (tmpfs) that engines on this machine see too, for payloads; empty: they go over gRPC"
    )
    read_ahead: bool = setting(
        True, "", "after an answer, an engine that has nothing to do reads the history as the next turn will show it"
    )
    snapshot_min_tokens: int = setting(8, "tokens", "a snapshot that would save fewer tokens than this is not taken")
    snapshot_every_tokens: int = setting(
        4096,
        "tokens",
        "about how often a long prompt's state is kept while it is read, each in the place of the one before, so that "
        "one that is given up goes on from there; 0: never",
    )
    snapshot_write_s: float = setting(120.0, "s", "longest time for storing one answer's snapshots")
    snapshot_writes: int = setting(
        2, "answers", "whose snapshots are stored at the same time; further ones are skipped"
    )

    snapshot_disk_dir: str = setting(
        "", "", "folder for states of dialogs that rest, for when the store has lost them; empty: nothing is written"
    )
    snapshot_disk_gb: float = setting(50.0, "GB", "most that is kept there; the longest unused go first")
    snapshot_disk_daily_gb: float = setting(20.0, "GB", "most that is written there in a day (UTC)")
    snapshot_disk_rest_s: float = setting(60.0, "s", "how long a dialog rests before its newest state is written there")

    max_body_bytes: int = setting(32 * 1024 * 1024, "bytes", "largest request")
    fetch_pictures: bool = setting(
        False, "", "pictures may be given by an http(s) URL of a public address, which this server then fetches"
    )
    default_max_tokens: int = setting(
        4096, "tokens", "longest answer when the request does not say; 0: the whole context"
    )
    ping_interval_s: float = setting(5.0, "s", "between comments that keep a silent stream open; 0: none")
    request_timeout_s: float = setting(3600.0, "s", "longest time for one answer")
    stop_timeout_s: float = setting(5.0, "s", "how long answers under way may go on after a stop signal")
    log_level: str = setting("info", "", "debug, info, warning or error")

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also catches NaN
                raise SettingError(f"{variable(name)}={value} is out of range: give a value from {low} to {high}")
        if not self.engine_addresses:
            raise SettingError(f"{variable('engines')} is empty: give the engine's address, for example 127.0.0.1:8600")
        for address in self.engine_addresses:
            port = address.rpartition(":")[2] if ":" in address else ""
            if not address.startswith("unix:") and not (port.isdecimal() and 0 < int(port[:6]) < 65536):
                raise SettingError(f"{variable('engines')}: {address!r} has no port: give HOST:PORT, as 127.0.0.1:8600")
        if not self.host.strip():
            raise SettingError(f"{variable('host')} is empty: give an address, 127.0.0.1 for this machine only")
        if self.api_key and self.api_key_file:
            raise SettingError(f"both {variable('api_key')} and {variable('api_key_file')} are set: keep one")
        if not _sendable(self.api_key):
            raise SettingError(f"{variable('api_key')}: {KEY_LETTERS}")
        if self.log_level not in LOG_LEVELS:
            raise SettingError(f"{variable('log_level')}={self.log_level!r}: give one of {', '.join(LOG_LEVELS)}")
        scheme = urlsplit(self.redis_url).scheme
        if self.redis_url not in ("", EMBEDDED) and scheme not in ("redis", "rediss", "unix"):
            raise SettingError(
                f"{variable('redis_url')}: give redis://, rediss:// or unix://, the word {EMBEDDED}, or nothing"
            )
        if self.snapshot_disk_dir and not self.redis_url:
            raise SettingError(
                f"{variable('snapshot_disk_dir')} is for what a store has lost, and there is none: set "
                f"{variable('redis_url')} to redis://... or {EMBEDDED}, or leave the folder out"
            )
        if self.redis_reader_url and urlsplit(self.redis_reader_url).scheme not in ("redis", "unix"):
            raise SettingError(f"{variable('redis_reader_url')}: give redis:// or unix://, or nothing")

    @property
    def engine_addresses(self) -> tuple[str, ...]:
        return _split(self.engines)

    @property
    def cors_origin_list(self) -> tuple[str, ...]:
        return _split(self.cors_origins)

    def read_api_key(self) -> str:
        """The key to ask for, from the setting or the file; "" when none is asked for. Raises SettingError."""
        if not self.api_key_file:
            return self.api_key
        try:
            text = Path(self.api_key_file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise SettingError(f"{variable('api_key_file')}: cannot read {self.api_key_file}: {error}") from error
        key = text.partition("\n")[0].strip()
        if not key:
            raise SettingError(f"{variable('api_key_file')}: the first line of {self.api_key_file} is empty")
        if not _sendable(key):
            raise SettingError(f"{variable('api_key_file')}: {self.api_key_file}: {KEY_LETTERS}")
        return key


KEY_LETTERS = "clients can only send visible ASCII letters, without a space at either end: give such a key"
LOG_LEVELS = ("debug", "info", "warning", "error")

LIMITS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "redis_timeout_ms": (1, 60_000),
    "embedded_memory_mb": (16, 1_000_000),
    "snapshot_ttl_s": (1, 10 * 365 * 86400),
    "snapshot_min_tokens": (1, 1_000_000),
    "snapshot_every_tokens": (0, 1_000_000),
    "snapshot_write_s": (0.1, 3600),
    "snapshot_disk_gb": (0, 1_000_000),
    "snapshot_disk_daily_gb": (0, 1_000_000),
    "snapshot_disk_rest_s": (0, 86400),
    "snapshot_writes": (1, 1000),
    "max_body_bytes": (1024, 2**32),
    "default_max_tokens": (0, 10_000_000),
    "ping_interval_s": (0, 3600),
    "request_timeout_s": (1, 86400),
    "stop_timeout_s": (0, 3600),
}


def variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def read_config(environ: Mapping[str, str]) -> ApiConfig:
    """The settings from the environment. Raises SettingError on an unknown variable or a bad value."""
    return load(ApiConfig, PREFIX, environ)


def _sendable(key: str) -> bool:
    """Whether a client can send it in a header: others would be locked out without knowing why."""
    return key == key.strip() and all(" " <= letter <= "~" for letter in key)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
