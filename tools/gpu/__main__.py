"""What the reference engine computes on this machine's GPU, and how fast, as one table.

    make test-gpu
    python -m tools.gpu [--target DIR --head DIR] [-o gpu-report.json]

Prints the table, to send back, and writes it as JSON too. Exit status: 0 when every check passed, 3
when one failed, 4 without a GPU. `--device cpu` runs the same code without a GPU; its figures say
nothing about one.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from tools.gpu.checks import CHECKS, Models, Row, Sizes
from trtspec import data_files
from trtspec.models.precision import default_dtype, dtype_name
from trtspec.report import Table, print_tables, write_atomic

FAILED, NO_GPU = 3, 4


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument(
        "--dtype", choices=["auto", "bfloat16", "float16", "float32"], default="auto"
    )
    parser.add_argument("--target", type=Path, default=data_files.kimi_nano_dir())
    parser.add_argument("--head", type=Path, default=data_files.DATA / "kimi-nano-eagle3")
    parser.add_argument(
        "--tiny", action="store_true", help="a few tokens of everything, to try the code"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu-report.json"))
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print(f"test-gpu: no GPU: {why_none()}", file=sys.stderr)
        return NO_GPU
    dtype = default_dtype(device) if options.dtype == "auto" else getattr(torch, options.dtype)
    machine = described(device, dtype)
    models = Models(
        options.target, options.head, device, dtype, Sizes.tiny() if options.tiny else Sizes()
    )
    rows: list[Row] = []
    for check in CHECKS:
        print(f"test-gpu: {check.__name__.replace('_', ' ')} ...", file=sys.stderr, flush=True)
        try:
            rows += check(models)
        except Exception as error:  # one that cannot run must not cost the others' figures
            rows.append(
                Row(
                    check.__name__.replace("_", " "),
                    "",
                    f"{type(error).__name__}: {error}",
                    "FAILED",
                )
            )
    show(machine, rows)
    ok = all(row.verdict != "FAILED" for row in rows)
    report = {"machine": machine, "ok": ok, "rows": [asdict(row) for row in rows]}
    write_atomic(options.output, json.dumps(report, indent=2) + "\n")
    print(
        f"{'all checks passed' if ok else 'A CHECK FAILED'}; "
        f"send back this table or {options.output}"
    )
    return 0 if ok else FAILED


def why_none() -> str:
    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} is built without CUDA; install a CUDA build, "
            "or use --device cpu"
        )
    return (
        f"torch {torch.__version__} for CUDA {torch.version.cuda} sees none; look at nvidia-smi, "
        "or use --device cpu"
    )


def described(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The machine and versions behind the figures."""
    found = {
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "dtype": dtype_name(dtype),
    }
    if device.type != "cuda":
        return {"device": f"{device} ({platform.machine()})", "compute capability": "none", **found}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        **found,
    }


def show(machine: dict[str, str], rows: list[Row]) -> None:
    title = ", ".join(f"{name} {value}" for name, value in machine.items())
    cells = [[row.check, row.setting, row.figure, row.verdict] for row in rows]
    columns = ["check", "setting", "figure", "verdict"]
    print_tables([Table(title, columns, cells, text_columns=frozenset({0, 1, 2, 3}))])


if __name__ == "__main__":
    sys.exit(main())
