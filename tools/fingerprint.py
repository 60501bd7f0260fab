"""Whether two states of the package behave alike: prints each row of a corpus that differs.

    python tools/fingerprint.py BEFORE AFTER [--whole] [--only AREA] [-o DIR] [--inputs DIR]

BEFORE and AFTER are checkouts (directories with trtspec/ in them) or git revisions. The corpus is
run with each. A row is a file that a command wrote, or what a command answered. Exit status: 0 all
rows equal, 1 some differ or the corpus did not run, 2 usage. The two sides run beside each other,
on one core each. tools/fingerprint_inputs.py makes the inputs, once for both.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(HERE / "tools"))

from fingerprint_rows import AREAS, FAILED  # noqa: E402

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
}
# in paths the numbers, of one length, so that no table wraps elsewhere
SIDES = {"before": 1, "after": 2}
Rows = dict[str, dict[str, str]]


def main() -> int:
    options = arguments()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as temporary:
        room = Path(temporary)
        checkouts = {
            side: checkout(getattr(options, side), room / f"code-{number}")
            for side, number in SIDES.items()
        }
        inputs = make_inputs(options.inputs or room / "inputs", options.whole)
        untouched = listing(inputs)
        rows = run_sides(checkouts, inputs, room / "work", options)
        if listing(inputs) != untouched:
            sys.exit(
                "fingerprint: a command wrote into the inputs, "
                "so the two sides did not read the same"
            )
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        for side, found in rows.items():
            (options.output / f"{side}.json").write_text(
                json.dumps(found, indent=1, sort_keys=True)
            )
    status = compare(rows["before"], rows["after"], options.only or list(AREAS))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{time.monotonic() - begin:.0f} s, "
        f"of which {used.ru_utime + used.ru_stime:.0f} s of CPU for inputs and sides"
    )
    return status


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="checkout or git revision")
    parser.add_argument("after", help="checkout or git revision")
    parser.add_argument(
        "--whole", action="store_true", help="the long form: every kind, full-size layers, servers"
    )
    parser.add_argument(
        "--only", action="append", choices=list(AREAS), help="this area alone; repeatable"
    )
    parser.add_argument("-o", "--output", type=Path, help="keep each side's rows here, as JSON")
    parser.add_argument(
        "--inputs", type=Path, help="keep the inputs here; used again where they are complete"
    )
    return parser.parse_args()


def checkout(name: str, room: Path) -> Path:
    """The directory itself, or the revision's files in a place of their own."""
    if (Path(name) / "trtspec").is_dir():
        return Path(name).resolve()
    room.mkdir()
    archive = subprocess.run(["git", "-C", HERE, "archive", name, "trtspec"], capture_output=True)
    if archive.returncode:
        sys.exit(
            f"fingerprint: {name} is neither a checkout nor a revision with trtspec/: "
            f"{archive.stderr.decode()}"
        )
    subprocess.run(["tar", "-x", "-C", room], input=archive.stdout, check=True)
    return room


def make_inputs(place: Path, whole: bool) -> Path:
    """Complete inputs of the same form are used again."""
    place, done = place.resolve(), f"whole: {whole}\n"
    if (place / "complete").is_file() and (place / "complete").read_text() == done:
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    maker = [sys.executable, f"{HERE}/tools/fingerprint_inputs.py", place, *["--whole"] * whole]
    subprocess.run(maker, check=True, env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(HERE)})
    (place / "complete").write_text(done)
    return place


def listing(place: Path) -> list[tuple[str, int, int]]:
    files = [path for path in place.rglob("*") if path.is_file()]
    return sorted((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


def run_sides(
    checkouts: dict[str, Path], inputs: Path, room: Path, options: argparse.Namespace
) -> dict[str, Rows]:
    cores = sorted(os.sched_getaffinity(0))
    form = "whole" if options.whole else "short"
    inherited = {name: os.environ[name] for name in os.environ if not name.startswith("TRTSPEC_")}
    running = {}
    for side, package in checkouts.items():
        work = room / f"side-{SIDES[side]}"
        work.mkdir(parents=True)
        cache = {"XDG_CACHE_HOME": f"{work}/cache", "MPLCONFIGDIR": f"{work}/cache"}
        environment = {**inherited, **ENVIRONMENT, "PYTHONPATH": str(package), **cache}
        core = str(cores[SIDES[side] % len(cores)])
        script = f"{HERE}/tools/fingerprint_rows.py"
        line = [sys.executable, script, package, inputs, work, core, form, *(options.only or AREAS)]
        running[side] = subprocess.Popen(line, env=environment, cwd=work)
    failed = [side for side, process in running.items() if process.wait() != 0]
    if failed:
        sys.exit(f"fingerprint: the side {' and '.join(failed)} did not run to its end")
    return {
        side: json.loads((room / f"side-{number}" / "rows.json").read_text())
        for side, number in SIDES.items()
    }


def compare(before: Rows, after: Rows, areas: list[str]) -> int:
    """Prints the differences and each area's counts; 1 if rows differ or an area is empty."""
    status, table = 0, []
    for area in areas:
        one, other = before[area], after[area]
        names = [*one, *(name for name in other if name not in one)]
        differing = [name for name in names if one.get(name) != other.get(name)]
        for name in differing:
            print(f"{area} {name}: {shown(one.get(name), other.get(name))}")
        for side, rows in (("before", one), ("after", other)):
            if (
                not rows
                or all(FAILED.match(value) for value in rows.values())
                and area != "refusals"
            ):
                print(
                    f"{area}: {'no row' if not rows else 'nothing but failures'} {side}; "
                    "this compares nothing"
                )
                status = 1
        failures = sum(bool(FAILED.match(value)) for value in one.values())
        crashes = [name for name, value in one.items() if value.startswith("crashed")]
        if crashes:
            print(f"{area}: crashes before, too: {', '.join(crashes)}")
        table.append((area, len(names) - len(differing), len(differing), failures, len(crashes)))
        status = 1 if differing else status
    print(
        f"{'area':14} {'equal':>6} {'differ':>6} {'failed':>6} {'crashed':>7}   "
        "(failed and crashed: rows of BEFORE)"
    )
    for row in [*table, ("all", *(sum(column) for column in list(zip(*table, strict=True))[1:]))]:
        print(f"{row[0]:14} {row[1]:6} {row[2]:6} {row[3]:6} {row[4]:7}")
    return status


def shown(one: str | None, other: str | None) -> str:
    """The first line in which the two values differ."""
    if one is None or other is None:
        return f"only {'after' if one is None else 'before'}"
    ones, others = one.splitlines(), other.splitlines()
    at = next(
        (n for n, pair in enumerate(zip(ones, others, strict=False)) if pair[0] != pair[1]),
        min(len(ones), len(others)),
    )
    first, second = (
        (lines[at].strip() if at < len(lines) else "nothing more") for lines in (ones, others)
    )
    begin = max(0, len(os.path.commonprefix([first, second])) - 40)
    cut = [("…" if begin else "") + text[begin : begin + 120] for text in (first, second)]
    return f"{cut[0]}  ->  {cut[1]}" + (
        f"  (line {at + 1})" if max(len(ones), len(others)) > 1 else ""
    )


if __name__ == "__main__":
    sys.exit(main())
