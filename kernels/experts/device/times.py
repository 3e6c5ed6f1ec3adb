"""Where the time of turns between a GPU and its host went. Apart from the turns, so that it is read without Triton."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Times:
    """Sums since the turns were opened. `plan_ns`: of the host's time, until the GPU is told what it computes;
    `waited_ns`: the GPU's wait for the host's results."""

    turns: int
    gpu_experts: int
    host_experts: int
    host_ns: int
    plan_ns: int
    idle_ns: int
    waited_ns: int
    share_thousandths: int
    vram_experts: int = 0  # of the GPU's, those whose blocks it had in its own memory
