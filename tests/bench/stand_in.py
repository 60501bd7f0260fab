"""A small OpenAI-like server that behaves as a speculating engine does, without a model behind it.

Its text is a fixed function of the prompt. It emits several tokens per step, counts its steps, sleeps per step, and can
be given the defects that the gate must find. `python stand_in.py PORT JSON_SETTINGS` is one server. Without words it
reads a line of JSON settings for each server that is wanted and answers with its port: each is a forked process of its
own, which saves it the imports. They end with stdin.
"""

from __future__ import annotations

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
    "the a of to in is that for on with as by this from or be are an it at not which have has was can will if when "
    "one all been their there would what so up out about who get make time just him know take people into year your "
    "some could them see other than then now look only come its over think also back after use two how our work first "
    "well way even new want because any these give day most module function class object string value list returns"
)
WORDS = TEXT.split()

SETTINGS: dict[str, Any] = {
    "kind": "reference",  # reference | trtllm | vllm | sglang | plain
    "draft_len": 3,
    "step_s": 0.0,
    "forced": None,  # accept exactly this many drafts in every step
    "accept_nothing": False,
    "swap_ties": False,  # take the runner-up where the gap is tiny, as another summation order may
    "swap_sure": False,  # take the runner-up where the target is sure: a real defect
    "loop": False,
    "logprobs": True,  # "deadly": a request for them ends the process
    "version": "0.0-stand-in",
    "rounding": 0.0,
    "tool": "call",  # call | malformed | none | vanish | refuse
    "fail_every": 0,
    "reuse": None,  # warm | blind: prompts that begin as an earlier one; blind accepts no draft on them
}
app = FastAPI()
state: dict[str, Any] = {
    "requests": 0,
    "drafts": 0,
    "drafted": 0,
    "accepted": 0,
    "per_pos": {},
    "busy": 0,
    "seen": set(),
}


def number(*parts: Any) -> float:
    """A uniform number in [0, 1) that depends on the parts only."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def next_token(history: str, position: int) -> tuple[str, str, float]:
    """Best token, runner-up, gap in nats. One gap in fifty is a near-tie."""
    pick = int(number(history, position, "best") * len(WORDS))
    gap = 2e-4 if number(history, position, "tie") < 0.02 else 0.3 + 3 * number(history, position, "gap")
    return WORDS[pick], WORDS[(pick + 17) % len(WORDS)], gap


def write(prompt: str, limit: int, seed: int, temperature: float) -> list[tuple[str, str, float]]:
    """The answer: (token, runner-up, gap) per position."""
    history = prompt if temperature == 0 else f"{prompt}#{seed}"
    length = min(limit, 40 + int(60 * number(prompt, "length")))
    tokens = []
    for position in range(length):
        best, second, gap = next_token(history, position)
        if SETTINGS["loop"]:
            best, second, gap = WORDS[position % 3], WORDS[5], 2.0
        wrong = SETTINGS["swap_sure"] and gap > 1.0 and position == 7
        tie = SETTINGS["swap_ties"] and gap < 1e-3
        if wrong or tie:
            best, second = second, best
            history += "*"  # another token, another continuation
        tokens.append((best, second, gap + SETTINGS["rounding"] * number(history, position, "noise")))
    return tokens


def steps_of(prompt: str, count: int, blind: bool = False) -> list[int]:
    """Tokens emitted per step after the first token, which comes from the prefill."""
    steps = []
    left = count - 1
    while left > 0:
        drafts = 0 if SETTINGS["kind"] == "plain" else SETTINGS["draft_len"]
        accepted = 0
        while accepted < drafts and number(prompt, len(steps), accepted, "accept") < 0.7 - 0.1 * accepted:
            accepted += 1
        if SETTINGS["forced"] is not None:
            accepted = SETTINGS["forced"]
        if SETTINGS["accept_nothing"] or blind:
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
        state["per_pos"][position] = state["per_pos"].get(position, 0) + sum(1 for s in steps if s - 1 > position)
    if SETTINGS["kind"] == "reference":
        counts = {"steps": len(steps), "drafted": len(steps) * draft_len, "accepted": accepted, "histogram": histogram}
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
    owner = {"reference": "trtspec", "trtllm": "tensorrt_llm", "vllm": "vllm", "sglang": "sglang"}.get(
        SETTINGS["kind"], "somebody"
    )
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
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{position}"}} {float(count)}'
        )
    return PlainTextResponse("\n".join(lines) + "\n")


def tool_message() -> dict[str, Any]:
    arguments = {"call": '{"name": "parse_args"}', "malformed": '{"name": "parse_'}.get(SETTINGS["tool"])
    if arguments is None:
        return {
            "role": "assistant",
            "content": "" if SETTINGS["tool"] == "vanish" else "It parses.",
            "tool_calls": [],
        }
    call = {"id": "functions.lookup:0", "type": "function"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [call | {"function": {"name": "lookup", "arguments": arguments}}],
    }


def logprob_entry(token: str, second: str, gap: float) -> dict[str, Any]:
    top = [{"token": token + " ", "logprob": -0.1}, {"token": second + " ", "logprob": -0.1 - gap}]
    return {"token": token + " ", "logprob": -0.1, "top_logprobs": top}


@app.post("/v1/chat/completions")
async def chat(request: Request) -> Any:
    body = await request.json()
    state["requests"] += 1
    if SETTINGS["fail_every"] and state["requests"] % SETTINGS["fail_every"] == 0:
        return JSONResponse({"object": "error", "message": "out of blocks", "code": 500}, status_code=500)
    if body.get("tools"):
        if SETTINGS["tool"] == "refuse":
            return JSONResponse({"error": {"message": "tools need a parser"}}, status_code=400)
        if body.get("stream"):
            return StreamingResponse(tool_stream(tool_message()), media_type="text/event-stream")
        return {"choices": [{"index": 0, "message": tool_message(), "finish_reason": "stop"}]}
    if body.get("logprobs") and SETTINGS["logprobs"] == "deadly":
        os._exit(1)
    if body.get("logprobs") and not SETTINGS["logprobs"]:
        return JSONResponse({"error": {"message": "logprobs are off"}}, status_code=400)
    prompt = json.dumps(body["messages"])
    tokens = write(prompt, body["max_tokens"], body.get("seed", 0), body.get("temperature", 1.0))
    known = prompt[:96] in state["seen"]
    state["seen"].add(prompt[:96])
    steps = steps_of(prompt, len(tokens), known and SETTINGS["reuse"] == "blind")
    extra = statistics(steps, len(tokens))
    finish = "length" if len(tokens) == body["max_tokens"] else "stop"
    usage: dict[str, Any] = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(tokens)}
    if SETTINGS["kind"] == "reference" and SETTINGS["reuse"]:
        usage["prompt_tokens_details"] = {"cached_tokens": len(prompt.split()) - 1 if known else 0}
    if body.get("stream"):
        return StreamingResponse(stream(tokens, steps, extra, finish, usage), media_type="text/event-stream")
    text = "".join(token + " " for token, _, _ in tokens)
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish, **extra}
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [logprob_entry(*token) for token in tokens]}
    return {"choices": [choice], "usage": usage}


async def tool_stream(message: dict[str, Any]):  # type: ignore[no-untyped-def]
    calls = [{**call, "index": place} for place, call in enumerate(message["tool_calls"])]
    delta = {"content": message["content"], "tool_calls": calls}
    yield f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': 'stop'}]})}\n\n"
    yield "data: [DONE]\n\n"


async def stream(tokens: list, steps: list[int], extra: dict, finish: str, usage: dict):  # type: ignore[no-untyped-def]
    """One chunk per step, as engines do; usage in a last chunk without choices."""
    position, due = 0, time.perf_counter()
    for index, size in enumerate([1, *steps]):
        # a batch of b requests costs a step more, so that concurrency is not free
        state["busy"] += 1
        due += SETTINGS["step_s"] * (1 + 0.05 * state["busy"])
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        state["busy"] -= 1
        text = "".join(token + " " for token, _, _ in tokens[position : position + size])
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
