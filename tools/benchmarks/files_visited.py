"""Files of the package in which one input of a command is processed: what a reader must open to follow it.

    python -m tools.benchmarks.files_visited [COMMAND ...] [--files]      for the tree in whose root it is run

Each command runs in a process of its own, on the shipped models, and a file counts once a function in it has run.
Functions that run while a module is imported (decorators, defaults) do not count. `--files` names the files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(os.environ.get("TRTSPEC_PACKAGE", Path.cwd() / "trtspec"))
CONVERSATION = {
    "messages": [{"role": "user", "content": "Name a prime."}, {"role": "assistant", "content": "Seven is a prime."}]
}
COMMANDS = {
    "lint": "lint engine.yml --trtllm-version 1.3.0rc20 --target {k26} --head {eagle}",
    "build-config": "build-config {k26} --head {eagle} --trtllm-version 1.3.0rc20 -o built.yml",
    "serve --dry-run": "serve {k26} --head {eagle} --trtllm-version 1.3.0rc20 --trust-remote-code --dry-run",
    "serve --dry-run, weights here": "serve {nano} --head {head} --trtllm-version 1.3.0rc20 --tp-size 1 "
    "--trust-remote-code --dry-run",
    "quantize": "quantize {nano} -o nvfp4 --policy k2.6 --workers 1",
    "quantize, a tensor from plan to shard": "quantize {nano} -o nvfp4 --policy k2.6 --workers 1",
    "train": "train {nano} data.jsonl -o head --steps 2 --batch-size 2 --seq-len 64 --ttt-steps 1 "
    "--acceptance-prompts 0",
    "convert": "convert {head} -o head --to vllm",
    "convert, with a target": "convert {head} -o head --to vllm --target {nano}",
}
NAMES = {
    "nano": PACKAGE / "data" / "kimi-nano",
    "head": PACKAGE / "data" / "kimi-nano-eagle3",
    "k26": "nvidia/Kimi-K2.6-NVFP4",
    "eagle": "nvidia/Kimi-K2.6-Eagle3",
}
ENGINE_YAML = Path("configs/kimi-k2.6-nvfp4-eagle3-4xb200-latency.yml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("commands", nargs="*", help=", ".join(COMMANDS))
    parser.add_argument("--files", action="store_true", help="name the files")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in the command's own process
    arguments = parser.parse_args()
    if arguments.only:
        visits(arguments.only)
        return
    for name in arguments.commands or COMMANDS:
        status, files = visited(name)
        print(f"{name:40} {len(files):4}" + (f"  (exit status {status})" if status else ""), flush=True)
        if arguments.files:
            print("".join(f"    {file}\n" for file in files))


def visited(name: str) -> tuple[int, list[str]]:
    with tempfile.TemporaryDirectory() as room:
        (Path(room) / "engine.yml").write_bytes(ENGINE_YAML.read_bytes())
        (Path(room) / "data.jsonl").write_text(f"{json.dumps(CONVERSATION)}\n" * 4, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent), "HF_HUB_OFFLINE": "1"}
        environment["TRTSPEC_PACKAGE"] = str(PACKAGE)
        script = [sys.executable, str(Path(__file__).resolve()), "--only", name]
        done = subprocess.run(script, cwd=room, env=environment, capture_output=True, text=True)
        found = Path(room) / "visited.json"
        if not found.is_file():
            sys.exit(done.stderr)
        status, files = json.loads(found.read_text(encoding="utf-8"))
        if status:
            print(done.stderr[-2000:], file=sys.stderr)
        return status, files


def visits(name: str) -> None:
    """Runs one command here, in the current directory, and writes `visited.json`."""
    from trtspec.cli.app import main as command

    package = str(PACKAGE)
    window = "plan to shard" in name
    files: dict[str, None] = {}
    state = {"on": not window}

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(package) or code.co_name.startswith("<") or importing(frame):
            return
        if window and code.co_name in ("plan_conversion", "publish"):
            state["on"] = code.co_name == "plan_conversion"
        if state["on"]:
            files[file] = None

    def importing(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(package):
                return True
            frame = frame.f_back
        return False

    sys.argv = ["trtspec", *COMMANDS[name].format(**{key: str(value) for key, value in NAMES.items()}).split()]
    threading.setprofile(seen)
    sys.setprofile(seen)
    status = 0
    try:
        command()
    except SystemExit as exit:
        status = int(exit.code or 0)
    finally:
        sys.setprofile(None)
    names = [os.path.relpath(file, package) for file in files]
    Path("visited.json").write_text(json.dumps([status, names]), encoding="utf-8")


if __name__ == "__main__":
    main()
