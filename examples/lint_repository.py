"""Judges every engine YAML of a directory against a TensorRT-LLM release.

The exit status is 3 if one has an error.

python examples/lint_repository.py configs 1.4.0rc1
"""

import sys
from pathlib import Path

import trtspec


def main(directory: str, release: str) -> int:
    files = sorted(Path(directory).glob("*.yml"))
    refused = 0
    for file in files:
        report = trtspec.lint(file, trtllm_version=release)
        for problem in report.problems:
            print(f"{problem.where}: {problem.severity} {problem.code} {problem.message}")
        refused += not report.ok
    print(f"{len(files)} files, {refused} with an error at {release}")
    return 3 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
