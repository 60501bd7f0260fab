"""Launches the tiny server as a command does: `launch_one.py PORT MODE JSON`; JSON has `limits` and `endpoint`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trtspec.errors import TrtspecError
from trtspec.launch.server import LogPatterns, ServerAddress
from trtspec.launch.supervisor import Limits, ServerLaunch, run
from trtspec.report import peak_rss, write_stderr

if __name__ == "__main__":
    port, mode, more = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    words = [sys.executable, "-I", "-S", str(Path(__file__).with_name("tiny_server.py")), str(port), mode]
    limits = Limits(**{"startup": 30.0, "stop_grace": 1.0, **more.get("limits", {})})
    try:
        status = run(
            ServerLaunch(
                words, ServerAddress("127.0.0.1", port, **more.get("endpoint", {})), LogPatterns("tiny"), {}, limits
            )
        )
    except TrtspecError as error:
        write_stderr(f"{error.code}: {error.message}\n")
        status = error.exit_code
    write_stderr(f"peak {peak_rss() // 2**20} MiB\n")
    sys.exit(status)
