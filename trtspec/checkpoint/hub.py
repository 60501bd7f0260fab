"""Targets and heads by the name that a user gives, a directory or a hub id: the directory, or what is known about the
id without one. The published Kimi targets and heads of data/models.yaml, by hub id."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from trtspec.checkpoint.headers import HF_QUANT_NAME, INDEX_NAME, Checkpoint, read_config, read_json
from trtspec.checkpoint.remote_code import RemoteCode, code_of, read_code
from trtspec.data_files import DATA, load_yaml
from trtspec.errors import MissingDependency, Problem, TrtspecError, UsageError
from trtspec.specs import HeadSpec, ModelSpec, Values

LAYER_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@cache
def catalogue() -> dict[str, Any]:
    """The parsed file, with aliases resolved to entries and exclude patterns written out."""
    data = load_yaml("models.yaml")
    for entry in (*data["targets"].values(), *data["heads"].values()):
        quantization = (entry["config"] or {}).get("quantization_config")
        if quantization and "ignore" in quantization:
            quantization["ignore"] = expand_patterns(quantization["ignore"])
    for name, entry in list(data["heads"].items()):
        for alias in entry.get("aliases", ()):
            data["heads"][alias] = entry | {"published_as": name}
    return data


def expand_patterns(patterns: list[str]) -> list[str]:
    """Writes `{a..b}` out as one pattern per layer; published lists are in text order (1, 10, 11, .., 2, 20)."""
    if not any(LAYER_RANGE.search(pattern) for pattern in patterns):
        return list(patterns)
    expanded = []
    for pattern in patterns:
        found = LAYER_RANGE.search(pattern)
        layers = range(int(found[1]), int(found[2]) + 1) if found else range(1)
        expanded += [LAYER_RANGE.sub(str(layer), pattern) for layer in layers]
    return sorted(expanded)


def known(hub_id: str) -> tuple[Literal["target", "head"], dict[str, Any]] | None:
    """The kind and entry (to be read only) of a published id, upper and lower case being the same; or None.

    Raises TrtspecError for ids that are known and refused, such as Kimi-K3.
    """
    wanted = hub_id.casefold()
    for name, reason in catalogue()["refused"].items():
        if name.casefold() == wanted:
            raise TrtspecError(
                f"{hub_id} is {reason}", "trtspec serves K2, K2-Thinking, K2.5, K2.6 and K2.7-Code"
            )
    for kind, section in (("target", "targets"), ("head", "heads")):
        for name, entry in catalogue()[section].items():
            if name.casefold() == wanted:
                return kind, {"id": name, "kind": kind, **entry}  # type: ignore[return-value]
    return None


def same_checkpoint(first: str, second: str) -> bool:
    """Whether two names are one checkpoint: equal, one shipped model, or names under which the hub has the same."""
    if engine_name(first) == engine_name(second):
        return True
    entries = [known(name) for name in (first, second)]
    names = [entry[1].get("published_as", entry[1]["id"]) for entry in entries if entry is not None]
    return len(names) == 2 and names[0] == names[1]


def similar_ids(hub_id: str) -> list[str]:
    """Published ids that look like a mistyped `hub_id`; none when it is a published one itself."""
    names = [*catalogue()["targets"], *catalogue()["heads"]]
    if hub_id in names:
        return []
    return difflib.get_close_matches(hub_id, names, n=2, cutoff=0.8)


def real_pair(head_id: str, target_id: str) -> bool | None:
    """Whether the head was published for the target; None when either id is not a known one."""
    head, target = known(head_id), known(target_id)
    if head is None or target is None or head[0] != "head" or target[0] != "target":
        return None
    return target[1]["id"] in head[1]["targets"]


HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
METADATA_PATTERNS = ["config.json", HF_QUANT_NAME]
SMALL_PATTERNS = [
    "*.json",
    "*.jinja",
    "*.py",
    "tiktoken.model",
    "LICENSE*",
    "NOTICE*",
    "THIRD_PARTY*",
]
CHECKPOINT_PATTERNS = [*SMALL_PATTERNS, "*.safetensors"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Resolved:
    """`path` is a local directory, or None when the id is only known by name; `known` is its data/models.yaml entry."""

    name: str
    path: Path | None
    hub_id: str | None
    known: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """`target` or `head`."""
        from trtspec.checkpoint.target_problems import config_kind

        return self.known["kind"] if self.known else config_kind(self.config(), self.name)

    def config(self) -> dict[str, Any]:
        """config.json of the directory, else of the known entry; raises when neither is there."""
        if self.path is not None:
            return read_config(self.path / "config.json")
        config = self.known["config"] if self.known else None
        if config is None:
            raise TrtspecError(
                f"the config of {self.name} is not known offline",
                f"run `hf download {self.hub_id}` and pass its directory",
            )
        return config

    def target_spec(self) -> ModelSpec:
        path = self.path / HF_QUANT_NAME if self.path else None
        quant = read_config(path) if path is not None and path.is_file() else None
        return ModelSpec.from_config(self.config(), quant, remote_code=bool(self.code()))

    def code(self) -> RemoteCode:
        """The code that it brings: all of a directory, else what the known config.json refers to."""
        if self.path is not None:
            return read_code(self.path)
        return code_of({"config.json": self.config()}, None)

    def head_spec(self, *, values: bool = False) -> HeadSpec:
        """From the tensors where the checkpoint is here, else from the known config; `values` looks at a sample of the
        weights too."""
        from trtspec.checkpoint.heads.dialects import DIALECTS
        from trtspec.checkpoint.heads.read import head_spec, head_spec_from_config

        if self.path is not None and any(self.path.glob("*.safetensors")):
            return head_spec(Checkpoint.open(self.path), values=values)
        known = self.known or {}
        return head_spec_from_config(
            self.config(), dialect=DIALECTS.get(known.get("dialect", "")), owns=known.get("owns")
        )


def resolve(name_or_path: str, *, weights: bool = True) -> Resolved:
    """Finds a checkpoint.

    A directory is taken as it is, a hub id from the hub's cache where all of it is there. Else `weights` fetches it;
    without, the entry of data/models.yaml answers, or, for an id that is not listed there, the two config files, which
    are fetched if need be.
    """
    hub_id, entry = hub_id_and_entry(name_or_path)
    if hub_id is None:
        return Resolved(name_or_path, local_directory(name_or_path), None, None)
    cached = cached_snapshot(hub_id, complete=weights or entry is not None)
    if cached is None and (weights or entry is None):
        cached = _download(hub_id, CHECKPOINT_PATTERNS if weights else METADATA_PATTERNS)
    return Resolved(name_or_path, cached, hub_id, entry)


def local_directory(name: str) -> Path | None:
    """The directory called `name`, else that of the shipped model called so; None for everything else."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    return DATA / name if name in ("kimi-nano", "kimi-nano-eagle3") else None


def hub_id_and_entry(name_or_path: str) -> tuple[str | None, dict[str, Any] | None]:
    """The hub id and its entry in data/models.yaml; no id for a directory. Raises UsageError for what is neither."""
    if local_directory(name_or_path):
        return None, None
    path = Path(name_or_path).expanduser()
    if name_or_path and path.exists():
        raise UsageError(
            f"{name_or_path} is a file, not a checkpoint directory",
            f"pass its directory, {path.parent}",
        )
    refuse_revision(name_or_path)
    if not HUB_ID.fullmatch(name_or_path):
        raise UsageError(
            f"{name_or_path!r} is neither a directory nor a hub id",
            "pass a directory, an id such as org/name, or kimi-nano (head: kimi-nano-eagle3); "
            "where a job makes it later, build-config takes `like`",
        )
    found = known(name_or_path)
    entry = found[1] if found else None
    return (entry.get("published_as", entry["id"]) if entry else name_or_path), entry


def refuse_revision(name: str, kind: Literal["model", "dataset"] = "model") -> None:
    """Raises UsageError for `ORG/NAME@REVISION`, which is no path: what is on the hub is read at `main` only."""
    plain, at, revision = name.partition("@")
    if at and HUB_ID.fullmatch(plain):
        words = "--repo-type dataset " if kind == "dataset" else ""
        raise UsageError(
            f"{name} names the revision {revision!r}, and a hub id is read at `main` only",
            f"run `hf download {plain} {words}--revision {revision or 'REVISION'} --local-dir DIR` and pass DIR",
        )


def cached_snapshot(hub_id: str, complete: bool) -> Path | None:
    """The snapshot of `main` in the hub cache; with `complete`, only one that has every shard its index names.

    Reads the cache's documented layout itself (models--org--name/refs/main names the snapshot), because importing
    huggingface_hub takes longer than everything else that the torch-free commands do.
    """
    repository = cache_directory() / f"models--{hub_id.replace('/', '--')}"
    try:
        snapshot = (
            repository
            / "snapshots"
            / (repository / "refs" / "main").read_text(encoding="utf-8").strip()
        )
    except (OSError, UnicodeDecodeError):
        return None
    if not (snapshot / "config.json").is_file():
        return None
    return snapshot if not complete or _has_all_shards(snapshot) else None


def cache_directory() -> Path:
    """Where huggingface_hub keeps repositories: HF_HUB_CACHE, else hub/ under HF_HOME, else under the user's cache."""
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(os.path.expandvars(named)).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def hub_id_of(directory: Path) -> str | None:
    """`org/name` of a snapshot in a hub cache (models--org--name/snapshots/...); None for any other directory."""
    for part in reversed(directory.resolve().parts):
        organization, _, name = part.removeprefix("models--").partition("--")
        if part.startswith("models--") and name:
            return f"{organization}/{name}"
    return None


def _has_all_shards(snapshot: Path) -> bool:
    index = snapshot / INDEX_NAME
    if index.is_file():
        return all(
            (snapshot / shard).exists()
            for shard in set(Values(read_json(index)).mapping("weight_map").values.values())
        )
    return any(snapshot.glob("*.safetensors"))


def _download(hub_id: str, patterns: list[str]) -> Path:
    """snapshot_download into the hub's own cache."""
    from huggingface_hub import snapshot_download

    require_online(hub_id)
    return Path(hub_errors(hub_id, lambda: snapshot_download(hub_id, allow_patterns=patterns)))


def is_online() -> bool:
    """Whether the hub may be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() not in ("1", "true", "yes", "on")


def unreachable(name: str) -> Problem | None:
    """What a dry run says of a published checkpoint that is not here and may not be fetched; None for any other."""
    if is_online():
        return None
    found = resolve(name, weights=False)
    if found.path is not None or found.known is None:
        return None
    message = f"{found.name} is not here and HF_HUB_OFFLINE is set: its tensors were not looked at"
    return Problem(
        "TS-NAME-ABSENT", "info", found.name, message, "unset it to read the headers from the hub"
    )


def require_online(hub_id: str) -> None:
    if not is_online():
        raise MissingDependency(
            f"{hub_id} is not in the hub cache and HF_HUB_OFFLINE is set",
            _suggest(hub_id, "unset it, or pass a directory"),
        )


def hub_errors(hub_id: str, ask: Callable[[], Result]) -> Result:
    """What `ask` gets from the hub. Messages never repeat the library's text: it may hold a token."""
    from huggingface_hub import errors

    try:
        return ask()
    except TrtspecError:
        raise
    except errors.GatedRepoError:
        raise TrtspecError(
            f"{hub_id} is gated", "accept its licence on the hub, then run `hf auth login`"
        ) from None
    except errors.RepositoryNotFoundError:
        raise TrtspecError(
            f"the hub has no {hub_id}, or it is private",
            _suggest(hub_id, "check the id, or run `hf auth login`"),
        ) from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            remedy = "run `hf auth login` with an account that may read it"
            raise TrtspecError(
                f"the hub refuses to show {hub_id} (HTTP {status})", remedy
            ) from None
        text = f"{hub_id} could not be fetched (HTTP {status})"
        raise TrtspecError(
            text, _suggest(hub_id, "try again later, or pass a local directory")
        ) from None
    except errors.SafetensorsParsingError as error:
        message = f"{hub_id} holds a damaged shard: {error}"
        raise TrtspecError(message, "tell its publisher", "TS-SHARD-DAMAGED") from None
    except (
        Exception
    ) as error:  # no network, full disk, hub errors: one message, whatever the transport raised
        raise TrtspecError(
            f"{hub_id} could not be fetched ({type(error).__name__})",
            _suggest(hub_id, "check the network, or pass a local directory"),
        ) from None


def _suggest(hub_id: str, remedy: str) -> str:
    close = similar_ids(hub_id)
    return f"did you mean {' or '.join(close)}? Otherwise {remedy}" if close else remedy


@dataclass(frozen=True)
class Target:
    resolved: Resolved
    spec: ModelSpec


@dataclass(frozen=True)
class Head:
    resolved: Resolved
    spec: HeadSpec


def load_target(name: str, like: str | None = None) -> Target:
    """The target called `name`; while it is not here, the published checkpoint `like` answers for it. Raises UsageError
    when the name is a head's, or nothing that is known."""
    absent = like is not None and not Path(name).expanduser().exists()
    resolved = resolve(like if like is not None and absent else name, weights=False)
    must_be(resolved, "target")
    if absent:
        resolved = replace(resolved, name=name, path=None)
    return Target(resolved, resolved.target_spec())


def must_be(resolved: Resolved, kind: Literal["target", "head"]) -> None:
    """As `load_target` and `load_head`, of what was found already."""
    if resolved.kind == kind:
        return
    if kind == "target":
        message = f"{resolved.name} is a draft head, not a target"
        raise UsageError(message, "pass the target first and the head with `head`")
    wrong = _no_head(resolved)
    raise UsageError(f"{resolved.name}: {wrong.message} [{wrong.code}]", wrong.remedy)


def load_head(name: str, *, values: bool = False) -> Head:
    """Raises UsageError with its code for what is no Eagle3 head: a whole model, Medusa heads and others; TrtspecError
    for a head in which an error is found, with `values` in a sample of its weights too."""
    resolved = resolve(name, weights=False)
    must_be(resolved, "head")
    return Head(resolved, resolved.head_spec(values=values))


def _no_head(resolved: Resolved) -> Problem:
    """What it is instead: by its tensors where they are here, else a whole model, as its config says."""
    from trtspec.checkpoint.heads.read import no_eagle3_head

    whole = Problem(
        "TS-HEAD-FULL-MODEL", "error", "config.json", "this is a whole model, not a draft head",
        "pass the target first and an Eagle3 head with `head`",
    )  # fmt: skip
    if resolved.path is None or not any(resolved.path.glob("*.safetensors")):
        return whole
    checkpoint = Checkpoint.open(resolved.path)
    return no_eagle3_head(checkpoint.config, checkpoint.tensors) or whole


def findable(name: str) -> bool:
    """Whether a name that only a file gives can be looked at here: a directory, a published id, or a cached one. Raises
    TrtspecError for a model that is known and refused."""
    try:
        here = local_directory(name) is not None or (
            HUB_ID.fullmatch(name) and cached_snapshot(name, complete=False)
        )
    except OSError:  # longer than any path
        return False
    return bool(here) or known(name) is not None


def engine_name(name: str) -> str:
    """What an engine is given for a checkpoint: the directory of a shipped model, else the name itself."""
    found = local_directory(name)
    return name if found is None or Path(name).expanduser().is_dir() else str(found)
