"""Finds targets and heads by the name that a user gives: a directory or a hub id.

Returns the directory, or what is known about the id without one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trtspec.checkpoint.headers import HF_QUANT_NAME, Checkpoint, read_config, weight_map
from trtspec.checkpoint.published import PublishedHead, PublishedTarget, known, published_as
from trtspec.checkpoint.remote import (
    CHECKPOINT_PATTERNS,
    METADATA_PATTERNS,
    cache_directory,
    download,
    open_remote,
)
from trtspec.checkpoint.remote_code import RemoteCode, code_of, read_code
from trtspec.data_files import DATA
from trtspec.errors import Problem, TrtspecError, UsageError, nearest
from trtspec.files import beside
from trtspec.foreign import HUB_NAME, HUB_PAGE, HubId, parse_hub_id, user_path, what_is
from trtspec.specs import HeadSpec, ModelSpec

if TYPE_CHECKING:
    from trtspec.checkpoint.target_problems import ReadTarget


SHIPPED = ("kimi-nano", "kimi-nano-eagle3")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")
WHOLE_COMMIT = re.compile(r"[0-9a-f]{40}")


def find(name_or_path: str) -> Resolved:
    """A checkpoint if all of it is here, else its name alone. Fetches nothing."""
    hub_id, record = hub_id_and_record(name_or_path)
    path = cached_snapshot(hub_id, complete=True) if hub_id else local_directory(name_or_path)
    return Resolved(name_or_path, path, hub_id, record)


def resolve(name_or_path: str, *, weights: bool = True) -> Resolved:
    """Finds a checkpoint.

    A directory is taken as it is, a hub id from the hub's cache if all of it is there. Otherwise
    `weights` fetches it. Without `weights` the record of a published id answers. For an id that is
    not listed there, the two config files answer, which are fetched if need be.
    """
    hub_id, record = hub_id_and_record(name_or_path)
    if hub_id is None:
        return Resolved(name_or_path, local_directory(name_or_path), None, None)
    cached = cached_snapshot(hub_id, complete=weights or record is not None)
    if cached is None and (weights or record is None):
        cached = download(hub_id, CHECKPOINT_PATTERNS if weights else METADATA_PATTERNS)
    return Resolved(name_or_path, cached, hub_id, record)


@dataclass(frozen=True)
class Resolved:
    """A checkpoint by name. `path` is None if only its id is known. `known`: its record."""

    name: str
    path: Path | None
    hub_id: HubId | None
    known: PublishedTarget | PublishedHead | None

    @property
    def kind(self) -> str:
        """`target` or `head`."""
        from trtspec.checkpoint.target_problems import config_kind

        if self.known:
            return self.known.kind
        return config_kind(self.config(), self.name)

    @property
    def weights(self) -> Path | None:
        """The directory, if its tensors are in it."""
        if self.path is not None and any(self.path.glob("*.safetensors")):
            return self.path
        return None

    @property
    def directory(self) -> Path:
        """The directory whose tensors are to be read.

        Raises UsageError if they are not on this machine.
        """
        if self.path is None or (self.hub_id and self.weights is None):
            raise UsageError(f"the weights of {self.name} are not on this machine", self.fetch)
        return self.path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint by its headers, which are read once: of the directory, else on the hub.

        Raises TrtspecError for files that are not whole.
        """
        if self.hub_id is not None and self.weights is None:
            return open_remote(self.hub_id)
        assert self.path is not None
        return Checkpoint.open(self.path)

    @cached_property
    def target(self) -> ReadTarget:
        """The target that the headers show, judged once."""
        from trtspec.checkpoint.target_problems import read_target

        return read_target(self.checkpoint)

    @property
    def fetch(self) -> str:
        """The remedy if its files are needed and are not here."""
        if self.hub_id is None:
            return "pass the directory that holds its weights"
        return f"run `{self.hub_id.download}`"

    def config(self) -> dict[str, Any]:
        """config.json of the directory, else of the record. Raises TrtspecError without both."""
        if self.path is not None:
            return read_config(self.path / "config.json")
        config = self.known.config if self.known else None
        if config is None:
            raise TrtspecError(f"the config of {self.name} is not known offline", self.fetch)
        return config

    def target_spec(self) -> ModelSpec:
        quant = None
        if self.path:
            quant_path = self.path / HF_QUANT_NAME
            if quant_path.is_file():
                quant = read_config(quant_path)
        return ModelSpec.from_config(self.config(), quant, remote_code=bool(self.code()))

    def code(self) -> RemoteCode:
        """The code that it brings: of a directory, else the files that config.json refers to."""
        if self.path is not None:
            return read_code(self.path)
        return code_of({"config.json": self.config()}, None)

    def head_spec(self, *, values: bool = False) -> HeadSpec:
        """Reads a head from its tensors if they are here, else from the known config.

        `values`: also check a sample of the weights.
        """
        from trtspec.checkpoint.heads.dialects import DIALECTS
        from trtspec.checkpoint.heads.read import head_spec, head_spec_from_config

        if self.weights is not None:
            return head_spec(self.checkpoint, values=values)
        if isinstance(self.known, PublishedHead):
            dialect = DIALECTS[self.known.dialect]
            return head_spec_from_config(self.config(), dialect=dialect, owns=self.known.owns)
        return head_spec_from_config(self.config())


def local_directory(name: str) -> Path | None:
    """The directory called `name`, else the directory of the shipped model called so, else None."""
    path = user_path(name)
    if name and path.is_dir():
        return path
    return DATA / name if name in SHIPPED else None


def named_hub_id(name: str) -> HubId | None:
    """The hub id that `name` is. None for a directory and for any other text."""
    return parse_hub_id(name) if local_directory(name) is None else None


def hub_id_and_record(
    name_or_path: str,
) -> tuple[HubId | None, PublishedTarget | PublishedHead | None]:
    """The hub id and its record, or (None, None) for a directory. Else raises UsageError."""
    if local_directory(name_or_path):
        return None, None
    hub_id = parse_hub_id(name_or_path)
    if hub_id is None or Path(name_or_path).exists():
        raise _not_a_checkpoint(name_or_path)
    record = known(name_or_path)
    return _published(hub_id, record), record


def _not_a_checkpoint(name: str) -> UsageError:
    """The error for a name that is neither a directory nor a hub id, by what the name is."""
    what = what_is(name)
    path = user_path(name)
    near = nearest(name, SHIPPED) or beside(path) or published_as(name)
    remedy = "pass a directory, an id such as org/name, or kimi-nano (head: kimi-nano-eagle3)"
    page = HUB_PAGE.fullmatch(name)
    if page:
        remedy = f"write the id, {page[1]}"
    elif what == "an engine YAML":
        remedy = f"check it with `trtspec lint {name}`"
    elif path.suffix == ".jsonl":
        remedy = "the target comes first, its data second"
    elif what == "a URL":
        remedy += f"; a server is asked by `trtspec bench {name}`"
    elif (path.parent / "config.json").is_file():
        remedy = f"pass its directory, {path.parent}"
    elif what == "not there":
        if near:
            remedy = f"did you mean {near}? Else {remedy}"
        remedy += "; where a job makes it later, build-config takes `like`"
        return UsageError(f"{name!r} is neither a directory nor a hub id", remedy)
    return UsageError(f"{name} is {what}, not a checkpoint directory", remedy)


def _published(hub_id: HubId, record: PublishedTarget | PublishedHead | None) -> HubId:
    """The id as its publisher writes it."""
    return hub_id if record is None else replace(hub_id, name=record.id)


def cached_snapshot(hub_id: HubId, complete: bool) -> Path | None:
    """The snapshot in the hub cache. With `complete`, only one that has every shard of its index.

    Reads the cache's documented layout itself (models--org--name/refs/main names the snapshot).
    Importing huggingface_hub takes longer than everything else that torch-free commands do.
    """
    repository = cache_directory() / hub_id.folder
    snapshot = _snapshot(repository, hub_id.revision or "main")
    if snapshot is None or not (snapshot / "config.json").is_file():
        return None
    return snapshot if not complete or _has_all_shards(snapshot) else None


def _snapshot(repository: Path, revision: str) -> Path | None:
    """The snapshot of a branch or tag, which refs/ has, or of a commit by its first digits."""
    snapshots = repository / "snapshots"
    try:
        commit = (repository / "refs" / revision).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        if not SHORT_COMMIT.fullmatch(revision):
            return None
        commits = [path.name for path in snapshots.glob(f"{revision}*")]
        if len(commits) != 1:
            return None
        commit = commits[0]
    return snapshots / commit if re.fullmatch(r"\w+", commit) else None


def _has_all_shards(snapshot: Path) -> bool:
    """Whether every shard of the index is there. Without an index, whether there is any shard."""
    shards = weight_map(snapshot)
    if shards is None:
        return any(snapshot.glob("*.safetensors"))
    return all((snapshot / shard).exists() for shard in set(shards.values()))


def canonical_id(name: str) -> HubId | str:
    """The hub's own id of a checkpoint, with its commit if the cache tells it, or a directory.

    Two names of one directory, one shipped model or one commit of a repository have the same.
    """
    hub_id = named_hub_id(name)
    if hub_id is None:
        return snapshot_id(Path(name)) or engine_name(name)
    hub_id = _published(hub_id, known(name))
    if hub_id.revision:
        snapshot = cached_snapshot(hub_id, complete=False)
        if snapshot is not None:
            hub_id = replace(hub_id, revision=snapshot.name)
    return hub_id


def snapshot_id(directory: Path) -> HubId | None:
    """The id of a snapshot in a hub cache (models--org--name/snapshots/COMMIT), else None."""
    path = directory.resolve()
    folder = path.parent.parent.name
    name = folder.removeprefix("models--").replace("--", "/", 1)
    if path.parent.name != "snapshots" or not HUB_NAME.fullmatch(name):
        return None
    return HubId(name, path.name) if folder.startswith("models--") else None


def source_name(directory: Path) -> str:
    """The name of a source in files: its hub id if it is a hub's snapshot, else its directory's."""
    hub_id = snapshot_id(directory)
    return hub_id.name if hub_id is not None else directory.resolve().name


def commit_record(directory: Path) -> dict[str, str]:
    """Repository and commit of a hub's snapshot for journals and provenance.json, else {}."""
    hub_id = snapshot_id(directory)
    if hub_id is None:
        return {}
    return {"hub_id": hub_id.name, "commit": str(hub_id.revision)}


class Target(NamedTuple):
    resolved: Resolved
    spec: ModelSpec


class Head(NamedTuple):
    resolved: Resolved
    spec: HeadSpec


def find_target(name: str, like: str | None = None) -> Target:
    """Returns the target called `name` with its spec.

    While it is not here, it is described by the published checkpoint `like`. Raises UsageError if
    the name is a draft head's or unknown.
    """
    described_by = name
    absent = like is not None and not user_path(name).exists()
    if like is not None and absent:
        described_by = like
    resolved = resolve(described_by, weights=False)
    if resolved.kind != "target":
        message = f"{resolved.name} is a draft head, not a target"
        raise UsageError(message, "pass the target first and the head with `head`")
    if absent:
        resolved = replace(resolved, name=name, path=None)
    return Target(resolved, resolved.target_spec())


def find_head(name: str) -> Resolved:
    """Returns the Eagle3 head called `name`, unread. Raises UsageError if it is something else."""
    resolved = resolve(name, weights=False)
    if resolved.kind != "head":
        wrong = _no_head(resolved)
        raise UsageError(f"{resolved.name}: {wrong.message} [{wrong.code}]", wrong.remedy)
    return resolved


def load_head(name: str, *, values: bool = False) -> Head:
    """Finds and reads an Eagle3 head.

    `values`: also check a sample of its weights. Raises TrtspecError if the head has errors.
    """
    resolved = find_head(name)
    return Head(resolved, resolved.head_spec(values=values))


def _no_head(resolved: Resolved) -> Problem:
    """The problem of a checkpoint that is not an Eagle3 head, by its tensors or else its config."""
    from trtspec.checkpoint.heads.read import no_eagle3_head
    from trtspec.checkpoint.target_tensors import finding

    remedy = "pass the target first and an Eagle3 head with `head`"
    whole = finding("TS-HEAD-FULL-MODEL", "config.json", remedy=remedy)
    if resolved.weights is None:
        return whole
    checkpoint = resolved.checkpoint
    return no_eagle3_head(checkpoint.config, checkpoint.tensors) or whole


def findable(name: str) -> bool:
    """Whether a checkpoint can be read here: a directory, a published id, or a cached id.

    Raises TrtspecError for a model that is known and refused.
    """
    try:
        if local_directory(name) is not None:
            return True
        hub_id = parse_hub_id(name)
        here = hub_id is not None and cached_snapshot(hub_id, complete=False) is not None
    except OSError:  # longer than any path
        return False
    return here or known(name) is not None


def engine_name(name: str) -> str:
    """The name that an engine gets for a checkpoint.

    It is the directory of a shipped model, an id without its revision, else the name itself.
    """
    directory = local_directory(name)
    if directory is not None:
        return name if user_path(name).is_dir() else str(directory)
    hub_id = parse_hub_id(name)
    return name if hub_id is None else hub_id.name


def engine_revision(name: str) -> str | None:
    """The revision that an engine gets beside `engine_name`."""
    hub_id = named_hub_id(name)
    return None if hub_id is None else hub_id.revision


def engine_path(name: str, cache: str | None = None) -> str:
    """The name for an engine that takes no revision: the snapshot's directory, else `engine_name`.

    `cache`: the hub cache of the machine that serves. None: of this one. Raises UsageError if the
    directory is not here, or if the revision does not name it.
    """
    hub_id = named_hub_id(name)
    if hub_id is None or hub_id.revision is None:
        return engine_name(name)
    if cache is not None and not WHOLE_COMMIT.fullmatch(hub_id.revision):
        reason = "is not a whole commit, which names the directory that the engine reads"
        message = f"{hub_id.revision} {reason}"
        raise UsageError(message, f"write {hub_id.name}@ and the 40 digits of the commit")
    if cache is not None:
        return f"{cache}/{hub_id.folder}/snapshots/{hub_id.revision}"
    snapshot = cached_snapshot(hub_id, complete=False)
    if snapshot is None:
        reason = "the engine takes a revision only as its directory there"
        message = f"{hub_id} is not in the hub cache, and {reason}"
        raise UsageError(message, f"run `{hub_id.download}`")
    return str(snapshot)
