"""The Python code that a checkpoint brings, for engines that run it.

Transformers imports the files that `auto_map` names in a configuration file. These can import other
files beside them. TensorRT-LLM loads a head's config.json with `trust_remote_code=True`, so the
code of a head counts as well.
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

# Of model, tokenizer, processors and generation. Transformers may take config.4.0.0.json too.
CONFIGS = "*config*.json"


@dataclass(frozen=True)
class RemoteCode:
    """References of the configuration files. `directory` is None if the files are not here."""

    references: list[CodeReference]
    problems: list[Problem]
    directory: Path | None

    def __bool__(self) -> bool:
        return bool(self.references or self.problems)

    def hashes(self) -> dict[str, str]:
        """SHA-256 of every Python file in the directory, by path. {} if there is no code."""
        if self.directory is None or not self:
            return {}
        hashes = {}
        for path in _python_files(self.directory):
            hashes[path.relative_to(self.directory).as_posix()] = file_sha256(path)
        return hashes

    def listed(self) -> str:
        """The files with their hashes, or only the names of referenced files if none are here."""
        hashed = [f"{name} sha256:{digest}" for name, digest in self.hashes().items()]
        if hashed:
            return "; ".join(hashed)
        named = ", ".join(sorted({reference.module for reference in self.references}))
        return f"{named}, not here to hash"


def read_code(directory: Path) -> RemoteCode:
    """Reads every configuration file of a checkpoint.

    Raises TrtspecError for a file that is not a JSON object.
    """
    paths = sorted(directory.glob(CONFIGS))
    return code_of({path.name: read_json(path) for path in paths}, directory)


def code_of(configs: Mapping[str, Any], directory: Path | None) -> RemoteCode:
    """Resolves the references of configuration files, given by file name."""
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
    """Yields an error for each absent referenced file, and for each link out of the checkpoint."""
    # The first reference to a module names it.
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
    return sorted(path for path in directory.rglob("*.py") if path.is_file())
