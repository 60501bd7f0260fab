"""Start-up of trtspec's torch-free commands beside a bare Typer app's: `python tests/benchmarks/startup.py [runs]`.

Every command is a fresh process of the same interpreter, from its start to its exit, in turn with the two bare apps, so
that a busy machine slows all. The bare app that runs has as many options as the commands, for Typer's own cost grows
with them. Bytecode is cached, as in any installation.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import typer
from typing import Annotated, Literal
app = typer.Typer()

@app.command()
def hello(name: str = "x", {options}):
    \"\"\"Say hello.\"\"\"
    print(name)

app()
"""
OPTIONS = ", ".join(f"option_{i}: Annotated[int | None, typer.Option(min=1, help='A size.')] = None" for i in range(14))
PAIR = ["nvidia/Kimi-K2.6-NVFP4", "--head", "nvidia/Kimi-K2.6-Eagle3"]
CONFIG = "configs/kimi-k2.6-nvfp4-eagle3-4xb200-latency.yml"


def seconds(arguments: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one run of this interpreter with `arguments`."""
    used = os.times()
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    wall = time.perf_counter() - began
    now = os.times()
    return wall, now.children_user - used.children_user + now.children_system - used.children_system


def measure(runs: int) -> dict[str, tuple[float, float]]:
    """Median wall and processor seconds by label."""
    with tempfile.TemporaryDirectory() as directory:
        bare = Path(directory) / "bare.py"
        bare.write_text(BARE.format(options=OPTIONS))
        os.environ["PYTHONPYCACHEPREFIX"] = directory
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        commands = {
            "bare Typer app --help": [str(bare), "--help"],
            "bare Typer app, run": [str(bare), "--name", "y"],
            "trtspec --help": ["-m", "trtspec", "--help"],
            "trtspec plan": ["-m", "trtspec", "plan", *PAIR, "--acceptance", "2.62@3"],
            "trtspec build-config": ["-m", "trtspec", "build-config", *PAIR],
            "trtspec lint": ["-m", "trtspec", "lint", CONFIG],
            "trtspec serve --dry-run": ["-m", "trtspec", "serve", *PAIR, "--dry-run"],
        }
        for command in commands.values():
            seconds(command)  # writes the bytecode, warms the page cache
        rounds = [{label: seconds(command) for label, command in commands.items()} for _ in range(runs)]
    return {
        label: (statistics.median(r[label][0] for r in rounds), statistics.median(r[label][1] for r in rounds))
        for label in commands
    }


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    found = measure(runs)
    wall, processor = found["bare Typer app, run"]
    print(
        f"{f'median of {runs}':24} {'wall':>8} {'x bare':>7} {'more':>8}   {'processor':>9} {'x bare':>7} {'more':>8}"
    )
    for label, (here, used) in found.items():
        print(
            f"{label:24} {here * 1000:5.0f} ms {here / wall:7.2f} {(here - wall) * 1000:5.0f} ms   "
            f"{used * 1000:6.0f} ms {used / processor:7.2f} {(used - processor) * 1000:5.0f} ms"
        )


if __name__ == "__main__":
    main()
