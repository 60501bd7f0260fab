"""The OpenAPI document of the reference server: bodies of requests and answers, and every status of every path."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from trtspec.engine.protocol import INERT, NEUTRAL, CompletionBody, GenerationBody

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number"}
MAYBE_NUMBER: Schema = {"type": ["number", "null"]}


def record(optional: tuple[str, ...] = (), /, **fields: Schema) -> Schema:
    """An object with these fields and no others; all but the optional ones are always there."""
    required = [name for name in fields if name not in optional]
    return {"type": "object", "required": required, "properties": fields, "additionalProperties": False}


def array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


ERROR = record(error=record(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT))
USAGE = record(
    prompt_tokens=COUNT,
    completion_tokens=COUNT,
    total_tokens=COUNT,
    prompt_tokens_details=record(cached_tokens=COUNT),
)
SPECULATION = {
    "avg_decoded_tokens_per_iter": NUMBER,
    "spec_decode": record(steps=COUNT, drafted=COUNT, accepted=COUNT, histogram=array(COUNT)),
}
FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
COMPLETION_LOGPROBS = record(
    tokens=array(TEXT),
    token_logprobs=array(MAYBE_NUMBER),
    top_logprobs=array(maybe({"type": "object", "additionalProperties": NUMBER})),
    text_offset=array(COUNT),
)
TOKEN: dict[str, Schema] = {"token": TEXT, "logprob": NUMBER, "bytes": array(COUNT)}
CHAT_LOGPROBS = record(content=array(record(**TOKEN, top_logprobs=array(record(**TOKEN)))))
TOOL_CALL = record(id=TEXT, type={"const": "function"}, function=record(name=TEXT, arguments=TEXT))
MESSAGE = record(
    ("reasoning_content", "tool_calls"),
    role={"const": "assistant"},
    content=MAYBE_TEXT,
    reasoning_content=TEXT,
    tool_calls=array(TOOL_CALL),
)


def _answer(kind: str, **choice: Schema) -> Schema:
    choices = array(record(index=COUNT, **choice, finish_reason=FINISH, **SPECULATION))
    return record(id=TEXT, object={"const": kind}, created=COUNT, model=TEXT, choices=choices, usage=USAGE)


COMPLETION = _answer("text_completion", text=TEXT, logprobs=maybe(COMPLETION_LOGPROBS))
CHAT = _answer("chat.completion", message=MESSAGE, logprobs=maybe(CHAT_LOGPROBS))
ITERATION = record(
    ("kvCacheStats",),
    iter=COUNT,
    iterLatencyMS=NUMBER,
    numActiveRequests=COUNT,
    numQueuedRequests=COUNT,
    inflightBatchingStats={"type": "object"},
    specDecodingStats={"type": "object"},
    kvCacheStats={"type": "object"},
)
TIMES = (
    *("server_arrival_time", "arrival_time", "first_scheduled_time"),
    *("first_token_time", "server_first_token_time", "last_token_time"),
)
TIMING = record(
    request_id=TEXT,
    perf_metrics=record(
        ("speculative_decoding",),
        first_iter=COUNT,
        last_iter=COUNT,
        timing_metrics=record(**dict.fromkeys(TIMES, NUMBER)),
        speculative_decoding=record(
            acceptance_rate=NUMBER, total_accepted_draft_tokens=COUNT, total_draft_tokens=COUNT
        ),
    ),
)
MODELS = record(
    object={"const": "list"},
    data=array(record(id=TEXT, object={"const": "model"}, created=COUNT, owned_by=TEXT)),
)
SERVER_INFO = record(
    disaggregated_params={"type": "null"},
    model=TEXT,
    backend=TEXT,
    max_batch_size=COUNT,
    max_seq_len=COUNT,
    max_queue=COUNT,
    max_draft_len=COUNT,
)
PROBLEMS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or wrong.",
    404: "The server does not serve that model.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    500: "The generation failed.",
    501: "The server lacks a package that the request needs.",
    503: "The engine stopped.",
}
# an event without a type is a "message" to whoever reads it (HTML Living Standard, section 9.2.6)
EVENT = record(("event",), data=TEXT, event={"const": "message"})
RETRY_AFTER = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}


def described(kind: type[GenerationBody]) -> dict[str, Any]:
    """What the document says about an endpoint that generates: its body, and every status that it answers with."""
    answers: dict[int | str, dict[str, Any]] = {status: _problem(status) for status in PROBLEMS}
    answers[200] = {
        "description": "The answer, or with `stream` its events.",
        "content": {
            "application/json": {"schema": COMPLETION if kind is CompletionBody else CHAT},
            "text/event-stream": {"itemSchema": EVENT},
        },
    }
    body = {"required": True, "content": {"application/json": {"schema": _body_schema(kind)}}}
    return {"responses": answers, "openapi_extra": {"requestBody": body}, "response_model": None}


def _problem(status: int) -> dict[str, Any]:
    told = {"description": PROBLEMS[status], "content": {"application/json": {"schema": ERROR}}}
    return told | ({"headers": RETRY_AFTER} if status == 429 else {})


def _json(text: str, schema: Schema) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": text, "content": {"application/json": {"schema": schema}}}}


def _health(text: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": text, "content": {}}, 503: {"description": "It does not.", "content": {}}}


STATUS_DOCUMENTS: dict[str, dict[int | str, dict[str, Any]]] = {
    "/health": _health("The engine runs."),
    "/health_generate": _health("The engine generates."),
    "/version": _json("Version and type.", record(("draft_sampling",), version=TEXT, dtype=TEXT, draft_sampling=TEXT)),
    "/v1/models": _json("The model that is served.", MODELS) | {401: _problem(401)},
    "/server_info": _json("Sizes of the engine.", SERVER_INFO),
    "/metrics": _json("Steps of the engine since the last call.", array(ITERATION)),
    "/perf_metrics": _json("Requests that ended since the last call.", array(TIMING)),
    "/prometheus/metrics": {200: {"description": "Totals.", "content": {"text/plain": {"schema": TEXT}}}},
}


def describe(app: FastAPI, secured: bool) -> None:
    """Makes the document of an app whose paths are all there; `secured`: paths below /v1 ask for a key."""
    document = get_openapi(title=app.title, version=app.version, description=__doc__, routes=app.routes)
    if secured:
        document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        for path, methods in document["paths"].items():
            for operation in methods.values() if path.startswith("/v1") else ():
                operation["security"] = [{"key": []}]
    app.openapi_schema = document


def _body_schema(kind: type[GenerationBody]) -> Schema:
    """JSON schema of a body: the fields of its class, those that are taken since they change nothing, null for all."""
    schema = kind.model_json_schema()
    definitions = schema.pop("$defs", {})
    text = json.dumps(schema)
    while "#/$defs/" in text:  # definitions use one another
        for name, definition in definitions.items():
            text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(definition))
    schema = json.loads(text)
    fields = {name: {"anyOf": [field, {"type": "null"}]} for name, field in schema["properties"].items()}
    for name in schema.get("required", []):
        fields[name] = schema["properties"][name]
    neutral = {name: {"enum": list(values)} for name, values in NEUTRAL.items()}
    return {**schema, "properties": {**fields, **neutral, **{name: {} for name in INERT}}}
