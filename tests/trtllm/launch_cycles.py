"""Launches the stand-in again and again in one process; prints what the process holds after the first and the last."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading

import psutil

from trtspec.client.client import health, wait_ready
from trtspec.launch.server import LogPatterns, ServerAddress, ServerLaunch
from trtspec.launch.supervisor import run


def main(target: str, config: str, cycles: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["trtllm-serve", target, "--host", "localhost", "--port", str(port), "--extra_llm_api_options", config]

    def stop() -> None:
        asyncio.run(wait_ready(f"http://localhost:{port}", 60, health))
        os.kill(os.getpid(), signal.SIGTERM)

    for cycle in range(cycles):
        stopper = threading.Thread(target=stop, daemon=True)
        stopper.start()
        patterns, env = LogPatterns("trtllm-serve"), {"STANDIN_LOAD": "0"}
        run(ServerLaunch(argv=words, endpoint=ServerAddress("localhost", port), patterns=patterns, env=env))
        stopper.join()
        if cycle in (0, cycles - 1):
            own = psutil.Process()
            print(
                json.dumps(
                    {
                        "descriptors": own.num_fds(),
                        "threads": own.num_threads(),
                        "children": len(own.children(recursive=True)),
                    }
                )
            )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
