"""The engine's own thread, the bridge between it and an asyncio server, and the times of each request."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

from trtspec.engine.boundary import log_exception
from trtspec.engine.engine import Engine
from trtspec.engine.request import GenerationRequest, RequestRefused
from trtspec.engine.sequence import Completion, Output, Stats

ITERATIONS_KEPT = REQUESTS_KEPT = 1000
SCORES_IN_FLIGHT = 2_000_000


class EngineThreadDied(Exception):
    """The engine thread died: every request in flight is told, and the process ends."""


class GenerationFailed(Exception):
    """One request met an exception of its own; the others are not concerned."""


class EngineStep(NamedTuple):
    """What a step of the engine made for one request, when (monotonic seconds), and the number of the step."""

    output: Output
    made: float
    iteration: int


@dataclass
class RequestTimes:
    """When one request arrived at the server and at the engine, when its prompt was taken up, and when its tokens were
    made and taken over by the server: seconds of the monotonic clock, as trtllm-serve has them."""

    id: str
    server_arrival: float
    arrival: float
    scheduled: float = 0.0
    first_token: float = 0.0
    server_first_token: float = 0.0
    last_token: float = 0.0
    first_iteration: int = 0
    last_iteration: int = 0
    stats: Stats | None = None

    def add(self, step: EngineStep) -> None:
        """Counts what a step made."""
        if not self.first_token:
            self.scheduled, self.first_iteration = step.output.scheduled, step.iteration
            self.first_token, self.server_first_token = step.made, time.monotonic()
        self.last_token, self.last_iteration = step.made, step.iteration
        self.stats = step.output.stats or self.stats

    def to_dict(self) -> dict[str, Any]:
        """The record under trtllm-serve's names."""
        metrics: dict[str, Any] = {
            "first_iter": self.first_iteration,
            "last_iter": self.last_iteration,
            "timing_metrics": {
                "server_arrival_time": self.server_arrival,
                "arrival_time": self.arrival,
                "first_scheduled_time": self.scheduled,
                "first_token_time": self.first_token,
                "server_first_token_time": self.server_first_token,
                "last_token_time": self.last_token,
            },
        }
        if self.stats is not None and self.stats.drafted:
            metrics["speculative_decoding"] = {
                "acceptance_rate": self.stats.accepted / self.stats.drafted,
                "total_accepted_draft_tokens": self.stats.accepted,
                "total_draft_tokens": self.stats.drafted,
            }
        return {"request_id": self.id, "perf_metrics": metrics}


@dataclass(eq=False)
class Reservation:
    """What an API call holds of a worker, from its check until its answer is sent: generations, which run or wait, and
    scores, which are the log-probabilities that are kept for it. Used from the event loop."""

    worker: Worker
    generations: int = 0
    scores: int = 0

    def take(self, generations: int = 0, scores: int = 0) -> bool:
        """Holds more, where there is room for it."""
        held = self.worker.reserved
        if generations > self.worker.capacity - sum(one.generations for one in held):
            return False
        if scores and scores > SCORES_IN_FLIGHT - sum(one.scores for one in held):
            return False
        held.add(self)
        self.generations += generations
        self.scores += scores
        return True

    def release(self) -> None:
        """Gives all of it back. May be called again."""
        self.worker.reserved.discard(self)


class Worker:
    """Runs an engine in a thread. All methods but `start` and `stop` are called from the event loop.

    At most `max_queue` requests wait beside those that run, as `reserved` counts them. `on_death` is called in the
    event loop when the thread has died. The last `iterations` and `timings` are kept, whoever reads them.
    """

    def __init__(self, engine: Engine, max_queue: int, on_death: Callable[[], None] = lambda: None) -> None:
        self.engine = engine
        self.capacity = engine.max_batch_size + max_queue
        self.on_death = on_death
        self.iterations: deque[dict[str, Any]] = deque(maxlen=ITERATIONS_KEPT)
        self.timings: deque[RequestTimes] = deque(maxlen=REQUESTS_KEPT)
        self.failure: BaseException | None = None
        self.reserved: set[Reservation] = set()
        self._ending = "the engine stopped"
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[EngineStep | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; outputs go to the event loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step and waits for it."""
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def give_up(self, reason: str) -> None:
        """Ends every request that still runs or waits, and tells it why."""
        self._ending = reason
        self._distribute(None)

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    async def run(
        self, requests: Sequence[GenerationRequest], arrived: float | None = None
    ) -> AsyncIterator[tuple[int, Output]]:
        """(index, output) of checked requests as they come. Leaving the loop early cancels them. `arrived` is when the
        server got them, in seconds of the monotonic clock.

        Raises RequestRefused for what shows to be impossible on the way, GenerationFailed for another exception of one
        of them, EngineThreadDied where no request goes on.
        """
        now = time.monotonic()
        if not self.healthy:
            raise EngineThreadDied(self._ending)
        steps: asyncio.Queue[EngineStep | None] = asyncio.Queue()
        running = {one.id: (at, RequestTimes(one.id, arrived or now, now)) for at, one in enumerate(requests)}
        self._outputs |= dict.fromkeys(running, steps)
        self._commands.put(lambda: self._submit(requests))
        try:
            while running:
                step = await steps.get()
                if step is None:
                    raise EngineThreadDied(self._ending)
                output = step.output
                index, times = running[output.id]
                if isinstance(output.error, RequestRefused):
                    raise output.error
                if output.error is not None:
                    log_exception(f"generation {output.id}", output.error)
                    raise GenerationFailed("the generation failed")
                times.add(step)
                if output.finish_reason is not None:
                    self.timings.append(times)
                    del running[output.id], self._outputs[output.id]
                yield index, output
        finally:
            for name in running:
                del self._outputs[name]
            self._commands.put(lambda: self.engine.cancelled.update(running))

    async def collect(self, requests: Sequence[GenerationRequest], arrived: float | None = None) -> list[Completion]:
        """The whole answers; raises what `run` raises."""
        completions = [Completion(request.id) for request in requests]
        async for index, output in self.run(requests, arrived):
            completions[index].add(output)
        return completions

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            try:
                self.engine.enqueue(request)
            except Exception as error:
                self._deliver([Output(request.id, [], "", "error", error=error)])

    def _run(self) -> None:
        try:
            while self._obey():
                outputs = self.engine.step()
                if self.engine.iteration is not None:
                    self.iterations.append(self.engine.iteration.to_dict())
                self._deliver(outputs)
        except BaseException as error:
            self.failure = error
            log_exception("the engine stopped", error)
        finally:
            self._deliver(None)

    def _obey(self) -> bool:
        """Executes what was asked; waits when there is nothing to compute. False: stop."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _deliver(self, outputs: list[Output] | None) -> None:
        """Hands a step's outputs to the event loop in one call; None tells every waiting request that all is over."""
        assert self._loop is not None
        if outputs == [] or self._loop.is_closed():
            return
        made, iteration = time.monotonic(), self.engine.totals.iterations
        steps = None if outputs is None else [EngineStep(output, made, iteration) for output in outputs]
        self._loop.call_soon_threadsafe(self._distribute, steps)

    def _distribute(self, steps: list[EngineStep] | None) -> None:
        if steps is None:
            for queue in set(self._outputs.values()):
                queue.put_nowait(None)
            if self.failure is not None:
                self.on_death()
            return
        for step in steps:
            if step.output.id in self._outputs:  # a cancelled request has nobody waiting
                self._outputs[step.output.id].put_nowait(step)
