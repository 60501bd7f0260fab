"""The stand-in server of these tests as an engine that is launched: `python light_server.py PORT JSON`. It also answers
the raw completion by which a launch knows that it is ready."""

import json
import sys
from typing import Any

import stand_in
import uvicorn


@stand_in.app.post("/v1/completions")
async def completions() -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": " world"}]}


if __name__ == "__main__":
    stand_in.SETTINGS.update(json.loads(sys.argv[2]))
    uvicorn.run(stand_in.app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
