"""The OpenAI-compatible HTTP surface of the reference engine, endpoint for endpoint that of trtllm-serve."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import DONE, ChoiceStream, CompletionAnswer, body, usage_chunk
from trtspec.engine.engine import Engine
from trtspec.engine.metrics import prometheus_text
from trtspec.engine.protocol import ApiError, ChatBody, CompletionBody, GenerationBody, parse_body
from trtspec.engine.sequence import Completion, GenerationRequest, Output
from trtspec.engine.worker import EngineThreadDied, Worker
from trtspec.errors import TrtspecError
from trtspec.models.precision import dtype_name


@dataclass(frozen=True)
class ApiCall:
    """One API call: the engine requests behind its choices, and how to answer."""

    answer: CompletionAnswer
    requests: list[GenerationRequest]
    prompt_tokens: int
    thinking: bool = False


def create_app(engine: Engine, tokenizer: KimiTokenizer, served_model_name: str) -> FastAPI:
    """The server around an engine; its thread lives as long as the app does. `app.state.worker` is the bridge to it."""
    worker = Worker(engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    app = FastAPI(title="trtspec reference server", version=metadata.version("trtspec"), lifespan=lifespan)
    app.state.worker = worker
    _add_errors(app)
    _add_status(app, worker, tokenizer, served_model_name)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse_body(CompletionBody, await _json(request))
        return await _respond(
            completion_job(asked, tokenizer, _known(asked, served_model_name)), asked, worker, request
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = parse_body(ChatBody, await _json(request))
        job = chat_job(asked, tokenizer, _known(asked, served_model_name), engine.max_seq_len)
        return await _respond(job, asked, worker, request)

    return app


def completion_job(asked: CompletionBody, tokenizer: KimiTokenizer, model: str) -> ApiCall:
    prompts = [tokenizer.encode(p) if isinstance(p, str) else p for p in asked.prompts]
    answer = CompletionAnswer(
        tokenizer, model, False, asked.logprobs is not None, asked.logprobs or 0, _with_usage(asked)
    )
    common = _engine_request(asked, asked.max_tokens, answer)
    requests = [_numbered(common, prompt, choice) for prompt in prompts for choice in range(asked.n)]
    return ApiCall(answer, requests, sum(map(len, prompts)))


def chat_job(asked: ChatBody, tokenizer: KimiTokenizer, model: str, max_seq_len: int) -> ApiCall:
    variables = {"thinking": None, **asked.chat_template_kwargs}
    if taken := {"messages", "tools", "add_generation_prompt"} & variables.keys():
        raise ApiError(f"chat_template_kwargs cannot set {', '.join(sorted(taken))}", param="chat_template_kwargs")
    try:
        text = tokenizer.render_chat(asked.plain_messages, asked.offered_tools, **variables)
    except TrtspecError as error:
        raise ApiError(error.message, param="messages") from None
    prompt = tokenizer.encode(text, allow_special=True)
    answer = CompletionAnswer(tokenizer, model, True, asked.logprobs, asked.top_logprobs, _with_usage(asked))
    limit = asked.max_completion_tokens or asked.max_tokens or max(1, max_seq_len - len(prompt))
    common = _engine_request(asked, limit, answer)
    end_of_turn = tokenizer.special_tokens.get("<|im_end|>")
    if end_of_turn is not None and not asked.ignore_eos:
        common = replace(common, stop_token_ids=(*common.stop_token_ids, end_of_turn))
    requests = [_numbered(common, prompt, choice) for choice in range(asked.n)]
    return ApiCall(answer, requests, len(prompt), thinking=text.rstrip().endswith("<think>"))


def _engine_request(asked: GenerationBody, max_tokens: int, answer: CompletionAnswer) -> GenerationRequest:
    return GenerationRequest(
        id="",
        prompt_ids=[],
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=max(asked.top_k, 0),
        seed=asked.seed,
        stop=asked.stops,
        ignore_eos=asked.ignore_eos,
        logprobs=max(1, answer.top) if answer.logprobs else 0,
        stop_token_ids=tuple(asked.stop_token_ids),
    )


def _numbered(common: GenerationRequest, prompt: list[int], choice: int) -> GenerationRequest:
    """The request behind one choice; with a seed, each choice has its own."""
    seed = None if common.seed is None else common.seed + choice
    return replace(common, id=uuid.uuid4().hex, prompt_ids=prompt, seed=seed)


async def _respond(job: ApiCall, asked: GenerationBody, worker: Worker, request: Request) -> Response:
    for engine_request in job.requests:
        try:
            worker.check(engine_request)
        except TrtspecError as error:
            message = error.message.split(": ", 1)[-1]
            too_long = "no room" in message
            raise ApiError(message, code="context_length_exceeded" if too_long else None) from None
    if not worker.healthy:
        raise ApiError("the engine stopped", status=500)
    if asked.stream:
        return StreamingResponse(_stream(job, asked, worker), media_type="text/event-stream")
    collecting = asyncio.gather(*(_collect(worker, engine_request) for engine_request in job.requests))
    completions = await _unless_disconnected(request, collecting)
    if completions is None:
        return Response(status_code=499)
    return JSONResponse(body(job.answer, completions, job.prompt_tokens, job.thinking))


async def _collect(worker: Worker, request: GenerationRequest) -> Completion:
    completion = Completion(request.id)
    async for output in worker.run(request):
        completion.add(output)
    return completion


async def _unless_disconnected(request: Request, work: asyncio.Future[list[Completion]]) -> list[Completion] | None:
    """The result of `work`, or None after cancelling it because the client went away."""
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        both: set[asyncio.Future[Any]] = {work, gone}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        gone.cancel()
        work.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(job: ApiCall, asked: GenerationBody, worker: Worker) -> AsyncIterator[str]:
    """Server-sent events of all choices, in the order in which the engine makes them."""
    streams = [ChoiceStream(job.answer, index, job.thinking) for index in range(len(job.requests))]
    for stream in streams:
        if opening := stream.opening():
            yield opening
    try:
        async for index, output in _merged(worker, job.requests):
            if chunk := streams[index].push(output):
                yield chunk
    except EngineThreadDied as failure:
        yield f"data: {json.dumps(ApiError(str(failure), status=500).to_dict())}\n\n"
        return
    if job.answer.usage_in_stream:
        yield usage_chunk(job.answer, job.prompt_tokens, [stream.completion for stream in streams])
    yield DONE


async def _merged(worker: Worker, requests: list[GenerationRequest]) -> AsyncIterator[tuple[int, Output]]:
    """(choice, output) of several requests as they come."""
    if len(requests) == 1:
        async for output in worker.run(requests[0]):
            yield 0, output
        return
    merged: asyncio.Queue[tuple[int, Output | EngineThreadDied]] = asyncio.Queue()

    async def feed(index: int, request: GenerationRequest) -> None:
        try:
            async for output in worker.run(request):
                merged.put_nowait((index, output))
        except EngineThreadDied as failure:
            merged.put_nowait((index, failure))

    tasks = [asyncio.create_task(feed(index, request)) for index, request in enumerate(requests)]
    try:
        open_choices = len(requests)
        while open_choices:
            index, item = await merged.get()
            if isinstance(item, EngineThreadDied):
                raise item
            open_choices -= item.finish_reason is not None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()


def _with_usage(asked: GenerationBody) -> bool:
    return bool(asked.stream and asked.stream_options and asked.stream_options.include_usage)


def _known(asked: GenerationBody, served: str) -> str:
    if asked.model not in (None, served):
        raise ApiError(
            f"The model `{asked.model}` does not exist; this server serves `{served}`",
            status=404,
            param="model",
            code="model_not_found",
        )
    return served


async def _json(request: Request) -> Any:
    try:
        return json.loads(await request.body())
    except ValueError:
        raise ApiError("the body is not valid JSON") from None


def _add_status(app: FastAPI, worker: Worker, tokenizer: KimiTokenizer, served: str) -> None:
    started = int(time.time())

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if worker.healthy else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        """200 after a real generation of one token."""
        request = GenerationRequest(f"health-{uuid.uuid4().hex}", [tokenizer.eos_ids[0] if tokenizer.eos_ids else 0], 1)
        try:
            await asyncio.wait_for(_collect(worker, request), timeout=60)
        except (TimeoutError, EngineThreadDied):
            return Response(status_code=500)
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": app.version, "dtype": dtype_name(worker.engine.target.dtype)}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": served, "object": "model", "created": started, "owned_by": "trtspec"}
        return {"object": "list", "data": [entry]}

    @app.get("/metrics")
    async def metrics() -> JSONResponse:
        return JSONResponse(worker.drain_iterations())

    @app.get("/prometheus/metrics")
    async def prometheus() -> Response:
        return Response(prometheus_text(worker.engine), media_type="text/plain; version=0.0.4; charset=utf-8")


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.to_dict(), status_code=error.status)

    @app.exception_handler(EngineThreadDied)
    async def engine_failed(_: Request, error: EngineThreadDied) -> JSONResponse:
        return JSONResponse(ApiError(str(error), status=500).to_dict(), status_code=500)

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> JSONResponse:
        answer = ApiError(f"internal error: {type(error).__name__}", status=500)
        return JSONResponse(answer.to_dict(), status_code=500)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            ApiError(str(error.detail), status=error.status_code).to_dict(), status_code=error.status_code
        )
