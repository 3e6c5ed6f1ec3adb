"""A token's worth of expert layers as one CUDA graph with the host library behind it, and nothing else: what the expert
benchmark times and the bit tests compare. Owns the graph and its inputs; the slots are the caller's.
"""

from dataclasses import dataclass

import torch

from kernels.experts.decode_step import DOWN_SPLITS, ExpertStep
from kernels.experts.device.turns import TIMEOUT_NS, HandoffError, Route, SharedSlots, Turns

Tensor = torch.Tensor


@dataclass(frozen=True)
class Method:
    """How a layer's experts are placed. `share`: how many the GPU takes; None: so many that both finish together."""

    name: str
    route: Route = Route.IN_PLACE
    share: int | None = None
    waves: tuple[int, ...] = ()  # items of each; one wave of all
    whole_groups: bool = False
    timeout_ns: int = TIMEOUT_NS
    splits: int = DOWN_SPLITS
    lanes: int = 2
    apart: bool = False  # each wave in a stream of its own


class Rig:
    """`layers` MoE layers in a graph; inputs are written between replays. All on the current CUDA device.

    `share` is where a split that finds itself begins. `late`: how often the last replay's token had to go on.
    """

    def __init__(
        self, slots: SharedSlots, layers: int, tokens: int, top_k: int, method: Method, share: float = 8.0
    ) -> None:
        device = torch.device("cuda")
        layout = slots.host.catalog.layout
        self.method = method
        self.layers, self.late = layers, 0
        self.step = ExpertStep(layout, tokens * top_k, tokens, top_k, device, method.splits)
        self.turns = Turns(slots, self.step, method.waves, method.timeout_ns, apart=method.apart)
        if method.route is not Route.IN_PLACE:
            self.turns.copy_through(method.route, method.lanes)
        self.turns.share(method.share, initial=share)
        self.ids = torch.zeros(layers, tokens, top_k, dtype=torch.int32, device=device)
        self.x = torch.zeros(layers, tokens, layout.latent, device=device)
        self.weights = torch.zeros(layers, tokens, top_k, device=device)
        self.out = torch.zeros(layers, tokens, layout.latent, device=device)
        self._warm()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for layer in range(layers):
                self._launch(layer)

    def fill(self, ids: Tensor, weights: Tensor, x: Tensor) -> None:
        """Of the next replay: ids int32, weights float32 [layers, tokens, k], x float32 [layers, tokens, latent]."""
        self.ids.copy_(ids)
        self.weights.copy_(weights)
        self.x.copy_(x)
        torch.cuda.synchronize()

    def replay(self) -> float:
        """One token through all layers -> milliseconds on the GPU's clock. Raises HandoffError if a turn failed."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        self.graph.replay()
        end.record()
        served = self.turns.serve(self.layers)
        torch.cuda.synchronize()
        self.late = 0
        while int(self.turns.stopped):
            self.late += 1
            self.turns.go_on()
            for layer in range(served - 1, self.layers):
                self._launch(layer, post=layer >= served)
            end.record()
            served += self.turns.serve(self.layers - served)
            torch.cuda.synchronize()
        self.turns.retire()
        return float(begin.elapsed_time(end))

    def close(self) -> None:
        torch.cuda.synchronize()
        self.turns.retire()
        self.turns.close()

    def _launch(self, layer: int, post: bool = True) -> None:
        step, turns = self.step, self.turns
        step.x, step.weights, step.out = self.x[layer], self.weights[layer], self.out[layer]
        if post:
            turns.post(layer, self.ids[layer], self.x[layer])
        step.launch_quantise()
        turns.launch_waves(self.method.whole_groups)
        turns.wait_results()
        step.launch_combine()

    def _warm(self) -> None:
        """Compiles all kernels; while one is being compiled a wait may run out of time, which then means nothing."""
        for _ in range(3):
            for layer in range(min(2, self.layers)):
                self._launch(layer)
                self.turns.serve(1)
            torch.cuda.synchronize()
            in_time = not int(self.turns.stopped)
            self.turns.retire()
            if in_time:
                return
        raise HandoffError("the host does not answer the GPU in time, even when nothing is to be compiled")
