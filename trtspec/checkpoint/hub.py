"""Finds targets and heads by the name that a user gives, a directory or a hub id.

Each lookup returns the directory, or the facts that are known about a hub id without its files.
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


# models that are part of the package, by the names of their folders
SHIPPED = ("kimi-nano", "kimi-nano-eagle3")
SHORT_COMMIT = re.compile(r"[0-9a-f]{7,40}")
WHOLE_COMMIT = re.compile(r"[0-9a-f]{40}")


def find(name_or_path: str) -> Resolved:
    """Finds a checkpoint on this machine and fetches nothing.

    The result has no path if files of a hub id are missing.
    """
    hub_id, record = hub_id_and_record(name_or_path)
    path = cached_snapshot(hub_id, complete=True) if hub_id else local_directory(name_or_path)
    return Resolved(name_or_path, path, hub_id, record)


def resolve(name_or_path: str, *, weights: bool = True) -> Resolved:
    """Finds a checkpoint and fetches the files that are needed.

    A directory is used as it is. A hub id is answered from the hub's cache if all needed files are
    cached.

    `weights`: whether the weights are needed. If they are not, the record of a published id is
    enough, and other ids need only the two config files.
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
    """Checkpoint that was found by name.

    name: name that the user gave.
    path: directory of the checkpoint. None if its files are not on this machine.
    hub_id: hub id. None for a directory.
    known: record of a published checkpoint. None if the id is not listed.
    """

    name: str
    path: Path | None
    hub_id: HubId | None
    known: PublishedTarget | PublishedHead | None

    @property
    def kind(self) -> str:
        """Type of the checkpoint, `target` or `head`."""
        from trtspec.checkpoint.target_problems import config_kind

        if self.known:
            return self.known.kind
        return config_kind(self.config(), self.name)

    @property
    def weights(self) -> Path | None:
        """Directory of the weights. None if the weights are not on this machine."""
        if self.path is not None and any(self.path.glob("*.safetensors")):
            return self.path
        return None

    @property
    def directory(self) -> Path:
        """Directory whose weights are to be read.

        Raises UsageError if the weights are not on this machine.
        """
        if self.path is None or (self.hub_id and self.weights is None):
            raise UsageError(f"the weights of {self.name} are not on this machine", self.fetch)
        return self.path

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """Checkpoint, opened once by its headers.

        The headers come from the directory, or from the hub if the weights are not on this machine.
        Raises TrtspecError if files are missing or damaged.
        """
        if self.hub_id is not None and self.weights is None:
            return open_remote(self.hub_id)
        assert self.path is not None
        return Checkpoint.open(self.path)

    @cached_property
    def target(self) -> ReadTarget:
        """Target as its headers show it, with its problems. Read once."""
        from trtspec.checkpoint.target_problems import read_target

        return read_target(self.checkpoint)

    @property
    def fetch(self) -> str:
        """Remedy for a command that needs files that are not on this machine."""
        if self.hub_id is None:
            return "pass the directory that holds its weights"
        return f"run `{self.hub_id.download}`"

    def config(self) -> dict[str, Any]:
        """Reads config.json from the directory, or returns it from the published record.

        Raises TrtspecError if neither has it.
        """
        if self.path is not None:
            return read_config(self.path / "config.json")
        config = self.known.config if self.known else None
        if config is None:
            raise TrtspecError(f"the config of {self.name} is not known offline", self.fetch)
        return config

    def target_spec(self) -> ModelSpec:
        """Reads the target's record from its configuration files, without its tensors."""
        quant = None
        if self.path:
            quant_path = self.path / HF_QUANT_NAME
            if quant_path.is_file():
                quant = read_config(quant_path)
        return ModelSpec.from_config(self.config(), quant, remote_code=bool(self.code()))

    def code(self) -> RemoteCode:
        """Returns the Python code that the checkpoint brings.

        Without a directory it is only the references in config.json.
        """
        if self.path is not None:
            return read_code(self.path)
        return code_of({"config.json": self.config()}, None)

    def head_spec(self, *, values: bool = False) -> HeadSpec:
        """Returns the head's record, from its tensors if the weights are on this machine.

        Otherwise the record comes from config.json alone. Raises TrtspecError if the head has
        errors.

        `values`: whether a sample of the weights is checked too.
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
    """Returns the directory called `name`, or the folder of the shipped model with this name.

    None if neither exists.
    """
    path = user_path(name)
    if name and path.is_dir():
        return path
    return DATA / name if name in SHIPPED else None


def named_hub_id(name: str) -> HubId | None:
    """Returns the hub id that `name` is. None for a directory and for any other text."""
    return parse_hub_id(name) if local_directory(name) is None else None


def hub_id_and_record(
    name_or_path: str,
) -> tuple[HubId | None, PublishedTarget | PublishedHead | None]:
    """Returns the hub id and its published record, which is None for an unlisted id.

    (None, None) for a directory. Raises UsageError if the name is neither a directory nor a hub id.
    """
    if local_directory(name_or_path):
        return None, None
    hub_id = parse_hub_id(name_or_path)
    if hub_id is None or Path(name_or_path).exists():
        raise _not_a_checkpoint(name_or_path)
    record = known(name_or_path)
    return _published(hub_id, record), record


def _not_a_checkpoint(name: str) -> UsageError:
    """Returns the error for a name that is neither a directory nor a hub id.

    The remedy depends on what the name looks like.
    """
    what = what_is(name)
    path = user_path(name)
    near = nearest(name, SHIPPED) or beside(path) or published_as(name)
    remedy = "pass a directory, an id such as org/name, or kimi-nano (head: kimi-nano-eagle3)"
    page = HUB_PAGE.fullmatch(name)
    if page:
        remedy = f"write the id, {page[1]}"
    elif what == "an engine YAML":
        remedy = f"check it with `trtspec lint {name}`"
    elif what == "a URL":
        remedy += f"; a server is asked by `trtspec bench {name}`"
    elif (path.parent / "config.json").is_file():
        remedy = f"pass its directory, {path.parent}"
    elif what == "not there":
        if near:
            remedy = f"did you mean {near}? Else {remedy}"
        remedy += "; if a job creates it later, pass `like` to build-config"
        return UsageError(f"{name!r} is neither a directory nor a hub id", remedy)
    elif path.suffix == ".jsonl":
        remedy = "pass the target first and its data second"
    return UsageError(f"{name} is {what}, not a checkpoint directory", remedy)


def _published(hub_id: HubId, record: PublishedTarget | PublishedHead | None) -> HubId:
    """Returns the id as its publisher spells it. `record` is None for an unlisted id."""
    return hub_id if record is None else replace(hub_id, name=record.id)


def cached_snapshot(hub_id: HubId, complete: bool) -> Path | None:
    """Returns the directory of the id's snapshot in the hub cache. None if it is not cached.

    `complete`: whether the snapshot must have every shard of its index.
    """
    # The cache's documented layout is read here (models--org--name/refs/main names the snapshot),
    # because importing huggingface_hub takes longer than a command that does not load torch.
    repository = cache_directory() / hub_id.folder
    snapshot = _snapshot(repository, hub_id.revision or "main")
    if snapshot is None or not (snapshot / "config.json").is_file():
        return None
    return snapshot if not complete or _has_all_shards(snapshot) else None


def _snapshot(repository: Path, revision: str) -> Path | None:
    """Returns the snapshot of a branch, a tag or a commit. None if it is not cached.

    refs/ names the commit of a branch or tag. The first digits of a commit are enough if they are
    unique.
    """
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
    # Any other text could lead out of the folder.
    return snapshots / commit if re.fullmatch(r"\w+", commit) else None


def _has_all_shards(snapshot: Path) -> bool:
    """Whether every shard of the index is present. Without an index, any shard is enough."""
    shards = weight_map(snapshot)
    if shards is None:
        return any(snapshot.glob("*.safetensors"))
    return all((snapshot / shard).exists() for shard in set(shards.values()))


def canonical_id(name: str) -> HubId | str:
    """Returns an id by which two names of a checkpoint can be compared.

    It is the hub id as its publisher spells it, with the commit of its revision if the cache tells
    it. An id without a revision gets no commit. For a directory that is not a snapshot of the hub,
    it is `engine_name`.
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
    """Returns the hub id of a snapshot in a hub cache. None for any other directory.

    The path of a snapshot is models--org--name/snapshots/COMMIT.
    """
    path = directory.resolve()
    folder = path.parent.parent.name
    name = folder.removeprefix("models--").replace("--", "/", 1)
    if path.parent.name != "snapshots" or not HUB_NAME.fullmatch(name):
        return None
    return HubId(name, path.name) if folder.startswith("models--") else None


def source_name(directory: Path) -> str:
    """Returns the name of a source for files that record it.

    It is the hub id for a snapshot of the hub, and otherwise the name of the directory.
    """
    hub_id = snapshot_id(directory)
    return hub_id.name if hub_id is not None else directory.resolve().name


def commit_record(directory: Path) -> dict[str, str]:
    """Returns repository and commit of a snapshot of the hub, for journals and provenance.json.

    {} for any other directory.
    """
    hub_id = snapshot_id(directory)
    if hub_id is None:
        return {}
    return {"hub_id": hub_id.name, "commit": str(hub_id.revision)}


class Target(NamedTuple):
    """Target that was found by name, with its record."""

    resolved: Resolved
    spec: ModelSpec


class Head(NamedTuple):
    """Eagle3 head that was found by name, with its record."""

    resolved: Resolved
    spec: HeadSpec


def find_target(name: str, like: str | None = None) -> Target:
    """Returns the target called `name` with its record.

    Raises UsageError if the name is unknown or a draft head's.

    `like`: published checkpoint that describes the target if `name` does not exist yet.
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
    """Returns the Eagle3 head called `name` without reading its tensors.

    Raises UsageError if the name is not a head's.
    """
    resolved = resolve(name, weights=False)
    if resolved.kind != "head":
        wrong = _no_head(resolved)
        raise UsageError(f"{resolved.name}: {wrong.message} [{wrong.code}]", wrong.remedy)
    return resolved


def load_head(name: str, *, values: bool = False) -> Head:
    """Finds an Eagle3 head and reads its record.

    Raises TrtspecError if the head has errors. `values`: whether a sample of the weights is checked
    too.
    """
    resolved = find_head(name)
    return Head(resolved, resolved.head_spec(values=values))


def _no_head(resolved: Resolved) -> Problem:
    """Returns the problem of a checkpoint that is not an Eagle3 head."""
    from trtspec.checkpoint.heads.read import no_eagle3_head
    from trtspec.checkpoint.target_tensors import finding

    remedy = "pass the target first and an Eagle3 head with `head`"
    full_model = finding("TS-HEAD-FULL-MODEL", "config.json", remedy=remedy)
    if resolved.weights is None:
        return full_model
    checkpoint = resolved.checkpoint
    return no_eagle3_head(checkpoint.config, checkpoint.tensors) or full_model


def findable(name: str) -> bool:
    """Whether `name` is a directory, a published id or a cached id.

    Raises TrtspecError if the model is known and not supported.
    """
    try:
        if local_directory(name) is not None:
            return True
        hub_id = parse_hub_id(name)
        cached = hub_id is not None and cached_snapshot(hub_id, complete=False) is not None
    except OSError:  # The name is longer than a path may be.
        return False
    return cached or known(name) is not None


def engine_name(name: str) -> str:
    """Returns the name of a checkpoint that is passed to an engine.

    It is the folder of a shipped model, an id without its revision, and any other name unchanged.
    """
    directory = local_directory(name)
    if directory is not None:
        return name if user_path(name).is_dir() else str(directory)
    hub_id = parse_hub_id(name)
    return name if hub_id is None else hub_id.name


def engine_revision(name: str) -> str | None:
    """Returns the revision that is passed with `engine_name`. None if the name has none."""
    hub_id = named_hub_id(name)
    return None if hub_id is None else hub_id.revision


def engine_path(name: str, cache: str | None = None) -> str:
    """Returns the name of a checkpoint for an engine that has no option for a revision.

    It is the snapshot's directory for an id with a revision, and otherwise `engine_name`. Raises
    UsageError if the snapshot is not cached, or if `cache` is given and the revision is not a whole
    commit.

    `cache`: path of the hub cache on the machine that serves. None: the cache of this machine.
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
