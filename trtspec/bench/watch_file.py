"""The file that keeps the state of a watch between its runs: one writer at a time, replaced as a whole, and never
believed."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from trtspec import files, report
from trtspec.bench.watch import Watch
from trtspec.bench.watch_baseline import WatchBaseline
from trtspec.bench.watch_state import WatchState
from trtspec.checkpoint.writer import lock_file
from trtspec.errors import TrtspecError, UsageError

RESTART = "pass --restart to start over, or another --state"


@functools.cache
def _adapter() -> TypeAdapter[WatchState]:
    return TypeAdapter(WatchState)


def default_state(url: str, metrics_url: str) -> Path:
    """One file for each endpoint and source of its metrics, below the user's state directory."""
    place = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    watched = url if metrics_url == url else f"{url} {metrics_url}"
    return Path(place) / "trtspec" / f"watch-{hashlib.sha256(watched.encode()).hexdigest()[:16]}.json"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keeps other watches away from the state in `path`. Raises UsageError where one is there already, or where the
    file cannot be written."""
    lock = path.with_name(f"{path.name}.lock")  # the file itself is replaced each time
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--state {path} cannot be written: {reason}", "pass another --state") from None
    holder = None
    try:
        try:
            holder = lock_file(handle, lock)
        except UsageError as error:
            raise UsageError(f"{path} is in use: {error.message}", "end that watch, or pass another --state") from None
        yield
    finally:
        os.close(handle)
        if holder is not None:
            holder.release()


def open_watch(path: Path, fresh: WatchState, baseline: WatchBaseline | None, restart: bool = False) -> Watch:
    """A watch with the state in `path`, or with `fresh` where there is none. Raises UsageError for a file that is no
    state, or is of another endpoint, other metrics, other settings, another baseline or another form than `fresh`."""
    found = None if restart else _read(path, fresh)
    watch = Watch(found or fresh, fresh.settings, baseline)
    try:
        watch.summary(time.time())
    except (ArithmeticError, LookupError, ValueError) as error:
        raise _no_state(path, f"its figures contradict each other ({error})") from None
    return watch


def _read(path: Path, fresh: WatchState) -> WatchState | None:
    try:
        kept = files.read_object(path)
    except FileNotFoundError:
        return None
    except TrtspecError as error:
        raise _no_state(path, error.message) from None
    schema = kept.get("schema")
    if isinstance(schema, int) and schema != fresh.schema:
        raise UsageError(f"{path} is of another release of trtspec: schema {schema}, not {fresh.schema}", RESTART)
    try:
        json.dumps(kept, allow_nan=False)
        found = _adapter().validate_python(kept)
    except ValidationError as error:
        raise _no_state(path, files.first_fault(error)) from None
    except ValueError:
        raise _no_state(path, "it holds NaN or infinity") from None
    if found.last_batch and not {"ended", "acceptance"} <= found.last_batch.keys():
        raise _no_state(path, "last_batch has no time or no acceptance")
    if found.url != fresh.url:
        raise UsageError(f"{path} is the state of a watch of {found.url}, not of {fresh.url}", RESTART)
    if found.metrics_url != fresh.metrics_url:
        kept_at, wanted = found.metrics_url or found.url, fresh.metrics_url or fresh.url
        raise UsageError(f"{path} is the state of a watch with the metrics of {kept_at}, not of {wanted}", RESTART)
    if (found.settings, found.baseline) != (fresh.settings, fresh.baseline):
        raise UsageError(f"{path} was made with other settings or another baseline", RESTART)
    return found


def _no_state(path: Path, reason: str) -> UsageError:
    return UsageError(f"{path} is not the state of a watch: {reason}", RESTART)


def write_state(path: Path, state: WatchState) -> None:
    """Raises TrtspecError, naming the reason, where that fails; the file is then what it was."""
    try:
        report.write_json(path, asdict(state))
    except OSError as error:
        raise TrtspecError(
            f"{path} cannot be written: {error.strerror or error}; what was learned since is not kept",
            "make room for it, or pass another --state",
        ) from None
