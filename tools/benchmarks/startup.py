"""Start-up time of the torch-free commands beside a bare Typer app's: `python tools/benchmarks/startup.py [runs]`.

All run as fresh processes of the same interpreter, in turn, so that a busy machine slows each alike; bytecode is kept
in a folder of the benchmark's own. Prints wall time and, because a busy machine stretches that, processor time.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BARE = """
import typer
app = typer.Typer()

@app.command()
def hello(name: str = "x"):
    \"\"\"Say hello.\"\"\"
    print(name)

app()
"""
PAIR = ["nvidia/Kimi-K2.6-NVFP4", "--head", "nvidia/Kimi-K2.6-Eagle3"]
COMMANDS = {
    "trtspec --help": ["--help"],
    "trtspec lint": ["lint", "engine.yml", "--trtllm-version", "1.4.0rc1", "--target", *PAIR],
    "trtspec build-config": ["build-config", *PAIR, "--trtllm-version", "1.4.0rc1", "--dry-run"],
    "trtspec plan": ["plan", *PAIR, "--gpu", "b200", "--gpus", "4"],
    "trtspec serve --dry-run": [
        "serve",
        *PAIR,
        "--trtllm-version",
        "1.4.0rc1",
        "--dry-run",
        "--trust-remote-code",
    ],
}
ENGINE = """\
speculative_config: {decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
moe_config: {backend: TRTLLM}
"""


def once(arguments: list[str], folder: Path, environment: dict[str, str]) -> tuple[float, float]:
    """(wall, processor) seconds of one run of this interpreter; statuses 0 and 3 (problems found) are answers."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=folder, env=environment
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 3):
        raise SystemExit(f"{' '.join(arguments)} failed: {done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(runs: int) -> dict[str, list[tuple[float, float]]]:
    """Every run of every command, the bare app first."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "bare.py").write_text(BARE)
        (folder / "engine.yml").write_text(ENGINE)
        environment = {
            key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"
        }
        environment |= {
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
            "HF_HOME": str(folder / "hub"),
        }
        commands = {"bare Typer app": ["bare.py", "--help"]}
        commands |= {title: ["-m", "trtspec", *words] for title, words in COMMANDS.items()}
        for arguments in commands.values():
            once(arguments, folder, environment)  # writes the bytecode, warms the page cache
        found: dict[str, list[tuple[float, float]]] = {title: [] for title in commands}
        for _ in range(runs):
            for title, arguments in commands.items():
                found[title].append(once(arguments, folder, environment))
        return found


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    found = measure(runs)
    medians = {
        title: [statistics.median(part) for part in zip(*times, strict=True)]
        for title, times in found.items()
    }
    bare = medians["bare Typer app"]
    print(f"median of {runs} runs       wall    over bare  ratio    processor    over bare  ratio")
    for title, (wall, processor) in medians.items():
        over = (
            f"{(wall - bare[0]) * 1000:8.0f} ms {wall / bare[0]:5.2f}x {processor * 1000:9.0f} ms"
        )
        over += f" {(processor - bare[1]) * 1000:9.0f} ms {processor / bare[1]:5.2f}x"
        print(f"{title:24} {wall * 1000:5.0f} ms {over}")


if __name__ == "__main__":
    main()
