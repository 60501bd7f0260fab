"""Runs command lines of `trtspec` one at a time, each in a forked child with its own limits, and says how each ended.

    python -m tests.hostile.worker < requests > answers

A request is one JSON line: {"argv": [...], "out": directory}; the answer has "status" and "signal" (int or null),
"hung" (bool) and "seconds". The child writes to stdout and stderr in `out`. Importing once and forking makes
thousands of runs affordable; a child that hangs or dies takes nothing with it.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

CPU_SECONDS = 5
WALL_SECONDS = 45.0  # other work may hold the processor; a wait on a FIFO or a lock ends here
MEMORY = 6 * 2**30


def run(argv: list[str], out: Path) -> dict[str, object]:
    begun = time.monotonic()
    child = os.fork()
    if child == 0:
        _be_trtspec(argv, out)
    while time.monotonic() - begun < WALL_SECONDS:
        done, status, used = os.wait4(child, os.WNOHANG)
        if done:
            seconds = used.ru_utime + used.ru_stime
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            return {"status": code, "signal": number, "hung": number == signal.SIGXCPU, "seconds": seconds}
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"status": None, "signal": None, "hung": True, "seconds": WALL_SECONDS}


def _be_trtspec(argv: list[str], out: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, number in (("stdout", 1), ("stderr", 2)):
        handle = os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = ["trtspec", *argv]
    from trtspec.cli.app import main

    status = 1
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException as error:
        sys.stderr.write(f"not caught: {error!r}\n")
        status = 99
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _warm() -> None:
    """What every child needs is imported before the first fork."""
    import importlib

    for name in ("inspect", "convert", "build_config", "plan", "serve", "lint", "bench", "check", "app"):
        importlib.import_module(f"trtspec.cli.{name}")
    for name in (
        "httpx",
        "jinja2",
        "yaml",
        "numpy",
        "safetensors.torch",
        "pydantic",
        "trtspec.heads.convert.conversion",
    ):
        importlib.import_module(name)


def main() -> None:
    _warm()
    for line in sys.stdin:
        request = json.loads(line)
        answer = run(request["argv"], Path(request["out"]))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
