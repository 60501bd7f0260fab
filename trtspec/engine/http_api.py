"""The HTTP API of the reference engine: OpenAI-compatible generation, and the server's status.

The status endpoints are health, version, models and counters. FastAPI writes the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from starlette.exceptions import HTTPException as RoutingError
from starlette.types import Receive, Scope, Send

from trtspec.checkpoint.chat_parser import END_OF_TURN
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import DONE, ChoiceStream, encoded, response_parts, usage_chunk
from trtspec.engine.bodies import ApiError, ChatBody, CompletionBody, Form
from trtspec.engine.boundary import BodyRoute, Boundary, body_limit, error_response
from trtspec.engine.engine import Engine
from trtspec.engine.grammars import Grammar, Grammars, GrammarsBusy
from trtspec.engine.prepare import ApiCall, Preparation
from trtspec.engine.request import PromptTooLong, RequestRefused
from trtspec.engine.worker import SCORES_IN_FLIGHT, Reservation, Worker
from trtspec.models.precision import dtype_name

RETRY_SECONDS = 1  # in the header Retry-After of refused requests
Result = TypeVar("Result")


class ErrorText(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorText


ERRORS: dict[int | str, dict[str, Any]] = {
    "default": {"model": ErrorAnswer, "description": "What was wrong."}
}


def create_app(
    engine: Engine,
    tokenizer: KimiTokenizer,
    served: str,
    api_key: str | None = None,
    max_queue: int = 512,
) -> FastAPI:
    """Returns the FastAPI app that serves an engine.

    The app's lifespan starts and stops the engine's thread. `app.state.worker` is the Worker that
    runs this thread.

    Args:
        engine: the engine that generates.
        tokenizer: the tokenizer of the target.
        served: name of the model in requests and responses.
        api_key: key that requests must have. None: requests need no key.
        max_queue: largest number of requests that wait while others run.
    """
    worker = Worker(engine, max_queue)
    end_ids = set(engine.eos_ids)
    end_of_turn = tokenizer.special_tokens.get(END_OF_TURN)
    if end_of_turn is not None:
        end_ids.add(end_of_turn)
    grammars = Grammars(tokenizer, sorted(end_ids))
    preparation = Preparation(engine, tokenizer, served)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()
        grammars.close()

    app = FastAPI(
        title="trtspec reference server", version=metadata.version("trtspec"), lifespan=lifespan
    )
    app.router.route_class = BodyRoute
    app.state.worker = worker
    app.state.body_limit = body_limit(engine.max_seq_len)
    app.add_middleware(Boundary, api_key=api_key)
    app.add_exception_handler(RoutingError, _refused)
    app.add_exception_handler(RequestRefused, _refused)
    _add_status(app, worker, served)

    async def answer(body: CompletionBody | ChatBody, request: Request) -> Response:
        """Prepares the request in a thread, generates, and returns the response.

        The reservation is released after the response is sent, or at once if the request fails.
        """
        reservation = Reservation(worker)
        _require_model(body.model, served)
        try:
            grammar = None
            if body.form is not None:
                # The grammar is first, so that a flood of expensive grammars never fills the queue.
                grammar = await _unless_disconnected(request, _compiled(body.form, grammars))
            # Room is reserved before tokenizing, so that a full server refuses cheaply.
            _require_room(body.choices, reservation)
            # Templates and long texts take a while, so a thread prepares the job.
            job = await asyncio.to_thread(preparation.call, body, grammar)
            _require_room_for_scores(job.scores(engine.max_seq_len), reservation)
            if body.stream:
                return Reply(reservation, _stream(job, worker), media_type="text/event-stream")
            completions = await _unless_disconnected(request, worker.collect(job.requests))
            pieces = await asyncio.to_thread(encoded, response_parts(job, completions))
            length = {"Content-Length": str(sum(map(len, pieces)))}
            return Reply(reservation, pieces, media_type="application/json", headers=length)
        except BaseException:
            reservation.release()
            raise

    @app.post("/v1/completions", response_model=None, responses=ERRORS)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Completes one or several prompts, given as text or as token ids."""
        return await answer(body, request)

    @app.post("/v1/chat/completions", response_model=None, responses=ERRORS)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answers a conversation."""
        return await answer(body, request)

    return app


class Reply(StreamingResponse):
    """A response in chunks. Releases the reservation after the last chunk or a failed send."""

    def __init__(
        self, reservation: Reservation, chunks: AsyncIterator[str] | list[bytes], **options: Any
    ) -> None:
        super().__init__(chunks, **options)
        self.reservation = reservation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reservation.release()


async def _compiled(form: Form, grammars: Grammars) -> Grammar:
    """Returns the compiled grammar of a form.

    Raises ApiError 400 if the form is invalid or too expensive, and 503 if too many forms wait or
    are in use.
    """
    try:
        return await grammars.compiled(form.syntax, form.text)
    except ValueError as error:
        raise ApiError(f"no answer can have this form: {error}", param=form.param) from None
    except GrammarsBusy:
        message = "too many forms of answers wait to be compiled"
        raise ApiError(message, status=503, param=form.param, retry_after=RETRY_SECONDS) from None


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`.

    If the client disconnects first, cancels `work` and raises ApiError 499.
    """
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    # If the client is gone, nobody reads an exception of `work`. Reading it here prevents asyncio
    # from logging it.
    working.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError("the client closed the connection", status=499)
    finally:
        gone.cancel()
        working.cancel()


async def _disconnected(request: Request) -> None:
    """Waits until the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(job: ApiCall, worker: Worker) -> AsyncIterator[str]:
    """Yields the server-sent events of all choices, in the order of the engine's outputs.

    An error becomes the last event, because the status of the response is already sent.
    """
    streams = [ChoiceStream(job, index) for index in range(len(job.requests))]
    try:
        async for index, output in worker.run(job.requests):
            push = streams[index].push
            if output.prompt_logprobs:
                # Writing the log-probabilities of a long prompt would block the event loop.
                chunk = await asyncio.to_thread(push, output)
            else:
                chunk = push(output)
            if chunk:
                yield chunk
    except (ApiError, RequestRefused) as failure:
        yield f"data: {json.dumps(_as_api_error(failure).to_dict())}\n\n"
        return
    if job.body.usage_wanted != "no":
        yield usage_chunk(job, [stream.completion for stream in streams])
    yield DONE


def _require_model(model: str | None, served: str) -> None:
    """Raises ApiError 404 if a client names another model than the served one."""
    if model not in (None, served):
        message = f"The model `{model}` does not exist; this server serves `{served}`"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def _require_room(wanted: int, reservation: Reservation) -> None:
    """Reserves room for `wanted` generations.

    Raises ApiError 503 if the engine stopped. Raises 400 if a request has more generations than the
    server ever takes, and 429 if too many requests wait.
    """
    worker = reservation.worker
    if not worker.healthy:
        raise ApiError("the engine stopped", status=503)
    if wanted > worker.capacity:
        raise ApiError(
            f"{wanted} generations in one request; this server takes {worker.capacity} at once"
        )
    if not reservation.take(generations=wanted):
        raise ApiError(
            "too many requests wait", status=429, code="queue_full", retry_after=RETRY_SECONDS
        )


def _require_room_for_scores(wanted: int, reservation: Reservation) -> None:
    """Reserves memory for `wanted` log-probabilities.

    Raises ApiError 400 if this request exceeds the limit, and 429 if all requests together do.
    """
    limit = (
        f"this server keeps log-probabilities of {SCORES_IN_FLIGHT} tokens and alternatives at once"
    )
    if wanted > SCORES_IN_FLIGHT:
        remedy = "lower max_tokens, the alternatives, or the number of prompts or choices"
        raise ApiError(f"{wanted} in one request; {limit}: {remedy}", param="logprobs")
    if not reservation.take(scores=wanted):
        raise ApiError(
            limit, status=429, param="logprobs", code="queue_full", retry_after=RETRY_SECONDS
        )


def _as_api_error(error: Exception) -> ApiError:
    """Returns the ApiError for an error of this server, of the engine or of the framework."""
    if isinstance(error, RequestRefused):
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        return ApiError(error.message, param=error.param, code=code)
    if isinstance(error, ApiError):
        return error
    assert isinstance(error, RoutingError)
    return ApiError(str(error.detail), status=error.status_code)


async def _refused(_: Request, error: Exception) -> JSONResponse:
    """Returns the response to a request that raised `error`. FastAPI calls it as a handler."""
    return error_response(_as_api_error(error))


def _add_status(app: FastAPI, worker: Worker, served: str) -> None:
    """Adds the status endpoints: health, version, models and Prometheus metrics."""
    engine = worker.engine
    model = {"id": served, "object": "model", "created": int(time.time()), "owned_by": "trtspec",
             "max_model_len": engine.max_seq_len}  # fmt: skip

    @app.get("/health", responses=ERRORS)
    async def health() -> Response:
        """Returns status 200 while the engine runs, and 503 if it stopped."""
        return Response(status_code=200 if worker.healthy else 503)

    @app.get("/version", responses=ERRORS)
    async def version() -> dict[str, str]:
        """Returns the server's version and data type, and with a head its draft sampling."""
        properties = {"version": app.version, "dtype": dtype_name(engine.target.dtype)}
        if engine.draft_len:
            properties["draft_sampling"] = engine.options.draft_sampling
        return properties

    @app.get("/v1/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """Lists the served model."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str) -> dict[str, Any]:
        """Returns the served model. Status 404 if `name` is another model."""
        _require_model(name, served)
        return model

    @app.get("/prometheus/metrics", responses=ERRORS, response_class=Response)
    async def prometheus() -> Response:
        """Returns the engine's totals since the start, in Prometheus' text format."""
        text = generate_latest(EngineCollector(engine))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


class EngineCollector(Collector):
    """Prometheus collector that reads the engine's totals at the moment of the scrape."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's counters, and the current sizes of batch and queue."""
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
            counters["prefix_tokens"] = (
                prefix.tokens,
                "Prompt tokens looked up among computed prefixes.",
            )
            counters["prefix_cached_tokens"] = (
                prefix.cached_tokens,
                "Prompt tokens that needed no computation.",
            )
            counters["prefix_evicted_blocks"] = (
                prefix.evicted_blocks,
                "Blocks of prefixes that made room for others.",
            )
        for name, (value, text) in counters.items():
            yield CounterMetricFamily(f"trtspec_{name}", text, value=value)
        name, text = "accepted_tokens_per_position", "Steps that accepted this draft position."
        positions = CounterMetricFamily(f"trtspec_spec_decode_{name}", text, labels=["position"])
        for position in range(1, len(totals.histogram)):
            # A step that accepted more drafts also accepted the draft at this position.
            positions.add_metric([str(position)], sum(totals.histogram[position:]))
        yield positions
        yield GaugeMetricFamily(
            "trtspec_requests_running", "Requests in the batch.", value=len(self.engine.batch)
        )
        yield GaugeMetricFamily(
            "trtspec_requests_waiting", "Requests in the queue.", value=len(self.engine.waiting)
        )
