"""Finds the Python code that a checkpoint brings for engines that run it.

Transformers imports the files that `auto_map` names in a configuration file. These can import other
files of the checkpoint. TensorRT-LLM loads a head's config.json with `trust_remote_code=True`, so
the code of a head matters too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoint.headers import read_json
from trtspec.errors import Problem, TrtspecError
from trtspec.foreign import CodeReference, code_reference, named_code, stays_inside
from trtspec.report import file_sha256

# Matches the configs of model, tokenizer, processors and generation, and versioned configs such as
# config.4.0.0.json, which transformers may prefer.
CONFIGS = "*config*.json"


@dataclass(frozen=True)
class RemoteCode:
    """Python code that the configuration files of a checkpoint refer to.

    references: references to classes in modules of the checkpoint.
    problems: errors of the references and of the files.
    directory: directory of the checkpoint. None if its files are not on this machine.
    """

    references: list[CodeReference]
    problems: list[Problem]
    directory: Path | None

    def __bool__(self) -> bool:
        return bool(self.references or self.problems)

    def hashes(self) -> dict[str, str]:
        """Returns the SHA-256 of every Python file of the checkpoint, by path in the directory.

        {} if no configuration file refers to code, or if the files are not on this machine.
        """
        if self.directory is None or not self:
            return {}
        hashes = {}
        for path in _python_files(self.directory):
            hashes[path.relative_to(self.directory).as_posix()] = file_sha256(path)
        return hashes

    def listed(self) -> str:
        """Returns the files with their hashes as text, or the names of missing modules."""
        hashed = [f"{name} sha256:{digest}" for name, digest in self.hashes().items()]
        if hashed:
            return "; ".join(hashed)
        named = ", ".join(sorted({reference.module for reference in self.references}))
        return f"{named}, not here to hash"


def read_code(directory: Path) -> RemoteCode:
    """Reads every configuration file of a checkpoint and returns the code that they refer to.

    Raises TrtspecError if a configuration file is not a JSON object.
    """
    paths = sorted(directory.glob(CONFIGS))
    return code_of({path.name: read_json(path) for path in paths}, directory)


def code_of(configs: Mapping[str, Any], directory: Path | None) -> RemoteCode:
    """Returns the code that configuration files refer to.

    Args:
        configs: contents of the configuration files by file name.
        directory: directory of the checkpoint. None if its files are not on this machine.
    """
    references = []
    problems = []
    for file, config in configs.items():
        for where, value in named_code(config, file):
            try:
                references.append(code_reference(value, where))
            except TrtspecError as error:
                problem = Problem(error.code, "error", where, error.message, error.remedy)
                problems.append(problem)
    if directory is not None and references:
        problems += _file_problems(references, directory)
    return RemoteCode(references, problems, directory)


def _file_problems(references: list[CodeReference], directory: Path) -> Iterator[Problem]:
    """Yields an error for each missing module, and for each Python file that links elsewhere."""
    # reversed, so that the first reference to a module is the one that remains
    first_places = {item.module: item.where for item in reversed(references)}
    for module, where in first_places.items():
        if not (directory / module).is_file():
            message = f"it refers to {module}, which is not in the checkpoint"
            yield Problem("TS-CODE-ABSENT", "error", where, message)
    for path in _python_files(directory):
        if not stays_inside(path, directory):
            name = path.relative_to(directory).as_posix()
            message = f"{name} is a link to a file outside the checkpoint"
            yield Problem("TS-CODE-LINK", "error", name, message)


def _python_files(directory: Path) -> list[Path]:
    """Returns the paths of all Python files of the checkpoint, sorted."""
    return sorted(path for path in directory.rglob("*.py") if path.is_file())
