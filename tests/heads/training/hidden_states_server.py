"""The reference server answering ModelOpt's streaming protocol.

`python -m tests.heads.training.hidden_states_server TARGET PORT SIDECAR_PORT LAYERS DTYPE`

Stands where vLLM with ModelOpt's connector stands: `/v1/completions` is the reference server's own,
with the id of the captured prompt added to its answer; states lie in a pool registered with NIXL,
and the sidecar hands out descriptors. Written from what ModelOpt's client asks for.
"""

import base64
import json
import sys
import threading
from itertools import count
from pathlib import Path

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from nixl._api import nixl_agent, nixl_agent_config

from trtspec.engine.http_api import create_app
from trtspec.engine.server import ServerOptions, build_engine

SLOTS, LONGEST = 16, 128


class Pool:
    """States of the last SLOTS prompts, in memory that other processes read."""

    def __init__(self, planes: int, width: int, dtype: torch.dtype) -> None:
        self.agent = nixl_agent("producer", nixl_agent_config(backends=["UCX"]))
        self.slots = torch.zeros(SLOTS, LONGEST, planes, width, dtype=dtype)
        self.registered = self.agent.register_memory([self.slots])
        self.held: dict[str, tuple[int, list[int]]] = {}
        self._next = count()

    def put(self, tokens: list[int], planes: torch.Tensor) -> str:
        number = next(self._next)
        slot, name = number % SLOTS, f"req-{number}"
        self.held = {key: value for key, value in self.held.items() if value[0] != slot}
        self.slots[slot, : len(tokens)] = planes.to(self.slots.dtype)
        self.held[name] = slot, tokens
        return name

    def description(self, name: str) -> dict:
        slot, tokens = self.held[name]
        part = self.slots[slot, : len(tokens)]
        descriptors = self.agent.get_serialized_descs(self.agent.get_xfer_descs([part]))
        shape, dtype = list(part.shape), str(part.dtype).removeprefix("torch.")
        held = {
            "hs_descs": base64.b64encode(descriptors).decode(),
            "hs_shape": shape,
            "hs_dtype": dtype,
        }
        return {"ready": True, "token_ids": tokens, **held}


def sidecar(pool: Pool) -> FastAPI:
    app = FastAPI()

    @app.get("/meta")
    def meta() -> dict:
        return {"agent_metadata": base64.b64encode(pool.agent.get_agent_metadata()).decode()}

    @app.get("/desc")
    def desc(req_id: str) -> Response:
        if req_id not in pool.held:
            return Response('{"error": "unknown"}', status_code=404, media_type="application/json")
        return Response(json.dumps(pool.description(req_id)), media_type="application/json")

    @app.get("/done")
    def done(req_id: str) -> dict:
        return {"valid": pool.held.pop(req_id, None) is not None}

    return app


def capturing(
    app: FastAPI, target, pool: Pool, layers: tuple[int, ...], sidecar_port: int
) -> FastAPI:
    """The reference server with its prompt's states after each completion of token ids."""

    @app.middleware("http")
    async def add_states(request: Request, call_next) -> Response:
        asked = await request.body()
        answer = await call_next(request)
        if request.url.path != "/v1/completions" or answer.status_code != 200:
            return answer
        whole = json.loads(b"".join([part async for part in answer.body_iterator]))
        tokens = json.loads(asked)["prompt"]
        with torch.inference_mode():
            planes = target(
                torch.tensor([tokens]), None, None, aux_layers=layers, last_only=True
            ).aux[0]
        name = pool.put(tokens, planes.unflatten(-1, (len(layers), -1)))
        whole["kv_transfer_params"] = {
            "hs_req_id": name,
            "hs_sidecar_port": sidecar_port,
            "hs_max_tokens": LONGEST,
        }
        return Response(json.dumps(whole), media_type="application/json")

    return app


def main() -> None:
    torch.set_num_threads(1)
    directory, port, sidecar_port = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    layers = tuple(map(int, sys.argv[4].split(",")))
    engine, tokenizer = build_engine(
        directory, None, ServerOptions(dtype="float32", max_seq_len=LONGEST + 8)
    )
    pool = Pool(len(layers), engine.target.spec.hidden_size, getattr(torch, sys.argv[5]))
    listen = {"host": "127.0.0.1", "log_level": "warning"}
    threading.Thread(
        target=uvicorn.run,
        args=(sidecar(pool),),
        kwargs=listen | {"port": sidecar_port},
        daemon=True,
    ).start()
    app = capturing(
        create_app(engine, tokenizer, "tiny"), engine.target, pool, layers, sidecar_port
    )
    uvicorn.run(app, port=port, **listen)


if __name__ == "__main__":
    main()
