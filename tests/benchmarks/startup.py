"""Start-up time of `trtspec --help` beside a bare Typer app's: `python tests/benchmarks/startup.py [runs]`.

Both run as fresh processes of the same interpreter, in turn, so that a busy machine slows both.
"""

from __future__ import annotations

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


def seconds(arguments: list[str]) -> float:
    """Wall seconds of one run of this interpreter with `arguments`."""
    began = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def measure(runs: int) -> tuple[float, float]:
    """Median seconds of the bare app's and of trtspec's help."""
    with tempfile.TemporaryDirectory() as directory:
        bare = Path(directory) / "bare.py"
        bare.write_text(BARE)
        commands = ([str(bare), "--help"], ["-m", "trtspec", "--help"])
        for command in commands:
            seconds(command)  # writes the bytecode, warms the page cache
        pairs = [[seconds(command) for command in commands] for _ in range(runs)]
    times = list(zip(*pairs, strict=True))
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    bare, ours = measure(runs)
    print(f"{'':18} median of {runs}")
    print(f"{'bare Typer app':18} {bare * 1000:6.0f} ms")
    print(f"{'trtspec --help':18} {ours * 1000:6.0f} ms")
    print(f"{'ratio':18} {ours / bare:6.2f}")


if __name__ == "__main__":
    main()
