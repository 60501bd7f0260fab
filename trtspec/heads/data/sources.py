"""Rows of prompts: jsonl, a JSON array, parquet, plain text, a directory of these, or a hub data set.

Where rows come from and where they stand; what a row means is for `prompts` to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trtspec.checkpoint.hub import HUB_ID
from trtspec.errors import MissingDependency, TrtspecError, UsageError

REMEDY = "each line: {prompt}, {messages}, {conversations}, {turns}, or one plain-text prompt"
SUFFIXES = (".jsonl", ".json", ".parquet", ".txt")
EXTRA = "pip install 'trtspec[modelopt]'"
Rows = Iterator[tuple[str, Any]]  # where a row stands, for messages; a JSON value


def rows(source: str, split: str | None = None) -> Rows:
    """Every row of a file, a directory (its files in the order of their names) or a hub data set `org/name[:config]`.

    `split` names the hub data set's split. Raises UsageError for what can not be read.
    """
    path = Path(source)
    if from_hub(source):
        yield from hub_rows(source, split)
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        if not files:
            raise UsageError(f"TS-PROMPTS-EMPTY {path} holds none of {', '.join(SUFFIXES)}", REMEDY)
        for file in files:
            yield from _file_rows(file)
    else:
        yield from _file_rows(path)


def from_hub(source: str) -> bool:
    """Whether `source` names a hub data set: not a path that exists, and written like an id."""
    return not Path(source).exists() and HUB_ID.fullmatch(source.partition(":")[0]) is not None


def _file_rows(path: Path) -> Rows:
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}", REMEDY) from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        for number, row in enumerate(_json(text, str(path)), 1):
            yield f"{path}:{number}", row
        return
    plain = path.suffix not in (".jsonl", ".json")
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, {"prompt": line} if plain else _json(line, where)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TrtspecError(f"TS-PROMPTS-ROW {where}: not JSON ({error})", REMEDY) from None


def _parquet_rows(path: Path) -> Rows:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingDependency(f"reading {path} needs pyarrow", EXTRA) from None
    try:
        file = parquet.ParquetFile(path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield f"{path}:{number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise UsageError(f"cannot read the prompts {path}: {error}", "pass a parquet file") from None


def hub_rows(name: str, split: str | None) -> Rows:
    """Streams `org/name[:config]` (or a local data set directory) with the datasets library. A row without a category
    takes the split's name."""
    try:
        import datasets
    except ImportError:
        raise MissingDependency(f"reading the hub data set {name} needs datasets", EXTRA) from None
    identifier, _, config = name.partition(":")
    wanted = split or "train"
    try:
        stream = datasets.load_dataset(identifier, config or None, split=wanted, streaming=True)
        for number, row in enumerate(stream, 1):
            yield f"{name}[{wanted}]:{number}", {"category": wanted if split else "", **row}
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"cannot read split {wanted!r} of the hub data set {name}: {error}",
            "check --split, `hf auth login` for gated data, or download it and pass the directory",
        ) from None
