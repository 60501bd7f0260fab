"""What a flood of hostile grammars costs others, here and in vLLM on a CPU.

The requests of tests/engine/test_hostile_grammars.py, all at once, to kimi-nano beside four
streams.

    python -m tools.benchmarks.hostile_grammars --backend reference|vllm [--count 64]

vLLM is started by the Python that TRTSPEC_VLLM_PYTHON names (`make test-oracles` makes one).
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.command_line import free_port
from tests.engine import test_hostile_grammars as flood
from tests.oracles.vllm_environment import IN_VLLM, vllm_environment

asked = flood.attack


def in_vllm(draw: random.Random) -> dict[str, Any]:
    """The same request in vLLM's words."""
    body = asked(draw)
    form = body["response_format"]
    if form["type"] == "regex":
        return {**body, "response_format": None, "structured_outputs": {"regex": form["regex"]}}
    return {
        **body,
        "response_format": {**form, "json_schema": {"name": "x", **form["json_schema"]}},
    }


def memory(process: psutil.Process) -> int:
    return sum(one.memory_info().rss for one in [process, *process.children(recursive=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("reference", "vllm"), default="reference")
    parser.add_argument("--count", type=int, default=64)
    options = parser.parse_args()
    if options.backend == "vllm" and "TRTSPEC_VLLM_PYTHON" not in os.environ:
        parser.error("TRTSPEC_VLLM_PYTHON names no Python with vLLM; `make test-oracles` makes one")
    port, behind, environment = free_port(), (), dict(os.environ)
    with tempfile.TemporaryDirectory() as place:
        if options.backend == "vllm":
            flood.attack, behind = in_vllm, ("--tp-size", "1", *IN_VLLM)
            environment = vllm_environment(
                Path(os.environ["TRTSPEC_VLLM_PYTHON"]), Path(place), environment
            )
        words = [
            "serve",
            "kimi-nano",
            "--backend",
            options.backend,
            "--dtype",
            "float32",
            "--port",
            str(port),
        ]
        words += ["--max-batch-size", "16", "--max-seq-len", "256", *behind]
        command = [sys.executable, "-m", "trtspec", *words]
        served = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        assert served.stderr is not None
        for line in served.stderr:
            print(line, end="", file=sys.stderr)
            if "ready on" in line or "trtspec: serving" in line:
                break
        threading.Thread(target=served.stderr.read, daemon=True).start()
        process, url = psutil.Process(served.pid), f"http://localhost:{port}"
        try:
            before = memory(process)
            seen = flood.one_round(url, 1, options.count)
            for name in ("gaps", "innocents", "refusals"):
                print(f"{name}: longest {max(getattr(seen, name), default=0.0):.2f} s")
            print("statuses", dict(seen.statuses), "wrong", seen.wrong[:3])
        except httpx.TransportError as error:
            print(f"a stream or an innocent request waited for 60 s or was cut off: {error!r}")
        finally:
            print(f"memory {before >> 20} MiB before, {memory(process) >> 20} behind")
            for one in [*process.children(recursive=True), process]:
                one.kill()


if __name__ == "__main__":
    main()
