"""Launches the tiny server as a command does: `launch_one.py PORT MODE JSON`.

JSON may have `limits`, and `first_generation`, the seconds for it.
"""

import json
import sys
from pathlib import Path

from trtspec.cli.app import _open_missing_streams
from trtspec.errors import TrtspecError
from trtspec.launch import supervisor
from trtspec.launch.server_launch import Limits, LogPatterns, ServerAddress, ServerLaunch
from trtspec.report import peak_rss, write_stderr

if __name__ == "__main__":
    _open_missing_streams()
    port, mode, more = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
    words = [
        sys.executable,
        "-I",
        "-S",
        str(Path(__file__).with_name("tiny_server.py")),
        str(port),
        mode,
    ]
    limits = Limits(**{"startup": 300.0, "stop_grace": 60.0, **more.get("limits", {})})
    supervisor.FIRST_GENERATION = more.get("first_generation", supervisor.FIRST_GENERATION)
    try:
        endpoint = ServerAddress("127.0.0.1", port)
        status = supervisor.run(
            ServerLaunch(argv=words, endpoint=endpoint, patterns=LogPatterns("tiny"), limits=limits)
        )
    except TrtspecError as error:
        write_stderr(f"{error.code}: {error.message}\n")
        status = error.exit_code
    write_stderr(f"peak {peak_rss() // 2**20} MiB\n")
    sys.exit(status)
