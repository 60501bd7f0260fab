"""Runs command lines of `trtspec` one at a time, each with its own limits, and says how each ended.

    python -m tests.hostile.worker < requests > answers

A request is one JSON line: {"argv": [...], "out": directory, "process": bool}; the answer has
"status" and "signal" (int or null), "hung" (bool), and the seconds that it took, "cpu" and "wall".
The command writes to stdout and stderr in `out`. With "process" it is a fresh interpreter; without,
a forked child of this one, which has imported already: that makes thousands of runs affordable.
Either can hang or die and takes nothing with it.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

CPU_SECONDS = 5
WALL_SECONDS = 300.0  # other work may hold the processor; a wait on a pipe or a lock ends here
MEMORY = 6 * 2**30
COMMANDS = ("inspect", "convert", "build_config", "plan", "serve", "lint", "bench", "check", "app")
LIBRARIES = (
    "httpx",
    "jinja2",
    "yaml",
    "numpy",
    "pydantic.main",
    "pydantic.type_adapter",
    "pydantic.fields",
)


class Worker:
    """`loading`: processor seconds of importing PyTorch, which a fresh process may add."""

    def __init__(self) -> None:
        self.loading = 0.0
        for name in (*(f"trtspec.cli.{command}" for command in COMMANDS), *LIBRARIES):
            importlib.import_module(name)
        gc.freeze()  # a child that collects would copy every page of these

    def load_torch(self) -> None:
        """Before the first child that needs it; once for all that follow."""
        begun = time.process_time()
        importlib.import_module("trtspec.heads.convert.conversion")
        self.loading = time.process_time() - begun
        gc.freeze()

    def run(self, argv: list[str], out: Path, process: bool) -> dict[str, object]:
        reads_tensors = argv[0] == "convert" or argv[0] == "inspect" and "--against" in argv
        if reads_tensors and not self.loading:
            self.load_torch()
        more = 2 * self.loading if process and reads_tensors else 0.0
        begun = time.monotonic()
        child = os.fork()
        if child == 0:
            _be_trtspec(argv, out, process, CPU_SECONDS + round(more))
        while (wall := time.monotonic() - begun) < WALL_SECONDS + 2 * more:
            done, status, used = os.wait4(child, os.WNOHANG)
            if done:
                number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
                cpu = used.ru_utime + used.ru_stime
                return {
                    "status": code,
                    "signal": number,
                    "hung": number == signal.SIGXCPU,
                    "cpu": cpu,
                    "wall": wall,
                }
            time.sleep(0.005)
        os.kill(child, signal.SIGKILL)
        used = os.wait4(child, 0)[2]
        return {
            "status": None,
            "signal": None,
            "hung": True,
            "cpu": used.ru_utime + used.ru_stime,
            "wall": wall,
        }


def _be_trtspec(argv: list[str], out: Path, process: bool, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, number in (("stdout", 1), ("stderr", 2)):
        handle = os.open(out / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(handle, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if process:
        os.execv(sys.executable, [sys.executable, "-m", "trtspec", *argv])
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
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


def main() -> None:
    worker = Worker()
    for line in sys.stdin:
        request = json.loads(line)
        answer = worker.run(request["argv"], Path(request["out"]), request["process"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
