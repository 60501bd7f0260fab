"""The thread that runs the engine, and the bridge between this thread and an asyncio server."""

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

# Largest number of log-probabilities kept for all requests together. Each takes 25 bytes.
SCORES_IN_FLIGHT = 2_000_000


@dataclass(eq=False)
class Reservation:
    """The part of a worker's limits that one API call holds until its response is sent.

    Only the event loop may use it.

    worker: the worker.
    generations: number of running or waiting engine requests of the call.
    scores: number of log-probabilities that are kept for the call.
    """

    worker: Worker
    generations: int = 0
    scores: int = 0

    def take(self, generations: int = 0, scores: int = 0) -> bool:
        """Adds to the reservation. Returns False, and reserves nothing, if there is no room."""
        reserved = self.worker.reserved
        free_generations = self.worker.capacity - sum(call.generations for call in reserved)
        free_scores = SCORES_IN_FLIGHT - sum(call.scores for call in reserved)
        lacks_room = generations > free_generations or (scores and scores > free_scores)
        if lacks_room:
            return False
        reserved.add(self)
        self.generations += generations
        self.scores += scores
        return True

    def release(self) -> None:
        """Gives the whole reservation back. Further calls do nothing."""
        self.worker.reserved.discard(self)


class Worker:
    """Runs an engine in a thread of its own, for callers in one event loop.

    engine: the engine. Only the thread may call its methods, other than `check`.
    capacity: largest number of running and waiting requests, `max_queue` more than the batch holds.
    on_death: function that the event loop calls after the engine raised an exception.
    failure: exception that ended the engine. None while the engine works.
    reserved: reservations of the API calls in flight.
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
        """Starts the thread. The calling event loop will receive the outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the current step, and waits up to a minute for its end."""
        self._commands.put(None)  # stops the thread after all earlier commands
        if self._thread.is_alive():
            self._thread.join(timeout=60)

    def give_up(self, reason: str) -> None:
        """Ends every running and waiting request. Clients get `reason` as an error with 503."""
        self._ending = reason
        self._distribute(None)

    @property
    def healthy(self) -> bool:
        """Whether the thread runs and the engine did not fail."""
        return self.failure is None and self._thread.is_alive()

    async def run(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[tuple[int, Output]]:
        """Runs checked requests, and yields the index of a request with each of its outputs.

        Closing the iterator early cancels the unfinished requests. Raises RequestRefused if the
        constraints of a request turn out to be impossible. Raises ApiError 500 if a request fails
        otherwise, and ApiError 503 if the engine stopped.
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
        """Returns the complete output of each request. Raises the same errors as `run`."""
        completions = [Output(request.id) for request in requests]
        async for index, output in self.run(requests):
            completions[index].add(output)
        return completions

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues the requests of one API call. Runs in the engine's thread."""
        for earlier, request in enumerate(requests):
            try:
                self.engine.enqueue(request, earlier)
            except Exception as error:
                self._deliver([Output(request.id, finish_reason="error", error=error)])

    def _run(self) -> None:
        """Steps the engine until the worker stops. Runs in the engine's thread."""
        try:
            while self._execute_commands():
                self._deliver(self.engine.step())
        except BaseException as error:
            # Whatever ended the thread, waiting clients and `on_death` must learn of it.
            self.failure = error
            log_exception("the engine stopped", error)
        finally:
            self._deliver(None)

    def _execute_commands(self) -> bool:
        """Executes waiting commands. Returns False if the thread must stop.

        Waits for a command if the engine has no work.
        """
        while not (self._commands.empty() and self.engine.has_work):
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _deliver(self, outputs: list[Output] | None) -> None:
        """Passes the outputs of a step to the event loop. None ends every waiting request."""
        assert self._loop is not None
        if outputs == [] or self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._distribute, outputs)

    def _distribute(self, outputs: list[Output] | None) -> None:
        """Puts each output into the queue of its API call. None ends every waiting request.

        Runs in the event loop.
        """
        if outputs is None:
            for queue in set(self._outputs.values()):
                queue.put_nowait(None)
            if self.failure is not None:
                self.on_death()
            return
        for output in outputs:
            if output.id in self._outputs:  # nobody waits for a cancelled request
                self._outputs[output.id].put_nowait(output)
