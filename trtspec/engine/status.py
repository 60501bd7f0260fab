"""What the server says about itself: health, versions, models, sizes and counters, under trtllm-serve's paths."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from trtspec.engine.metrics import prometheus_text
from trtspec.engine.openapi import STATUS_DOCUMENTS
from trtspec.engine.request import GenerationRequest
from trtspec.engine.worker import EngineThreadDied, GenerationFailed, Worker
from trtspec.models.precision import dtype_name

GENERATION_SECONDS = 60


@dataclass(frozen=True)
class Status:
    """Answers for one engine behind its worker."""

    worker: Worker
    model: str
    version: str
    started: int

    async def health(self) -> Response:
        """200 while the engine runs."""
        return Response(status_code=200 if self.worker.healthy else 503)

    async def health_generate(self) -> Response:
        """200 after a real generation of one token."""
        request = GenerationRequest(f"health-{uuid.uuid4().hex}", [next(iter(self.worker.engine.eos_ids), 0)], 1)
        try:
            await asyncio.wait_for(self.worker.collect(request), timeout=GENERATION_SECONDS)
        except (TimeoutError, EngineThreadDied, GenerationFailed):
            return Response(status_code=503)
        return Response(status_code=200)

    async def versions(self) -> JSONResponse:
        """Version of the server, type that it computes in, and how drafts of sampled requests are chosen."""
        engine = self.worker.engine
        how = {"version": self.version, "dtype": dtype_name(engine.target.dtype)}
        return JSONResponse(how | ({"draft_sampling": engine.options.draft_sampling} if engine.draft_len else {}))

    async def models(self) -> JSONResponse:
        """The one model that is served."""
        entry = {"id": self.model, "object": "model", "created": self.started, "owned_by": "trtspec"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def server_info(self) -> JSONResponse:
        """Sizes of the engine. `disaggregated_params` is null: trtllm-serve's clients look for it."""
        engine = self.worker.engine
        return JSONResponse(
            {
                "disaggregated_params": None,
                "model": self.model,
                "backend": "reference",
                "max_batch_size": engine.max_batch_size,
                "max_seq_len": engine.max_seq_len,
                "max_queue": self.worker.capacity - engine.max_batch_size,
                "max_draft_len": engine.draft_len,
            }
        )

    async def iterations(self) -> JSONResponse:
        """Records of the engine's steps since the last call."""
        return JSONResponse(self.worker.drain_iterations())

    async def perf_metrics(self) -> JSONResponse:
        """Times and speculation of the requests that ended since the last call."""
        return JSONResponse(self.worker.drain_timings())

    async def prometheus(self) -> Response:
        """Totals since the start, for a scraper."""
        text = prometheus_text(self.worker.engine)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def add_status(app: FastAPI, worker: Worker, model: str) -> None:
    """Adds the paths to an app."""
    status = Status(worker, model, app.version, int(time.time()))
    answers: dict[str, Any] = {
        "/health": status.health,
        "/health_generate": status.health_generate,
        "/version": status.versions,
        "/v1/models": status.models,
        "/server_info": status.server_info,
        "/metrics": status.iterations,
        "/perf_metrics": status.perf_metrics,
        "/prometheus/metrics": status.prometheus,
    }
    for path, answer in answers.items():
        app.get(path, responses=STATUS_DOCUMENTS[path], response_class=Response)(answer)
