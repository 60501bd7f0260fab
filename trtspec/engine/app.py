"""The OpenAI-compatible HTTP surface of the reference engine, endpoint for endpoint that of trtllm-serve."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import DONE, ChoiceStream, body, usage_chunk
from trtspec.engine.boundary import Boundary, body_limit, error_response, read_json
from trtspec.engine.engine import Engine
from trtspec.engine.openapi import describe, described
from trtspec.engine.prepare import ApiCall, Preparation
from trtspec.engine.protocol import ApiError, ChatBody, CompletionBody, GenerationBody, parse_body
from trtspec.engine.request import GenerationRequest, PromptTooLong, RequestRefused
from trtspec.engine.sequence import Completion, Output
from trtspec.engine.status import add_status
from trtspec.engine.worker import EngineThreadDied, GenerationFailed, Worker

RETRY_SECONDS = 1


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
        arrived = time.monotonic()
        asked = await asyncio.to_thread(parse_body, kind, await read_json(request, limit))
        _require_model(asked, served)
        _require_room(asked, worker)
        return await _respond(await asyncio.to_thread(prepare, asked), asked.stream, Arrival(worker, request, arrived))

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
    """A request that arrived at the server, when, and the worker that serves it."""

    worker: Worker
    request: Request
    seconds: float


async def _respond(job: ApiCall, stream: bool, arrival: Arrival) -> Response:
    if stream:
        return StreamingResponse(_stream(job, arrival), media_type="text/event-stream")
    completions = await _unless_disconnected(arrival.request, _collect_all(arrival, job.requests))
    if completions is None:
        return Response(status_code=499)
    prompts = [request.prompt_ids for request in job.requests]
    return JSONResponse(body(job.answer, completions, prompts, job.prompt_tokens, job.thinking))


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
            if chunk := streams[index].push(output):
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


def _require_room(asked: GenerationBody, worker: Worker) -> None:
    """Raises ApiError 429 while too many requests wait, 503 while the engine is down, 400 for what can never run."""
    wanted = asked.choices
    if not worker.healthy:
        raise ApiError("the engine stopped", status=503)
    if wanted > worker.capacity:
        raise ApiError(f"{wanted} generations in one request; this server takes {worker.capacity} at once")
    if wanted > worker.free:
        raise ApiError("too many requests wait", status=429, code="queue_full", retry_after=RETRY_SECONDS)


GENERATION_ENDED = (RequestRefused, EngineThreadDied, GenerationFailed)


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
