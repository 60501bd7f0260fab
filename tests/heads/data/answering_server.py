"""An OpenAI-like endpoint in a process of its own, whose answers depend on the request alone.

Run as `python answering_server.py PORT LOG [FAIL_EVERY] [DELAY]`: each request is one line of LOG;
every FAIL_EVERY-th is answered with status 503.
"""

import asyncio
import json
import sys
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

app = FastAPI()
log_path, fail_every, delay = (
    Path(sys.argv[2]),
    int((sys.argv + ["0"] * 2)[3]),
    float((sys.argv + ["0"] * 3)[4]),
)
served = 0


@app.get("/v1/models")
async def models():
    return {"data": [{"id": "tiny"}]}


@app.post("/v1/chat/completions")
@app.post("/v1/completions")
async def complete(request: Request):
    global served
    body = await request.json()
    served += 1
    with log_path.open("a", encoding="utf-8") as log:
        log.write(json.dumps(body) + "\n")
    if fail_every and served % fail_every == 0:
        return JSONResponse({"error": "busy"}, 503)
    text = body["prompt"] if "prompt" in body else body["messages"][-1]["content"]
    if text.isdigit():
        return JSONResponse({"error": "too long"}, int(text))
    if text.startswith("choice:"):  # the test says what the model answers
        return {
            "choices": [json.loads(text.removeprefix("choice:"))],
            "usage": {"completion_tokens": 3},
        }
    if text.startswith("hold:"):  # until the test lets go
        while not log_path.with_name("release").exists():
            await asyncio.sleep(0.01)
    await asyncio.sleep(delay * (len(text) % 5))  # answers come back out of order
    answer = f"{text.upper()} {body['seed'] % 1000}"
    choice = (
        {"text": answer}
        if "prompt" in body
        else {"message": {"role": "assistant", "content": answer}}
    )
    return {
        "choices": [choice | {"finish_reason": "stop"}],
        "usage": {"completion_tokens": len(answer.split())},
    }


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1]), log_level="error")
