"""The OpenAI-compatible HTTP surface of the reference engine, endpoint for endpoint that of trtllm-serve."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.answers import DONE, ChoiceStream, CompletionAnswer, body, usage_chunk
from trtspec.engine.boundary import Boundary, body_limit, error_response, read_json
from trtspec.engine.engine import Engine
from trtspec.engine.metrics import prometheus_text
from trtspec.engine.protocol import ApiError, ChatBody, CompletionBody, GenerationBody, described, parse_body
from trtspec.engine.sequence import Completion, GenerationRequest, Output
from trtspec.engine.steering import Grammars, Wishes, tool_call_grammar
from trtspec.engine.worker import EngineThreadDied, GenerationFailed, Worker
from trtspec.errors import MissingDependency, TrtspecError
from trtspec.models.precision import dtype_name

RETRY_SECONDS = 1
LONGEST_ESCAPE = 6  # characters of JSON per byte of text


@dataclass(frozen=True)
class ApiCall:
    """One API call: the engine requests behind its choices, and how to answer."""

    answer: CompletionAnswer
    requests: list[GenerationRequest]
    prompt_tokens: int
    thinking: bool = False


@dataclass(frozen=True)
class PromptLimits:
    """The name that is served, and what a prompt may have: tokens with its answer, bytes of text."""

    model: str
    tokens: int
    bytes: int


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
    longest_token = max(map(len, tokenizer.token_bytes), default=1)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    app = FastAPI(title="trtspec reference server", version=metadata.version("trtspec"), lifespan=lifespan)
    app.state.worker = worker
    app.add_middleware(Boundary, api_key=options.api_key)
    _add_errors(app)
    _add_status(app, worker, tokenizer, served)
    limit = body_limit(engine.max_seq_len)

    async def answer(request: Request, kind: type[GenerationBody], prepare: Callable[[Any], ApiCall]) -> Response:
        """Reads, checks and prepares beside the event loop, then generates."""
        asked = await asyncio.to_thread(parse_body, kind, await read_json(request, limit))
        _require_model(asked, served)
        _require_room(asked, worker)
        return await _respond(await asyncio.to_thread(prepare, asked), asked, worker, request)

    limits = PromptLimits(served, engine.max_seq_len, engine.max_seq_len * longest_token)
    end_of_turn = tokenizer.special_tokens.get("<|im_end|>")
    grammars = Grammars(tokenizer, sorted({*engine.eos_ids, *([] if end_of_turn is None else [end_of_turn])}))

    def completion(asked: CompletionBody) -> ApiCall:
        return completion_job(asked, tokenizer, grammars, limits)

    def chat(asked: ChatBody) -> ApiCall:
        return chat_job(asked, tokenizer, grammars, limits)

    @app.post("/v1/completions", **described(CompletionBody))
    async def completions(request: Request) -> Response:
        """Completes one or several prompts, given as text or as token ids."""
        return await answer(request, CompletionBody, completion)

    @app.post("/v1/chat/completions", **described(ChatBody))
    async def chat_completions(request: Request) -> Response:
        """Answers a conversation."""
        return await answer(request, ChatBody, chat)

    return app


def completion_job(
    asked: CompletionBody, tokenizer: KimiTokenizer, grammars: Grammars, limits: PromptLimits
) -> ApiCall:
    """Raises ApiError for what cannot be."""
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            _require_short(len(prompt.encode()), limits.bytes, "prompt")
    if not asked.max_tokens and not asked.echo:
        raise ApiError("max_tokens is 0 and echo is off: nothing would be answered", param="max_tokens")
    special = asked.allow_special_tokens
    prompts = [tokenizer.encode(p, allow_special=special) if isinstance(p, str) else p for p in asked.prompts]
    if asked.truncate_prompt_tokens:
        prompts = [prompt[-asked.truncate_prompt_tokens :] for prompt in prompts]
    answer = CompletionAnswer(
        tokenizer,
        limits.model,
        False,
        logprobs=asked.logprobs is not None,
        top=asked.logprobs or 0,
        usage=_usage_wanted(asked),
        echo=asked.echo,
        shown=bool(asked.max_tokens),
    )
    common = _engine_request(asked, max(1, asked.max_tokens), answer)
    requests = []
    for prompt in prompts:
        for choice in range(asked.n):
            wishes = _wishes(asked, tokenizer, lambda: _matcher(grammars, asked.grammar, "response_format"))
            requests.append(_numbered(replace(common, wishes=wishes), prompt, choice))
    return ApiCall(answer, requests, sum(map(len, prompts)))


def chat_job(asked: ChatBody, tokenizer: KimiTokenizer, grammars: Grammars, limits: PromptLimits) -> ApiCall:
    """Raises ApiError for what cannot be."""
    variables = {"thinking": None, **asked.chat_template_kwargs}
    if unknown := asked.chat_template_kwargs.keys() - tokenizer.template.variables:
        raise ApiError(
            f"the chat template has no {', '.join(sorted(unknown))} that could be set", param="chat_template_kwargs"
        )
    try:
        size = len(json.dumps([asked.messages, asked.tools]))
        _require_short(size // LONGEST_ESCAPE, limits.bytes, "messages")
        text, prompt = tokenizer.encode_chat(asked.plain_messages, asked.offered_tools, **variables)
    except RecursionError:
        raise ApiError("a message or a tool is nested too deeply", param="messages") from None
    except TrtspecError as error:
        reason = error.message.removeprefix(f"{tokenizer.template.where}: ")  # a path is nobody's business
        raise ApiError(f"the chat template refuses the request: {reason}", param="messages") from None
    if asked.truncate_prompt_tokens:
        prompt = prompt[-asked.truncate_prompt_tokens :]
    answer = CompletionAnswer(
        tokenizer, limits.model, True, logprobs=asked.logprobs, top=asked.top_logprobs, usage=_usage_wanted(asked)
    )
    limit = asked.max_completion_tokens or asked.max_tokens or max(1, limits.tokens - len(prompt))
    common = _engine_request(asked, limit, answer)
    thinking = text.rstrip().endswith("<think>")
    marks = ["<|im_end|>"] if not asked.ignore_eos else []
    if asked.offered_tools and not asked.parallel_tool_calls and not asked.demanded_tools:
        marks.append("<|tool_call_end|>")
    ends = tuple(tokenizer.special_tokens[mark] for mark in marks if mark in tokenizer.special_tokens)
    common = replace(common, stop_token_ids=(*common.stop_token_ids, *ends))
    after = tokenizer.special_tokens.get("</think>") if thinking else None
    requests = [
        _numbered(
            replace(common, wishes=_wishes(asked, tokenizer, lambda: _chat_matcher(asked, grammars), after)),
            prompt,
            choice,
        )
        for choice in range(asked.n)
    ]
    return ApiCall(answer, requests, len(prompt), thinking=thinking)


def _chat_matcher(asked: ChatBody, grammars: Grammars) -> Any:
    """What holds the answer to its form: a call of the tools that are demanded, or the asked response format."""
    demanded = asked.demanded_tools
    if not demanded:
        return _matcher(grammars, asked.grammar, "response_format")
    if asked.grammar:
        raise ApiError("a demanded tool call and response_format exclude each other", param="response_format")
    named = asked.tool_choice != "required"
    several = asked.parallel_tool_calls and not named
    return _matcher(grammars, ("lark", tool_call_grammar(demanded, several)), "tools")


def _matcher(grammars: Grammars, grammar: tuple[str, str] | None, param: str) -> Any:
    if grammar is None:
        return None
    try:
        return grammars.matcher(*grammar)
    except ValueError as error:
        raise ApiError(f"no answer can have this form: {error}", param=param) from None
    except MissingDependency as error:
        raise ApiError(f"{error.message}, which this server does not have", param=param, status=501) from None


def _wishes(
    asked: GenerationBody, tokenizer: KimiTokenizer, matcher: Callable[[], Any], after: int | None = None
) -> Wishes | None:
    """What one choice asks of its tokens, None where it asks for nothing. `matcher` makes its own grammar."""
    bad = [tokenizer.encode(form) for word in asked.bad_words for form in (word, f" {word}")]
    if asked.min_tokens and asked.stops:
        raise ApiError("min_tokens does not hold back stop strings: leave one of them out", param="min_tokens")
    bias = {int(token): value for token, value in asked.logit_bias.items()}
    if any(token >= tokenizer.vocab_size for token in bias):
        raise ApiError(f"a token is outside the vocabulary of {tokenizer.vocab_size}", param="logit_bias")
    grammar = matcher()
    wishes = Wishes(
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        repetition_penalty=asked.repetition_penalty,
        min_p=asked.min_p,
        min_tokens=asked.min_tokens,
        logit_bias=bias,
        bad_words=tuple(map(tuple, bad)),
        grammar=grammar,
        grammar_after=None if grammar is None else after,
    )
    return None if wishes == Wishes() else wishes


def _require_short(size: int, max_bytes: int, param: str) -> None:
    """Raises ApiError, before anything is tokenized, for text that cannot fit whatever its tokens are."""
    if size > max_bytes:
        raise ApiError(f"{size} bytes of text cannot fit into the context", param=param, code="context_length_exceeded")


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
        prompt_logprobs=answer.echo and answer.logprobs,
        include_stop=asked.include_stop_str_in_output,
        skip_special=asked.skip_special_tokens,
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
    if asked.stream:
        return StreamingResponse(_stream(job, asked, worker), media_type="text/event-stream")
    completions = await _unless_disconnected(request, _collect_all(worker, job.requests))
    if completions is None:
        return Response(status_code=499)
    prompts = [request.prompt_ids for request in job.requests]
    return JSONResponse(body(job.answer, completions, prompts, job.prompt_tokens, job.thinking))


async def _collect(worker: Worker, request: GenerationRequest) -> Completion:
    completion = Completion(request.id)
    async for output in worker.run(request):
        completion.add(output)
    return completion


async def _collect_all(worker: Worker, requests: list[GenerationRequest]) -> list[Completion]:
    tasks = [asyncio.create_task(_collect(worker, request)) for request in requests]
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


async def _stream(job: ApiCall, asked: GenerationBody, worker: Worker) -> AsyncIterator[str]:
    """Server-sent events of all choices, in the order in which the engine makes them."""
    streams = [
        ChoiceStream(job.answer, index, job.thinking, request.prompt_ids) for index, request in enumerate(job.requests)
    ]
    try:
        async for index, output in _merged(worker, job.requests):
            if chunk := streams[index].push(output):
                yield chunk
    except (EngineThreadDied, GenerationFailed) as failure:
        yield f"data: {json.dumps(ApiError(str(failure), status=500).to_dict())}\n\n"
        return
    if job.answer.usage != "no":
        yield usage_chunk(job.answer, job.prompt_tokens, [stream.completion for stream in streams])
    yield DONE


async def _merged(worker: Worker, requests: list[GenerationRequest]) -> AsyncIterator[tuple[int, Output]]:
    """(choice, output) of several requests as they come."""
    if len(requests) == 1:
        async for output in worker.run(requests[0]):
            yield 0, output
        return
    merged: asyncio.Queue[tuple[int, Output | Exception]] = asyncio.Queue()

    async def feed(index: int, request: GenerationRequest) -> None:
        try:
            async for output in worker.run(request):
                merged.put_nowait((index, output))
        except (EngineThreadDied, GenerationFailed) as failure:
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


def _usage_wanted(asked: GenerationBody) -> Literal["no", "last", "each"]:
    """In which chunks of a stream usage stands."""
    options = asked.stream_options
    if options is None:
        return "no"
    if not asked.stream:
        raise ApiError("stream_options are for streams", param="stream_options")
    return "each" if options.continuous_usage_stats else "last" if options.include_usage else "no"


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
    wanted = asked.n * (len(asked.prompts) if isinstance(asked, CompletionBody) else 1)
    if not worker.healthy:
        raise ApiError("the engine stopped", status=503)
    if wanted > worker.capacity:
        raise ApiError(f"{wanted} generations in one request; this server takes {worker.capacity} at once")
    if wanted > worker.free:
        raise ApiError("too many requests wait", status=429, code="queue_full", retry_after=RETRY_SECONDS)


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
        except (TimeoutError, EngineThreadDied, GenerationFailed):
            return Response(status_code=503)
        return Response(status_code=200)

    @app.get("/version")
    async def version() -> dict[str, str]:
        how = {"version": app.version, "dtype": dtype_name(worker.engine.target.dtype)}
        return how | ({"draft_sampling": worker.engine.options.draft_sampling} if worker.engine.draft_len else {})

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
        return error_response(error)

    @app.exception_handler(EngineThreadDied)
    @app.exception_handler(GenerationFailed)
    async def engine_failed(_: Request, error: Exception) -> JSONResponse:
        return error_response(ApiError(str(error), status=500))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        return error_response(ApiError(str(error.detail), status=error.status_code))
