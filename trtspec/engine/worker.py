"""The engine's own thread, and the bridge between it and an asyncio server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from trtspec.engine.bodies import ApiError
from trtspec.engine.boundary import log_exception
from trtspec.engine.engine import Engine
from trtspec.engine.request import GenerationRequest, RequestRefused
from trtspec.engine.sequence import Output

SCORES_IN_FLIGHT = 2_000_000  # 25 bytes each


@dataclass(eq=False)
class Reservation:
    """The share of a worker that an API call holds, from its check until its answer is sent.

    Used from the event loop.

    generations: requests that run or wait.
    scores: log-probabilities that are kept for the call.
    """

    worker: Worker
    generations: int = 0
    scores: int = 0

    def take(self, generations: int = 0, scores: int = 0) -> bool:
        """Reserves more. False if there is no room for it: then nothing is reserved."""
        reserved = self.worker.reserved
        free_generations = self.worker.capacity - sum(call.generations for call in reserved)
        free_scores = SCORES_IN_FLIGHT - sum(call.scores for call in reserved)
        if generations > free_generations or (scores and scores > free_scores):
            return False
        reserved.add(self)
        self.generations += generations
        self.scores += scores
        return True

    def release(self) -> None:
        """Gives all of it back. May be called again."""
        self.worker.reserved.discard(self)


class Worker:
    """Runs an engine in a thread.

    All methods but `start` and `stop` are called from the event loop. At most `max_queue` requests
    wait while others run, as `reserved` counts them. `on_death` is called in the event loop when
    the thread has died.
    """

    def __init__(self, engine: Engine, max_queue: int) -> None:
        self.engine = engine
        self.capacity = engine.max_batch_size + max_queue
        self.on_death: Callable[[], None] = lambda: None
        self.failure: BaseException | None = None
        self.reserved: set[Reservation] = set()
        self._ending = "the engine stopped"
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[Output | None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread. Outputs go to the event loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step and waits for it."""
        self._commands.put(None)  # after all commands that were given before
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def give_up(self, reason: str) -> None:
        """Ends every request that still runs or waits, with that reason."""
        self._ending = reason
        self._distribute(None)

    @property
    def healthy(self) -> bool:
        return self.failure is None and self._thread.is_alive()

    async def run(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[tuple[int, Output]]:
        """Yields (index, output) of checked requests as they come. Leaving early cancels them.

        Raises RequestRefused if a request turns out to be impossible on the way. Raises ApiError
        500 for any other exception of a request, which other calls do not notice. Raises ApiError
        503 if the engine stopped.
        """
        if not self.healthy:
            raise ApiError(self._ending, status=503)
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        running = {request.id: index for index, request in enumerate(requests)}
        self._outputs |= dict.fromkeys(running, outputs)
        self._commands.put(lambda: self._submit(requests))
        try:
            while running:
                output = await outputs.get()
                if output is None:
                    raise ApiError(self._ending, status=503)
                index = running[output.id]
                if isinstance(output.error, RequestRefused):
                    raise output.error
                if output.error is not None:
                    log_exception(f"generation {output.id}", output.error)
                    raise ApiError("the generation failed", status=500)
                if output.finish_reason is not None:
                    del running[output.id], self._outputs[output.id]
                yield index, output
        finally:
            for name in running:
                del self._outputs[name]
            # Only the engine's thread touches the engine.
            self._commands.put(lambda: self.engine.cancelled.update(running))

    async def collect(self, requests: Sequence[GenerationRequest]) -> list[Output]:
        """The whole answers. Raises as `run` does."""
        completions = [Output(request.id) for request in requests]
        async for index, output in self.run(requests):
            completions[index].add(output)
        return completions

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        for earlier, request in enumerate(requests):
            try:
                self.engine.enqueue(request, earlier)
            except Exception as error:
                self._deliver([Output(request.id, finish_reason="error", error=error)])

    def _run(self) -> None:
        try:
            while self._obey():
                self._deliver(self.engine.step())
        except BaseException as error:
            self.failure = error
            log_exception("the engine stopped", error)
        finally:
            self._deliver(None)

    def _obey(self) -> bool:
        """Executes the commands. Waits for one if there is nothing to compute. False: stop."""
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _deliver(self, outputs: list[Output] | None) -> None:
        """Hands a step's outputs to the event loop in one call. None ends every waiting request."""
        assert self._loop is not None
        if outputs == [] or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._distribute, outputs)

    def _distribute(self, outputs: list[Output] | None) -> None:
        if outputs is None:
            for queue in set(self._outputs.values()):
                queue.put_nowait(None)
            if self.failure is not None:
                self.on_death()
            return
        for output in outputs:
            if output.id in self._outputs:  # a cancelled request has nobody waiting
                self._outputs[output.id].put_nowait(output)
