"""The engine's settings: every number an owner may set, with its unit and its limits. Owns no fact found at run time.

Variables are THIMBLE_ENGINE_ + FIELD; a GB is 10^9 bytes. A 0 that means "automatic" is resolved in plan.py, never
written back here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.settings import SettingError, load, setting

PREFIX = "THIMBLE_ENGINE_"
PREFETCH = ("on", "off", "auto")
SPECULATION = ("auto", "on", "off")
DEVICES = ("auto", "cpu", "cuda")
KV_FORMATS = ("bf16", "fp8")


@dataclass(frozen=True)
class EngineConfig:
    """Read once at start by `read_config`. A value out of range raises SettingError, which names the variable."""

    store: Path = setting(Path("store"), "", "folder that `thimble repack` wrote")
    model_name: str = setting("", "", "the name the model is served under; empty: the name in the store")
    host: str = setting("127.0.0.1", "", "address that gRPC listens on")
    port: int = setting(8600, "", "port of gRPC; 0: any free one, printed at start")
    metrics_host: str = setting("127.0.0.1", "", "address that /metrics listens on")
    metrics_port: int = setting(8601, "", "port of /metrics; 0: any free one, printed at start")

    expert_cache_gb: float = setting(
        0.0, "GB", "RAM for expert blocks; 0: what is free less memory_margin_gb, at least half; or all experts"
    )
    expert_slots: int = setting(0, "blocks", "exact number of slots instead of expert_cache_gb; 0: not set")
    lock_memory: bool = setting(False, "", "never swap the expert cache out; needs the right to lock that much memory")
    memory_margin_gb: float = setting(6.0, "GB", "RAM left free if expert_cache_gb is automatic and there is enough")
    readers: int = setting(0, "threads", "disk reads in flight; 0: as many as measure best at start")
    copies: str = setting("", "", "folders on other disks with copies of blocks (thimble spread), colons between them")
    warm_dir: str = setting(
        "", "", "where the set of experts in RAM is kept for the next start; empty: in the store; -: nowhere"
    )
    prefetch: str = setting("auto", "", "experts that may be needed soon are read ahead: on, off, or auto: if it pays")
    workers: int = setting(0, "threads", "threads that compute experts; 0: cores minus two, at least one")

    device: str = setting(
        "auto", "", "what computes: cuda (one NVIDIA GPU and the CPU), cpu, or auto: cuda if there is one"
    )
    vram_mib: int = setting(0, "MiB", "graphics memory to use; 0: what is free at start")
    vram_experts_gb: float = setting(
        0.0,
        "GB",
        "graphics memory for the experts named most often, on cards with room for some; contexts get the rest",
    )
    kv_format: str = setting("bf16", "", "keys and values on a GPU: bf16, or fp8: twice the context, less exact")

    max_sequences: int = setting(
        0, "requests", "generated at once; 0: four, or as many as fit a GPU with long contexts"
    )
    queue_limit: int = setting(
        16, "requests", "waiting beyond those under way; as many again are kept for users who have none"
    )
    context_tokens: int = setting(
        0, "tokens", "longest prompt + answer; 0: the model's own limit, at most what kv_gb or the GPU holds"
    )
    kv_gb: float = setting(1.0, "GB", "RAM for the attention layers' keys and values, if the CPU computes")
    prefill_chunk_tokens: int = setting(
        0, "tokens", "prompt tokens read at once, shared by the prompts that wait; 0: 64, on a GPU up to 2048"
    )
    speculation: str = setting(
        "auto",
        "",
        "two tokens in one step where a draft is right, the same words: on, off, or auto: as long as it pays",
    )
    grammar_max_bytes: int = setting(262_144, "bytes", "largest schema or grammar that an answer may have to follow")
    grammar_timeout_s: float = setting(5.0, "s", "longest wait for a schema or grammar to be worked out")

    trace: str = setting("", "", "file to record routing in, for `thimble simulate`; empty: none. Treat it as private")
    trace_mb: float = setting(256.0, "MB", "size at which a trace ends")

    hot_states_gb: float = setting(
        1.0, "GB", "RAM for states kept after a request, so that the next need not send them"
    )
    picture_cache_gb: float = setting(0.5, "GB", "RAM for embeddings of pictures, if the model can see")
    vllm_names: bool = setting(False, "", "metrics under vLLM's names as well, for its stock dashboards")
    nvtx: bool = setting(False, "", "name tokens, layers and groups of experts for GPU profilers (Nsight)")
    exchange_dir: str = setting(
        "",
        "",
        "folder in memory (tmpfs) that an api on this machine sees too, for payloads; empty: they come over gRPC",
    )
    snapshot_timeout_s: float = setting(60.0, "s", "longest wait for a client to send or to take one snapshot")
    stop_timeout_s: float = setting(5.0, "s", "how long requests under way may go on after a stop signal")

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also catches NaN
                raise SettingError(f"{variable(name)}={value} is out of range: give a value from {low} to {high}")
        choices = {"prefetch": PREFETCH, "device": DEVICES, "kv_format": KV_FORMATS, "speculation": SPECULATION}
        for name, words in choices.items():
            if getattr(self, name) not in words:
                raise SettingError(f"{variable(name)}={getattr(self, name)!r} is none of {', '.join(words)}")
        for name in ("host", "metrics_host"):
            if not getattr(self, name).strip():
                raise SettingError(f"{variable(name)} is empty: give an address, 127.0.0.1 for this machine only")
        if not all(" " < letter <= "~" for letter in self.model_name):
            raise SettingError(f"{variable('model_name')}={self.model_name!r}: only visible ASCII letters, no spaces")
        if self.expert_slots and self.expert_cache_gb:
            raise SettingError(f"both {variable('expert_slots')} and {variable('expert_cache_gb')} are set: keep one")
        if self.port and self.port == self.metrics_port and self.host == self.metrics_host:
            raise SettingError(f"{variable('port')} and {variable('metrics_port')} are both {self.port}: change one")


LIMITS: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "metrics_port": (0, 65535),
    "expert_cache_gb": (0, 4096),
    "expert_slots": (0, 10_000_000),
    "memory_margin_gb": (0, 4096),
    "readers": (0, 64),
    "trace_mb": (0.001, 1_000_000),
    "workers": (0, 512),
    "vram_mib": (0, 10_000_000),
    "vram_experts_gb": (0, 4096),
    "max_sequences": (0, 256),
    "queue_limit": (0, 10_000),
    "context_tokens": (0, 10_000_000),
    "kv_gb": (0.001, 4096),
    "prefill_chunk_tokens": (0, 65535),
    "grammar_max_bytes": (0, 4_000_000),
    "grammar_timeout_s": (0.001, 60),
    "hot_states_gb": (0, 4096),
    "picture_cache_gb": (0.001, 4096),
    "snapshot_timeout_s": (0.1, 3600),
    "stop_timeout_s": (0, 3600),
}


def variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def read_config(environ: Mapping[str, str]) -> EngineConfig:
    """The settings from the environment. Raises SettingError on an unknown variable or a bad value."""
    return load(EngineConfig, PREFIX, environ)
