"""`trtspec demo`: the whole chain on a small Kimi-shaped model, command by command, ending in a report."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from trtspec import data_files, report
from trtspec.cli.options import ForceOption
from trtspec.errors import CheckFailed, MissingDependency, TrtspecError

NEEDED = {
    "torch": "trtspec[reference]",
    "transformers": "trtspec[reference]",
    "fastapi": "trtspec[reference]",
    "uvicorn": "trtspec[reference]",
    "modelopt": "trtspec[modelopt]",
}


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for everything the demo writes.")] = Path(
        "trtspec-demo"
    )
    port: Annotated[int, typer.Option(min=1, max=65000, help="First of four consecutive ports on 127.0.0.1.")] = 8310
    quick: Annotated[bool, typer.Option("--quick", help="Use small sizes; takes about five minutes.")] = False
    force: ForceOption = False


def demo(options: DemoOptions) -> None:
    """Run the whole workflow on a small Kimi-shaped model on this CPU, and write a report.

    The first stage streams an answer with and without speculation. Every other one is an ordinary trtspec command,
    printed before it runs: inspect, quantize, synthesize, train, build-config, lint, serve, bench, check. Takes about
    twelve minutes on two cores.
    """
    from trtspec.cli.demo_process import Chain, duration, free_ports
    from trtspec.cli.demo_stages import FULL, PORTS, QUICK, STAGES, Demo, run_stages

    output = options.output
    preflight()
    prepare(output, options.force)
    free_ports(options.port, PORTS)
    sizes = QUICK if options.quick else FULL
    chain = Chain(output, STAGES, quiet=report_quiet())
    chain.say(f"trtspec demo: {STAGES} stages, about {duration(sum(sizes.seconds.values()))} on two cores, in {output}")
    stamp = report.provenance("demo", {"target": str(data_files.kimi_nano_dir())}, {"quick": options.quick})
    data: dict[str, Any] = {"quick": options.quick, "bench": {}, "checks": [], "machine": machine()}
    began = time.monotonic()
    with termination_as_interrupt():
        run_stages(Demo(chain, output, options.port, sizes, data))
    data |= {"created": stamp["created"], "versions": stamp["versions"], "steps": chain.to_dicts()}
    data["seconds"] = time.monotonic() - began
    finish(output, data)
    chain.say(f"\n{duration(data['seconds'])} in all. Report: {(output / 'report.html').resolve()}")
    failed = [entry["title"] for entry in data["checks"] if entry["gate"] and not entry["verdict"]["ok"]]
    if failed:
        raise CheckFailed(f"the demo ran to its end, but check failed: {', '.join(failed)}", "see the report")


def preflight() -> None:
    """Raises MissingDependency naming the extra before anything is started."""
    from importlib.util import find_spec

    missing = [(name, extra) for name, extra in NEEDED.items() if find_spec(name) is None]
    if missing:
        names = ", ".join(name for name, _ in missing)
        raise MissingDependency(f"the demo needs {names}, not installed here", f"pip install '{missing[-1][1]}'")
    if not (data_files.kimi_nano_dir() / "config.json").is_file():
        raise TrtspecError(
            "kimi-nano, the demo's target, is not in this installation", "install trtspec from its wheel"
        )


def prepare(output: Path, force: bool) -> None:
    """An empty directory; with --force, one that an earlier demo made is emptied, and no other."""
    report.refuse_overwrite(output, force)
    if output.is_dir() and any(output.iterdir()):
        if not (output / "logs").is_dir():
            raise TrtspecError(
                f"{output} is not the directory of an earlier demo; it is left alone", "choose another -o"
            )
        shutil.rmtree(output)
    (output / "logs").mkdir(parents=True)


def finish(output: Path, data: dict[str, Any]) -> None:
    """demo.json, report.html, and the same tables on the terminal."""
    from trtspec.bench import demo_report

    report.write_json(output / "demo.json", data)
    report.write_atomic(output / "report.html", demo_report.demo_html(data))
    if not report_quiet():
        report.print_tables(demo_report.all_tables(data), demo_report.verdict_lines(data))


@contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """SIGTERM unwinds like Ctrl-C, so that servers are stopped either way."""

    def interrupt(_: int, __: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import os
    import platform

    import psutil

    return {
        "processor": cpu_name() or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def report_quiet() -> bool:
    import os

    return os.environ.get("TRTSPEC_QUIET") == "1"
