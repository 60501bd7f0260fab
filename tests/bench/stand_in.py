"""A small OpenAI-like server that behaves as a speculating engine does, without a model behind it.

Its text is a fixed function of the prompt. It emits several tokens per step, counts its steps,
sleeps per step, and can be given the defects that bench must name. `python stand_in.py PORT
JSON_SETTINGS` is one server. Without words it reads a line of JSON settings for each server that is
wanted and answers with its port: each is a forked process of its own, which saves it the imports.
They end with stdin.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

TEXT = (
    "the a of to in is that for on with as by this from or be are an it at not which have has was "
    "can will if when one all been their there would what so up out about who get make time just "
    "him know take people into year your some could them see other than then now look only come "
    "its over think also back after use two how our work first well way even new want because any "
    "these give day most module function class object string value list returns"
)
WORDS = TEXT.split()

SETTINGS: dict[str, Any] = {
    "kind": "reference",  # reference | trtllm | vllm | sglang | plain
    "draft_len": 3,
    "step_s": 0.0,
    "forced": None,  # accept exactly this many drafts in every step
    "accept_nothing": False,
    "loop": False,
    "version": "0.0-stand-in",
    "fail_every": 0,
}
app = FastAPI()
state: dict[str, Any] = {
    "requests": 0,
    "drafts": 0,
    "drafted": 0,
    "accepted": 0,
    "per_pos": {},
    "busy": 0,
}


def number(*parts: Any) -> float:
    """A uniform number in [0, 1) that depends on the parts only."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def write(prompt: str, limit: int, seed: int, temperature: float) -> list[str]:
    """The tokens of the answer."""
    history = prompt if temperature == 0 else f"{prompt}#{seed}"
    length = min(limit, 40 + int(60 * number(prompt, "length")))
    if SETTINGS["loop"]:
        return [WORDS[position % 3] for position in range(length)]
    return [
        WORDS[int(number(history, position, "best") * len(WORDS))] for position in range(length)
    ]


def steps_of(prompt: str, count: int) -> list[int]:
    """Tokens emitted per step after the first token, which comes from the prefill."""
    steps = []
    left = count - 1
    while left > 0:
        drafts = 0 if SETTINGS["kind"] == "plain" else SETTINGS["draft_len"]
        accepted = 0
        while (
            accepted < drafts
            and number(prompt, len(steps), accepted, "accept") < 0.7 - 0.1 * accepted
        ):
            accepted += 1
        if SETTINGS["forced"] is not None:
            accepted = SETTINGS["forced"]
        if SETTINGS["accept_nothing"]:
            accepted = 0
        steps.append(min(accepted + 1, left))
        left -= steps[-1]
    return steps


def statistics(steps: list[int], tokens: int) -> dict[str, Any]:
    """What each kind of server says on a choice, and the counters that vLLM keeps."""
    draft_len = SETTINGS["draft_len"]
    histogram = [sum(1 for s in steps if s - 1 == j) for j in range(draft_len + 1)]
    accepted = sum(s - 1 for s in steps)
    state["drafts"] += len(steps)
    state["drafted"] += len(steps) * draft_len
    state["accepted"] += accepted
    for position in range(draft_len):
        state["per_pos"][position] = state["per_pos"].get(position, 0) + sum(
            1 for s in steps if s - 1 > position
        )
    if SETTINGS["kind"] == "reference":
        counts = {
            "steps": len(steps),
            "drafted": len(steps) * draft_len,
            "accepted": accepted,
            "histogram": histogram,
        }
        return {"avg_decoded_tokens_per_iter": tokens / (len(steps) + 1), "spec_decode": counts}
    if SETTINGS["kind"] == "trtllm":
        return {"avg_decoded_tokens_per_iter": tokens / (len(steps) + 1)}
    return {}


@app.get("/health")
def health() -> PlainTextResponse:
    return PlainTextResponse("")


@app.get("/version")
def version() -> dict[str, str]:
    return {"version": SETTINGS["version"]}


@app.get("/v1/models")
def models() -> dict[str, Any]:
    owner = {
        "reference": "trtspec",
        "trtllm": "tensorrt_llm",
        "vllm": "vllm",
        "sglang": "sglang",
    }.get(SETTINGS["kind"], "somebody")
    return {"object": "list", "data": [{"id": "stand-in", "object": "model", "owned_by": owner}]}


@app.get("/metrics")
def metrics() -> Any:
    if SETTINGS["kind"] != "vllm":
        return JSONResponse([])
    label = 'engine="0",model_name="stand-in"'
    lines = [
        f"vllm:spec_decode_num_drafts_total{{{label}}} {float(state['drafts'])}",
        f"vllm:spec_decode_num_drafts_created{{{label}}} 1.7e9",
        f"vllm:spec_decode_num_draft_tokens_total{{{label}}} {float(state['drafted'])}",
        f"vllm:spec_decode_num_accepted_tokens_total{{{label}}} {float(state['accepted'])}",
    ]
    for position, count in sorted(state["per_pos"].items()):
        lines.append(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}} '
            f"{float(count)}"
        )
    return PlainTextResponse("\n".join(lines) + "\n")


@app.post("/v1/chat/completions")
async def chat(request: Request) -> Any:
    body = await request.json()
    state["requests"] += 1
    if SETTINGS["fail_every"] and state["requests"] % SETTINGS["fail_every"] == 0:
        return JSONResponse(
            {"object": "error", "message": "out of blocks", "code": 500}, status_code=500
        )
    prompt = json.dumps(body["messages"])
    tokens = write(prompt, body["max_tokens"], body.get("seed", 0), body.get("temperature", 1.0))
    steps = steps_of(prompt, len(tokens))
    extra = statistics(steps, len(tokens))
    finish = "length" if len(tokens) == body["max_tokens"] else "stop"
    usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(tokens)}
    if body.get("stream"):
        return StreamingResponse(
            stream(tokens, steps, extra, finish, usage), media_type="text/event-stream"
        )
    message = {"role": "assistant", "content": "".join(f"{token} " for token in tokens)}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish, **extra}],
        "usage": usage,
    }


async def stream(  # type: ignore[no-untyped-def]
    tokens: list[str], steps: list[int], extra: dict, finish: str, usage: dict
):
    """One chunk per step, as engines do; usage in a last chunk without choices."""
    position, due = 0, time.perf_counter()
    for index, size in enumerate([1, *steps]):
        # a batch of b requests costs a step more, so that concurrency is not free
        state["busy"] += 1
        due += SETTINGS["step_s"] * (1 + 0.05 * state["busy"])
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        state["busy"] -= 1
        text = "".join(f"{token} " for token in tokens[position : position + size])
        position += size
        choice: dict[str, Any] = {"index": 0, "delta": {"content": text}}
        if index == len(steps):
            choice |= {"finish_reason": finish, **extra}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield ": a comment line\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def fork_server(settings: dict[str, Any]) -> tuple[int, int]:
    """(process, port); it listens already."""
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        process = os.fork()
        if process == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            try:
                SETTINGS.update(settings)
                uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
            finally:
                os._exit(0)
        return process, listener.getsockname()[1]


def fork_servers() -> None:
    children = []
    for line in iter(sys.stdin.readline, ""):
        child, port = fork_server(json.loads(line))
        children.append(child)
        print(port, flush=True)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        fork_servers()
    else:
        SETTINGS.update(json.loads(sys.argv[2]))
        uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
