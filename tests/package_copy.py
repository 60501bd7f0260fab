"""A copy of the package, for tests that add to it: files changed, and the copy's answers."""

import filecmp
import os
import shutil
import sys
from pathlib import Path

from tests.command_line import ran

PACKAGE = Path(__file__).resolve().parents[1] / "trtspec"


def copy_package(directory: Path) -> Path:
    """Without the shipped weights, which no such test reads."""
    leave_out = shutil.ignore_patterns("__pycache__", "*.safetensors")
    return Path(shutil.copytree(PACKAGE, directory / "trtspec", ignore=leave_out))


def touched(copy: Path) -> list[str]:
    """Files of the copy that are new or differ."""
    files = [
        path.relative_to(copy)
        for path in copy.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    same = [
        (PACKAGE / file).is_file() and filecmp.cmp(copy / file, PACKAGE / file, shallow=False)
        for file in files
    ]
    return sorted(str(file) for file, alike in zip(files, same, strict=True) if not alike)


def run_copy(copy: Path, *words: object, status: int = 0, given: str = "") -> str:
    """Output of `python WORDS` where `trtspec` is the copy and `given` is stdin."""
    environment = os.environ | {
        "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = ran(sys.executable, *words, input=given, env=environment, cwd=copy.parent)
    assert done.status == status, done
    return done.stdout + (done.stderr if status else "")
