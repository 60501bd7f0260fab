"""guidellm and `vllm bench serve` against a server, with their figures in our words.

Each runs a closed loop over the prompts of a file, in an environment of its own. A variable names
its Python; without it the test is skipped.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trtspec.bench.results import BenchResults

TOOLS = {"TRTSPEC_GUIDELLM_PYTHON": "guidellm", "TRTSPEC_VLLM_PYTHON": "vllm"}
ATTEMPTS = 3  # guidellm sometimes ends with one answer still on its way between its processes


@dataclass(frozen=True)
class Load:
    """One run of a load generator.

    `prompts` is JSON lines with "prompt", each asked once; answers are greedy.
    """

    url: str
    model: str
    prompts: Path
    count: int
    concurrency: int
    max_tokens: int
    tokenizer: Path


def tool(variable: str, name: str) -> Path:
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} names no Python with that load generator")
    return Path(python).with_name(name)


def guidellm(load: Load, out: Path) -> dict[str, float]:
    """Seconds, and output tokens per second from the first request's start to the last one's end.

    This is how we count them: guidellm's own figure is a mean over seconds, of which the last are
    emptier. Its inter-token latency is our TPOT.
    """
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "model": load.model,
        "max_tokens": load.max_tokens,
    }
    backend |= {"extras": {"body": {"temperature": 0}}}
    command = [
        tool("TRTSPEC_GUIDELLM_PYTHON", "guidellm"),
        "run",
        "--backend",
        json.dumps(backend),
        "--profile",
        f"kind=concurrent,streams={load.concurrency}",
        "--constraint",
        f"kind=max_requests,count={load.count}",
        "--data",
        f"kind=json_file,path={load.prompts}",
        "--output",
        f"kind=json,path={out}",
        "--disable-console",
    ]
    for _ in range(ATTEMPTS):
        out.unlink(missing_ok=True)
        subprocess.run(command, check=True)
        report = json.loads(out.read_text())["benchmarks"][0]
        if not report["scheduler_state"]["processing_requests"]:
            break
    found, asked = report["metrics"], report["requests"]["successful"]
    assert found["request_totals"]["successful"] == len(asked) == load.count
    ends, starts = (
        [one["request_end_time"] for one in asked],
        [one["request_start_time"] for one in asked],
    )
    return {
        "TTFT": found["time_to_first_token_ms"]["successful"]["median"] / 1000,
        "TPOT": found["inter_token_latency_ms"]["successful"]["median"] / 1000,
        "tokens/s": sum(one["output_tokens"] for one in asked) / (max(ends) - min(starts)),
    }


def vllm_bench_serve(load: Load, out: Path) -> dict[str, float]:
    command = [
        tool("TRTSPEC_VLLM_PYTHON", "vllm"),
        "bench",
        "serve",
        "--backend",
        "openai-chat",
        "--base-url",
        load.url,
        "--endpoint",
        "/v1/chat/completions",
        "--model",
        load.model,
        "--dataset-name",
        "custom",
        "--dataset-path",
        load.prompts,
        "--num-prompts",
        load.count,
        "--max-concurrency",
        load.concurrency,
        "--tokenizer",
        load.tokenizer,
        "--skip-chat-template",
        "--custom-output-len",
        load.max_tokens,
        "--temperature",
        0,
        "--disable-shuffle",
        "--save-result",
        "--result-dir",
        out.parent,
        "--result-filename",
        out.name,
        "--disable-tqdm",
    ]
    subprocess.run(list(map(str, command)), check=True)
    found = json.loads(out.read_text())
    assert (found["completed"], found["failed"]) == (load.count, 0)
    return {
        "TTFT": found["median_ttft_ms"] / 1000,
        "TPOT": found["median_tpot_ms"] / 1000,
        "ITL": found["median_itl_ms"] / 1000,
        "tokens/s": found["output_throughput"],
    }


def figures(results: BenchResults) -> dict[str, float]:
    """Ours, of the first load."""
    speed = results.concurrency[0].throughput
    assert speed.ttft_s and speed.itl_s and speed.inter_token_s and speed.tokens_per_s
    found: dict[str, Any] = {
        "TTFT": speed.ttft_s.p50,
        "TPOT": speed.inter_token_s.p50,
        "ITL": speed.itl_s.p50,
    }
    return {**found, "tokens/s": speed.tokens_per_s}


def word_tokenizer(directory: Path) -> Path:
    """vLLM's client wants one, to count the prompts; what it counts plays no part here."""
    directory.mkdir()
    model = {"type": "WordLevel", "vocab": {"<unk>": 0, "alpha": 1}, "unk_token": "<unk>"}
    (directory / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "pre_tokenizer": {"type": "Whitespace"},
                "model": model,
            }
        )
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory
