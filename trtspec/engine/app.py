"""The HTTP surface of the reference engine, endpoint for endpoint that of trtllm-serve: OpenAI-compatible generation,
and what the server says about itself (health, versions, models, sizes, counters)."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import DONE, ChoiceStream, body, encoded, usage_chunk
from trtspec.engine.boundary import Boundary, body_limit, error_response, read_json
from trtspec.engine.engine import Engine
from trtspec.engine.openapi import STATUS_DOCUMENTS, describe, described
from trtspec.engine.prepare import ApiCall, Preparation
from trtspec.engine.protocol import ApiError, ChatBody, CompletionBody, GenerationBody, parse_body
from trtspec.engine.request import GenerationRequest, PromptTooLong, RequestRefused
from trtspec.engine.sequence import Completion, Output
from trtspec.engine.worker import SCORES_IN_FLIGHT, EngineThreadDied, GenerationFailed, Reservation, Worker
from trtspec.models.precision import dtype_name

RETRY_SECONDS = 1
GENERATION_SECONDS = 60
GENERATION_ENDED = (RequestRefused, EngineThreadDied, GenerationFailed)


@dataclass(frozen=True)
class AppOptions:
    """What the API is besides its engine. Without an `api_key` everyone is served. `on_death` is called when the engine
    thread has died."""

    served_model_name: str
    api_key: str | None = None
    max_queue: int = 512
    on_death: Callable[[], None] = lambda: None


def create_app(engine: Engine, tokenizer: KimiTokenizer, options: AppOptions) -> FastAPI:
    """The server around an engine; its thread lives as long as the app does. `app.state.worker` is the bridge to it."""
    worker = Worker(engine, options.max_queue, options.on_death)
    served = options.served_model_name

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    app = FastAPI(title="trtspec reference server", version=metadata.version("trtspec"), lifespan=lifespan)
    app.state.worker = worker
    app.add_middleware(Boundary, api_key=options.api_key)
    _add_errors(app)
    add_status(app, worker, served)
    limit = body_limit(engine.max_seq_len)
    preparation = Preparation(engine, tokenizer, served)

    async def answer(request: Request, kind: type[GenerationBody], prepare: Callable[[Any], ApiCall]) -> Response:
        """Reads, checks and prepares beside the event loop, then generates."""
        arrival = Arrival(worker, request, time.monotonic(), Reservation(worker))
        asked = await asyncio.to_thread(parse_body, kind, await read_json(request, limit))
        _require_model(asked, served)
        try:
            _require_room(asked.choices, arrival.reservation)
            job = await asyncio.to_thread(prepare, asked)
            _require_room_for_scores(job.scores, arrival.reservation)
            return await _respond(job, asked.stream, arrival)
        except BaseException:
            arrival.reservation.release()
            raise

    @app.post("/v1/completions", **described(CompletionBody))
    async def completions(request: Request) -> Response:
        """Completes one or several prompts, given as text or as token ids."""
        return await answer(request, CompletionBody, preparation.completion)

    @app.post("/v1/chat/completions", **described(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await answer(request, ChatBody, preparation.chat)

    describe(app, secured=options.api_key is not None)
    return app


@dataclass(frozen=True)
class Arrival:
    """A request that arrived at the server, when, the worker that serves it, and what it holds of that."""

    worker: Worker
    request: Request
    seconds: float
    reservation: Reservation


class Reply(StreamingResponse):
    """An answer in pieces. What its request held is free when it is sent, or cannot be."""

    def __init__(self, reservation: Reservation, pieces: AsyncIterator[str | bytes], **options: Any) -> None:
        super().__init__(pieces, **options)
        self.reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reservation.release()


async def _respond(job: ApiCall, stream: bool, arrival: Arrival) -> Response:
    if stream:
        return Reply(arrival.reservation, _stream(job, arrival), media_type="text/event-stream")
    completions = await _unless_disconnected(arrival.request, _collect_all(arrival, job.requests))
    if completions is None:
        return Reply(arrival.reservation, _sent([]), status_code=499)
    prompts = [request.prompt_ids for request in job.requests]
    parts = body(job.answer, completions, prompts, job.prompt_tokens, job.thinking)
    pieces = await asyncio.to_thread(encoded, parts)
    length = {"Content-Length": str(sum(map(len, pieces)))}
    return Reply(arrival.reservation, _sent(pieces), media_type="application/json", headers=length)


async def _sent(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def _collect_all(arrival: Arrival, requests: list[GenerationRequest]) -> list[Completion]:
    tasks = [asyncio.create_task(arrival.worker.collect(request, arrival.seconds)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _unless_disconnected(
    request: Request, work: Coroutine[Any, Any, list[Completion]]
) -> list[Completion] | None:
    """The result of `work`, or None after cancelling it because the client went away."""
    working, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        working.cancel()
        await asyncio.wait({working})
        return None
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(job: ApiCall, arrival: Arrival) -> AsyncIterator[str]:
    """Server-sent events of all choices, in the order in which the engine makes them."""
    streams = [
        ChoiceStream(job.answer, index, job.thinking, request.prompt_ids) for index, request in enumerate(job.requests)
    ]
    try:
        async for index, output in _merged(arrival, job.requests):
            push = streams[index].push  # a long prompt's log-probabilities are written beside the event loop
            chunk = await asyncio.to_thread(push, output) if output.prompt_logprobs else push(output)
            if chunk:
                yield chunk
    except GENERATION_ENDED as failure:
        yield f"data: {json.dumps(_told(failure).to_dict())}\n\n"
        return
    if job.answer.usage != "no":
        yield usage_chunk(job.answer, job.prompt_tokens, [stream.completion for stream in streams])
    yield DONE


async def _merged(arrival: Arrival, requests: list[GenerationRequest]) -> AsyncIterator[tuple[int, Output]]:
    """(choice, output) of several requests as they come."""
    if len(requests) == 1:
        async for output in arrival.worker.run(requests[0], arrival.seconds):
            yield 0, output
        return
    merged: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()

    async def feed(index: int, request: GenerationRequest) -> None:
        try:
            async for output in arrival.worker.run(request, arrival.seconds):
                merged.put_nowait((index, output))
        except GENERATION_ENDED as failure:
            merged.put_nowait((index, failure))

    tasks = [asyncio.create_task(feed(index, request)) for index, request in enumerate(requests)]
    try:
        open_choices = len(requests)
        while open_choices:
            index, item = await merged.get()
            if isinstance(item, Exception):
                raise item
            open_choices -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


def _require_model(asked: GenerationBody, served: str) -> None:
    if asked.model not in (None, served):
        raise ApiError(
            f"The model `{asked.model}` does not exist; this server serves `{served}`",
            status=404,
            param="model",
            code="model_not_found",
        )


def _require_room(wanted: int, reservation: Reservation) -> None:
    """Reserves so many generations. Raises ApiError 429 while too many requests wait, 503 while the engine is down, 400
    for what can never run."""
    worker = reservation.worker
    if not worker.healthy:
        raise ApiError("the engine stopped", status=503)
    if wanted > worker.capacity:
        raise ApiError(f"{wanted} generations in one request; this server takes {worker.capacity} at once")
    if not reservation.take(generations=wanted):
        raise ApiError("too many requests wait", status=429, code="queue_full", retry_after=RETRY_SECONDS)


def _require_room_for_scores(wanted: int, reservation: Reservation) -> None:
    """Reserves so many scores. Raises ApiError 429 while those of all requests together would be too many."""
    if not reservation.take(scores=wanted):
        raise ApiError(
            f"requests in flight have log-probabilities of {SCORES_IN_FLIGHT} tokens and alternatives at most",
            status=429,
            param="logprobs",
            code="queue_full",
            retry_after=RETRY_SECONDS,
        )


def _told(failure: Exception) -> ApiError:
    """What a client hears about the end of a generation."""
    if isinstance(failure, RequestRefused):
        code = "context_length_exceeded" if isinstance(failure, PromptTooLong) else None
        return ApiError(failure.message, param=failure.param, code=code)
    return ApiError(str(failure), status=503 if isinstance(failure, EngineThreadDied) else 500)


def _add_errors(app: FastAPI) -> None:
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return error_response(error)

    async def generation_ended(_: Request, error: Exception) -> JSONResponse:
        return error_response(_told(error))

    async def too_deep(_: Request, error: RecursionError) -> JSONResponse:
        return error_response(ApiError("the body is nested too deeply"))

    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(ApiError(str(error.detail), status=error.status_code), error.headers)

    handlers: dict[type[Exception], Any] = {ApiError: api_error, RecursionError: too_deep, HTTPException: http_error}
    for kind, handler in (handlers | dict.fromkeys(GENERATION_ENDED, generation_ended)).items():
        app.add_exception_handler(kind, handler)


@dataclass(frozen=True)
class Status:
    """Answers for one engine behind its worker."""

    worker: Worker
    model: str
    version: str
    started: int

    async def health(self) -> Response:
        """200 while the engine runs."""
        return Response(status_code=200 if self.worker.healthy else 503)

    async def health_generate(self) -> Response:
        """200 after a real generation of one token."""
        request = GenerationRequest(f"health-{uuid.uuid4().hex}", [next(iter(self.worker.engine.eos_ids), 0)], 1)
        try:
            await asyncio.wait_for(self.worker.collect(request), timeout=GENERATION_SECONDS)
        except (TimeoutError, EngineThreadDied, GenerationFailed):
            return Response(status_code=503)
        return Response(status_code=200)

    async def versions(self) -> JSONResponse:
        """Version of the server, type that it computes in, and how drafts of sampled requests are chosen."""
        engine = self.worker.engine
        how = {"version": self.version, "dtype": dtype_name(engine.target.dtype)}
        return JSONResponse(how | ({"draft_sampling": engine.options.draft_sampling} if engine.draft_len else {}))

    async def models(self) -> JSONResponse:
        """The one model that is served."""
        entry = {"id": self.model, "object": "model", "created": self.started, "owned_by": "trtspec"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def server_info(self) -> JSONResponse:
        """Sizes of the engine. `disaggregated_params` is null: trtllm-serve's clients look for it."""
        engine = self.worker.engine
        return JSONResponse(
            {
                "disaggregated_params": None,
                "model": self.model,
                "backend": "reference",
                "max_batch_size": engine.max_batch_size,
                "max_seq_len": engine.max_seq_len,
                "max_queue": self.worker.capacity - engine.max_batch_size,
                "max_draft_len": engine.draft_len,
            }
        )

    async def iterations(self) -> JSONResponse:
        """Records of the engine's steps since the last call."""
        return JSONResponse(self.worker.drain_iterations())

    async def perf_metrics(self) -> JSONResponse:
        """Times and speculation of the requests that ended since the last call."""
        return JSONResponse(self.worker.drain_timings())

    async def prometheus(self) -> Response:
        """Totals since the start, for a scraper."""
        text = prometheus_text(self.worker.engine)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def add_status(app: FastAPI, worker: Worker, model: str) -> None:
    """Adds the paths to an app."""
    status = Status(worker, model, app.version, int(time.time()))
    answers: dict[str, Any] = {
        "/health": status.health,
        "/health_generate": status.health_generate,
        "/version": status.versions,
        "/v1/models": status.models,
        "/server_info": status.server_info,
        "/metrics": status.iterations,
        "/perf_metrics": status.perf_metrics,
        "/prometheus/metrics": status.prometheus,
    }
    for path, answer in answers.items():
        app.get(path, responses=STATUS_DOCUMENTS[path], response_class=Response)(answer)


class EngineCollector(Collector):
    """Reads the engine's totals at the moment of the scrape."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        totals = self.engine.totals
        counters = {
            "requests": (totals.requests, "Requests that ended."),
            "prompt_tokens": (totals.prompt_tokens, "Prompt tokens prefilled."),
            "generation_tokens": (totals.tokens, "Tokens generated."),
            "engine_iterations": (totals.iterations, "Engine steps."),
            "spec_decode_steps": (totals.steps, "Verification steps, counted per sequence."),
            "spec_decode_draft_tokens": (totals.drafted, "Draft tokens verified."),
            "spec_decode_accepted_tokens": (totals.accepted, "Draft tokens accepted."),
        }
        if self.engine.prefix is not None:
            prefix = self.engine.prefix.stats
            counters["prefix_tokens"] = (prefix.tokens, "Prompt tokens looked up among computed prefixes.")
            counters["prefix_cached_tokens"] = (prefix.cached_tokens, "Prompt tokens that needed no computation.")
            counters["prefix_evicted_blocks"] = (prefix.evicted_blocks, "Blocks of prefixes that made room for others.")
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"trtspec_{name}", text, value=value)
        positions = CounterMetricFamily(
            "trtspec_spec_decode_accepted_tokens_per_position",
            "Steps that accepted this draft position.",
            labels=["position"],
        )
        for position in range(1, len(totals.histogram)):
            positions.add_metric([str(position)], sum(totals.histogram[position:]))
        yield positions
        yield GaugeMetricFamily("trtspec_requests_running", "Requests in the batch.", value=len(self.engine.batch))
        yield GaugeMetricFamily("trtspec_requests_waiting", "Requests in the queue.", value=len(self.engine.waiting))


def prometheus_text(engine: Engine) -> bytes:
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    return generate_latest(registry)
