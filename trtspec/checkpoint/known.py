"""The published Kimi targets and heads of data/models.yaml, by hub id."""

from __future__ import annotations

import copy
import difflib
import re
from functools import cache
from typing import Any, Literal

from trtspec.data_files import load_yaml
from trtspec.errors import TrtspecError

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
    """The kind and entry of a published id (upper and lower case are the same), or None.

    Raises TrtspecError for ids that are known and refused, such as Kimi-K3.
    """
    wanted = hub_id.casefold()
    for name, reason in catalogue()["refused"].items():
        if name.casefold() == wanted:
            raise TrtspecError(f"{hub_id} is {reason}", "trtspec serves K2, K2-Thinking, K2.5, K2.6 and K2.7-Code")
    for kind, section in (("target", "targets"), ("head", "heads")):
        for name, entry in catalogue()[section].items():
            if name.casefold() == wanted:
                return kind, {"id": name, "kind": kind, **copy.deepcopy(entry)}  # type: ignore[return-value]
    return None


def same_checkpoint(first: str, second: str) -> bool:
    """Whether two names are one checkpoint: equal, or names under which the hub has the same."""
    if first == second:
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
