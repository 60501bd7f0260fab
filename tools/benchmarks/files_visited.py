"""What a reader opens to follow one input through a command: files, stays and returns.

    python -m tools.benchmarks.files_visited [COMMAND ...] [--files]

It measures the tree in whose root it is run. Each command runs in a process of its own, on the
shipped models, and a file counts once a function in it has run. The reader takes each function up
when it is first called; functions taken up one after another in the same file are one stay, and a
stay in a file that was open before is a return. Functions that run while a module is imported
(decorators, defaults) do not count. `--files` lists the stays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from urllib.request import urlopen

PACKAGE = Path(os.environ.get("TRTSPEC_PACKAGE", Path.cwd() / "trtspec"))
CONVERSATION = {
    "messages": [
        {"role": "user", "content": "Name a prime."},
        {"role": "assistant", "content": "Seven is a prime."},
    ]
}
COMMANDS = {
    "lint": "lint engine.yml --trtllm-version 1.4.0rc1 --target {k26} --head {eagle}",
    "build-config": "build-config {k26} --head {eagle} --trtllm-version 1.4.0rc1 -o built.yml",
    "serve --dry-run": (
        "serve {k26} --head {eagle} --trtllm-version 1.4.0rc1 --trust-remote-code --dry-run"
    ),
    "serve --dry-run, weights here": (
        "serve {nano} --head {head} --trtllm-version 1.4.0rc1 --tp-size 1 --trust-remote-code "
        "--dry-run"
    ),
    "quantize": "quantize {nano} -o nvfp4 --policy k2.6 --workers 1",
    "quantize, a tensor from plan to shard": "quantize {nano} -o nvfp4 --policy k2.6 --workers 1",
    "train": "train {nano} data.jsonl -o head --steps 2 --batch-size 2 --seq-len 64 --ttt-steps 1 "
    "--acceptance-prompts 0",
    "convert": "convert {head} -o head --to vllm",
    "convert, with a target": "convert {head} -o head --to vllm --target {nano}",
    "check --record": "check {url} --samples 1 --max-tokens 16 --record answers.jsonl",
    "check --record, a question to its record": (
        "check {url} --samples 1 --max-tokens 16 --record answers.jsonl"
    ),
    "prove": (
        "prove {nano} --head {head} --backend reference --samples 3 --max-tokens 16 "
        "--concurrency 1 --port 8918 -o proof"
    ),
    "bench": "bench {url} --samples 1 --max-tokens 16 --concurrency 1 -o measured",
}
# The parts of a command that belong to a walk: each begins with the first call of a function and
# ends before that of another.
WINDOWS = {
    "plan to shard": {"plan_conversion": "carried_names", "convert_shards": "summed"},
    "to its record": {"record": "second"},
}
NAMES = {
    "nano": PACKAGE / "data" / "kimi-nano",
    "head": PACKAGE / "data" / "kimi-nano-eagle3",
    "k26": "nvidia/Kimi-K2.6-NVFP4",
    "eagle": "nvidia/Kimi-K2.6-Eagle3",
    "url": "http://127.0.0.1:8917",
}
ENGINE_YAML = Path("configs/kimi-k2.6-nvfp4-eagle3-4xb200-latency.yml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commands", nargs="*", help=", ".join(COMMANDS))
    parser.add_argument("--files", action="store_true", help="list the stays")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in the command's own process
    arguments = parser.parse_args()
    if arguments.only:
        visits(arguments.only)
        return
    wanted = arguments.commands or list(COMMANDS)
    with serving() if any("{url}" in COMMANDS[name] for name in wanted) else nullcontext():
        print(f"{'':45} {'files':>5} {'stays':>5} {'returns':>7}")
        for name in wanted:
            status, stays = visited(name)
            files = len(dict(stays))
            failed = f"  (exit status {status})" if status else ""
            print(f"{name:45} {files:5} {len(stays):5} {len(stays) - files:7}{failed}", flush=True)
            if arguments.files:
                print("".join(f"    {file:40} {', '.join(names)}\n" for file, names in stays))


@contextmanager
def serving() -> Iterator[None]:
    """Serves the shipped models at NAMES["url"]."""
    words = "serve {nano} --head {head} --backend reference --port 8917".format(**NAMES).split()
    process = subprocess.Popen([sys.executable, "-m", "trtspec", *words], stderr=subprocess.DEVNULL)
    try:
        for _ in range(120):
            with suppress(OSError), urlopen(f"{NAMES['url']}/health"):
                break
            time.sleep(1)
        else:
            sys.exit(
                "the server did not start: "
                "run `trtspec serve kimi-nano --backend reference` to see why"
            )
        yield
    finally:
        process.terminate()
        process.wait()


def visited(name: str) -> tuple[int, list[tuple[str, list[str]]]]:
    """A command's exit status and its stays: files, and the functions taken up there."""
    with tempfile.TemporaryDirectory() as room:
        (Path(room) / "engine.yml").write_bytes(ENGINE_YAML.read_bytes())
        (Path(room) / "data.jsonl").write_text(
            f"{json.dumps(CONVERSATION)}\n" * 4, encoding="utf-8"
        )
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"}
        environment["TRTSPEC_PACKAGE"] = str(PACKAGE)
        script = [sys.executable, str(Path(__file__).resolve()), "--only", name]
        done = subprocess.run(script, cwd=room, env=environment, capture_output=True, text=True)
        found = Path(room) / "visited.json"
        if not found.is_file():
            sys.exit(done.stderr)
        status, functions = json.loads(found.read_text(encoding="utf-8"))
        if status:
            print(done.stderr[-2000:], file=sys.stderr)
        stays = groupby(functions, key=lambda function: function[0])
        return status, [(file, [name for _, name in stay]) for file, stay in stays]


def visits(name: str) -> None:
    """Runs one command here, in the current directory, and writes `visited.json`."""
    from trtspec.cli.app import main as command

    package = str(PACKAGE)
    window = next((ends for part, ends in WINDOWS.items() if part in name), {})
    functions: dict[CodeType, None] = {}
    ends, state = {*window, *window.values()}, {"on": not window}

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(package) or importing(frame):
            return
        if code.co_name in ends:
            ends.remove(code.co_name)
            state["on"] = code.co_name in window
        if state["on"] and not code.co_name.startswith("<"):
            functions[code] = None

    def importing(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(package):
                return True
            frame = frame.f_back
        return False

    sys.argv = [
        "trtspec",
        *COMMANDS[name].format(**{key: str(value) for key, value in NAMES.items()}).split(),
    ]
    threading.setprofile(seen)
    sys.setprofile(seen)
    status = 0
    try:
        command()
    except SystemExit as exit:
        status = int(exit.code or 0)
    finally:
        sys.setprofile(None)
    names = [(os.path.relpath(code.co_filename, package), code.co_name) for code in functions]
    Path("visited.json").write_text(json.dumps([status, names]), encoding="utf-8")


if __name__ == "__main__":
    main()
