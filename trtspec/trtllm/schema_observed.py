"""What one release is and does, as the bundle of a proof shows it: its own classes and options, as `schema_tools
from-installed` wrote them, and what it did with request parameters."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from packaging.version import Version

from trtspec.errors import UsageError
from trtspec.trtllm.schema import SCHEMAS, Entries, merged

PLACES = {"fields": 0, "options": 2}  # among the Entries of a schema
NAME = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Observation:
    """One release as it is: `version`, its entries, and the bundle that shows it."""

    version: str
    entries: Entries
    bundle: str

    def told(self, part: str) -> dict[str, dict[str, Any]]:
        """The fields or options of the release; removed entries are fields that it no longer has."""
        return self.entries[PLACES["options" if part == "options" else "fields"]]

    def tells(self, part: str, path: str) -> bool:
        """Whether the presence of an entry means anything: the object that holds it was read."""
        parent = path.rpartition(".")[0]
        return bool(self.told(part)) and (part == "options" or not parent or parent in self.told(part))


@dataclass(frozen=True)
class RequestObservation:
    """What one speculating release did with request parameters that it honours without speculation: "honoured", "no
    effect" or "refused", by the names of release notes."""

    version: str
    outcomes: Mapping[str, str]
    bundle: str

    def shows(self, line: str, behaviour: str) -> bool | None:
        """Whether the behaviour of a line is in force; None where its parameters were not sent, or tell nothing, as
        penalties that are honoured, which may have their key."""
        names, listed = parameters_of(line, behaviour)
        known = {self.outcomes[name] for name in names if name in self.outcomes}
        if behaviour == "penalties_need_a_key":
            known.discard("honoured")
        if not known:
            return None
        if behaviour == "requests_ignored":
            return ("no effect" in known) == listed
        return "refused" in known


Seen = Observation | RequestObservation


def observation(text: str, bundle: str, engine: str | None = None) -> Observation:
    """Raises UsageError for a text that is no schema file or not that of the `engine` that was proved, and for names
    and words that no schema holds: they become lines of a patch."""
    try:
        data = yaml.safe_load(text)
        for part in ("fields", "options", "removed", "behaviours"):
            for name, entry in (data.get(part) or {}).items():
                if not NAME.fullmatch(name) or not all(map(str.isprintable, _texts(entry))):
                    raise TypeError(f"{name[:60]!r} of {part} is no name of an entry, or holds control characters")
        version = str(data["versions"]["seen"])
        if engine is not None and Version(version) != Version(engine):
            raise TypeError(f"it is of {version}, and the servers were {engine}")
        return Observation(version, merged(data), bundle)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"the schema of {bundle} is not one: {error}", "ask for the bundle again") from None


def _texts(value: Any) -> Iterator[str]:
    """All texts of a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.items() for part in item for text in _texts(part))
    elif isinstance(value, list):
        yield from (text for item in value for text in _texts(item))


@functools.cache
def line_data(line: str) -> dict[str, Any]:
    return yaml.safe_load((SCHEMAS / f"{line}.yaml").read_text(encoding="utf-8"))


def parameters_of(line: str, behaviour: str) -> tuple[list[str], bool]:
    """Request parameters that the behaviour is about, and whether the line lists them: one with an empty list says that
    it ends for those of the line before."""
    name: str | None = line
    while name is not None:
        found = ((line_data(name).get("behaviours") or {}).get(behaviour) or {}).get("parameters")
        if found:
            return found, name == line
        name = line_data(name).get("inherits")
    return [], False
