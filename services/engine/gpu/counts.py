"""What the GPU did, as the engine's metrics count it: experts, bytes over PCIe, waits. Owns the arithmetic; the counts
themselves are the hand-off's (Times) and the sweep's.
"""

from dataclasses import dataclass

from kernels.experts.device.times import Times


@dataclass(frozen=True)
class Sizes:
    """Bytes that cross: of an expert's block, and of what goes either way in each turn and in each token."""

    block: int
    turn_to_gpu: int
    turn_from_gpu: int
    token_to_gpu: int
    token_from_gpu: int


@dataclass(frozen=True)
class DeviceCounts:
    """Since the start. `vram_experts`: of the card's, those whose blocks were in its own memory; `waited_s`: its waits
    for the host's experts; `swept_bytes`: of blocks copied for prompts.

    A block that is read in place counts whole, though the card leaves out those parts of `down` that meet only zeros.
    """

    gpu_experts: int = 0
    host_experts: int = 0
    waited_s: float = 0.0
    late: int = 0
    swept_bytes: int = 0
    to_gpu_bytes: int = 0
    from_gpu_bytes: int = 0
    vram_experts: int = 0

    def __add__(self, other: "DeviceCounts") -> "DeviceCounts":
        return DeviceCounts(
            self.gpu_experts + other.gpu_experts,
            self.host_experts + other.host_experts,
            self.waited_s + other.waited_s,
            self.late + other.late,
            self.swept_bytes + other.swept_bytes,
            self.to_gpu_bytes + other.to_gpu_bytes,
            self.from_gpu_bytes + other.from_gpu_bytes,
            self.vram_experts + other.vram_experts,
        )


def decoded(times: Times, tokens: int, late: int, last_waits_ns: int, sizes: Sizes) -> DeviceCounts:
    """Of one graph. `last_waits_ns`: each token's last wait, which the host does not see in its sums."""
    carried = times.gpu_experts - times.vram_experts
    return DeviceCounts(
        gpu_experts=times.gpu_experts,
        host_experts=times.host_experts,
        waited_s=(times.waited_ns + last_waits_ns) * 1e-9,
        late=late,
        to_gpu_bytes=carried * sizes.block + times.turns * sizes.turn_to_gpu + tokens * sizes.token_to_gpu,
        from_gpu_bytes=times.turns * sizes.turn_from_gpu + tokens * sizes.token_from_gpu,
        vram_experts=times.vram_experts,
    )


def swept(copied_bytes: int) -> DeviceCounts:
    return DeviceCounts(swept_bytes=copied_bytes, to_gpu_bytes=copied_bytes)


def brought(copied_bytes: int) -> DeviceCounts:
    """Of blocks that stay in the card's memory, once each time that one comes there."""
    return DeviceCounts(to_gpu_bytes=copied_bytes)
