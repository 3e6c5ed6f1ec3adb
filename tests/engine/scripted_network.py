"""A scheduler without its engine, around the toy network in layers: a test makes every step, and sees each layer."""

from collections.abc import Callable, Generator

from prometheus_client import CollectorRegistry
from torch import Tensor
from toy_engine import CONFIG, INFO, ToyExperts, ToyModel

from services.engine.metrics import Metrics
from services.engine.model import Segment
from services.engine.pages import PagePool
from services.engine.request import Event, Failed, Finish, Progress, Request, Token
from services.engine.scheduler import Scheduler
from services.engine.sequence import Sequence
from services.engine.snapshots.hot import HotStates
from services.engine.snapshots.payload import PayloadFormat

LAYERS = 4


class LayeredModel(ToyModel):
    """`log` has what was done, in order: "read 8+3", "layer" for each, "done" or "closed", and "token 2"."""

    def __init__(self, experts: ToyExperts) -> None:
        super().__init__(experts)
        self.layers = LAYERS
        self.log: list[str] = []
        self.segments: list[Segment] = []  # of all readings
        self.at_layer: Callable[[int], None] = lambda layer: None

    def forward(self, segments: list[Segment], give_way: Callable[[], bool] | None = None) -> Tensor:
        assert not any(segment.state.spoiled for segment in segments)
        self.log.append(f"token {len(segments)}")
        return super().forward(segments, give_way)

    def reading(self, segments: list[Segment]) -> Generator[float, None, Tensor]:
        self.log.append("read " + "+".join(str(len(segment.ids)) for segment in segments))
        self.segments += segments
        try:
            for layer in range(self.layers):
                yield layer / self.layers
                self.log.append("layer")
                self.at_layer(layer)
                assert not any(segment.state.spoiled for segment in segments), "a state was let go of on the way"
        except GeneratorExit:
            self._spoil(segments, "closed")
            raise
        except Exception:
            self._spoil(segments, "failed")
            raise
        self.log.append("done")
        return self._run(segments)

    def _spoil(self, segments: list[Segment], how: str) -> None:
        self.log.append(how)
        for segment in segments:
            segment.state.spoiled = True


class Asked:
    """A request in the scheduler's hands, and what it was told."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.events: list[Event] = []
        self.sequence = Sequence(request, self.events.append)
        scheduler.add(self.sequence)

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]

    @property
    def end(self) -> Finish | Failed | None:
        last = self.events[-1]
        return last if isinstance(last, Finish | Failed) else None


class Bench:
    """With `slice_s` 0 a step is one layer, as soon as anybody answers or `others_wait`."""

    def __init__(self, places: int = 4, chunk_tokens: int = 16, slice_s: float = 0.0, pages: int = 64) -> None:
        experts = ToyExperts()
        self.model = LayeredModel(experts)
        self.pool = PagePool(CONFIG, pages)
        hot = HotStates(PayloadFormat(CONFIG, "m", "a"), "a", 1 << 20)
        self.registry = CollectorRegistry()
        metrics = Metrics(INFO, experts, self.registry)
        self.scheduler = Scheduler(self.model, self.pool, hot, metrics, places, chunk_tokens, slice_s=slice_s)
        self.busy = False
        self.scheduler.others_wait = lambda: self.busy

    def ask(self, *ids: int, max_tokens: int = 3, **more: object) -> Asked:
        return Asked(self.scheduler, Request("r", ids, max_tokens, **more))  # type: ignore[arg-type]

    def step(self, steps: int = 1) -> list[str]:
        """What the network did in these steps."""
        before = len(self.model.log)
        for _ in range(steps):
            self.scheduler.step()
            self.scheduler.check()
        return self.model.log[before:]

    def run(self) -> None:
        """Until nothing is left to do."""
        while self.scheduler.runnable:
            self.step()
        assert not self.scheduler.sequences
        assert self.pool.free == self.pool.total, "every page was given back"

    def stall(self, suffix: str) -> float:
        found = self.registry.get_sample_value(f"thimble_prefill_stall_seconds_{suffix}", {"model_name": "toy"})
        assert found is not None
        return found
