"""Engine YAML files to judge: real ones and made ones, each with one change.

The change is one that a hurried person could make. A new type of change is a method of `Mutator`
that changes the mapping and returns what it did, or "" if it changed nothing. `ways` in `__iter__`
lists it as often as it should come:

    def _lost_key(self, value: dict[str, Any]) -> str:

Odd values, samples, ways to speculate and conflicts are rows of mutations.yaml.
"""

import copy
import random
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trtspec.trtllm.schema import DISCRIMINATORS, OPTIONS, Field, Schema, classes, renames

ROOT = Path(__file__).parents[2]


def paths_ever() -> Iterator[tuple[str, Any]]:
    """Each key of any release with a source's word on it, repeated if sources or types differ."""
    for owner, readings in classes().items():
        for reading in readings if owner != OPTIONS else ():
            yield from ((entry.path, entry) for entry in reading.entries.values())


TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
ODD: list[Any] = TABLES["odd"]
SAMPLES: dict[str, list[Any]] = TABLES["samples"]
NOT_RUN: dict[str, str] = TABLES["not_run"]
SPECULATION: list[dict[str, Any]] = TABLES["speculation"]
CONFLICTS: list[dict[str, Any]] = TABLES["conflicts"]


def bases() -> list[dict[str, Any]]:
    """The project's own configurations and the public recipes, as mappings."""
    found = []
    for file in sorted((ROOT / "configs").glob("*.yml")):
        value = yaml.safe_load(file.read_text())
        if "context_servers" not in value:
            found.append(value)
    recipes = yaml.safe_load((ROOT / "tools" / "public_recipes.yaml").read_text())["recipes"]
    found += [recipe["theirs"] for recipe in recipes]
    return found


class Mutator:
    """Changes files for the release of `schema`; the same seed gives the same files."""

    def __init__(self, schema: Schema, seed: int) -> None:
        self.schema = schema
        self.rng = random.Random(seed)
        self.bases = bases()
        self.paths = sorted(schema.fields)
        self.everywhere = sorted({path for path, _ in paths_ever()} | set(renames()))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Endless pairs of what was changed and the text."""
        ways = [
            self._value_of_key,
            self._value_of_key,
            self._added_key,
            self._added_key,
            self._added_key,
            self._typo,
            self._other_lines_key,
            self._moved_key,
            self._lost_key,
            self._speculation,
            self._speculation,
            self._conflict,
            self._conflict,
            self._unknown_nested,
            self._good_key,
            self._good_key,
            self._nothing,
        ]
        while True:
            value = copy.deepcopy(self.rng.choice(self.bases))
            way = self.rng.choice(ways)
            what = way(value)
            if what and not any(_is_written(value, path) for path in NOT_RUN):
                yield f"{way.__name__[1:]} {what}", yaml.safe_dump(value, sort_keys=False)

    def _leaves(self, value: dict[str, Any], prefix: str = "") -> list[str]:
        found = []
        for key, item in value.items():
            path = f"{prefix}{key}"
            found.append(path)
            if isinstance(item, dict):
                found += self._leaves(item, f"{path}.")
        return found

    def _value_of_key(self, value: dict[str, Any]) -> str:
        path, odd = self.rng.choice(self._leaves(value)), self.rng.choice(ODD)
        _set(value, path, odd)
        return f"{path}: {odd!r}"

    def _added_key(self, value: dict[str, Any]) -> str:
        """Any known key with an odd value; its object's discriminator mostly agrees with it."""
        field = self.schema.fields[self.rng.choice(self.paths)]
        odd = self.rng.choice([*ODD, *self._near(field)])
        self._choose_variant(value, field)
        _set(value, field.path, odd)
        return f"{field.path}: {odd!r}"

    def _good_key(self, value: dict[str, Any]) -> str:
        field = self.schema.fields[self.rng.choice(self.paths)]
        good = self.rng.choice(
            list(field.allowed) or SAMPLES.get(self.rng.choice(field.types), [1])
        )
        self._choose_variant(value, field)
        _set(value, field.path, good)
        return f"{field.path}: {good!r}"

    def _near(self, field: Field) -> list[Any]:
        """Values at and beyond the field's limits, and its words in another spelling."""
        limits = [
            limit for limit in (field.min, field.max, field.above, field.below) if limit is not None
        ]
        near: list[Any] = [limit + step for limit in limits for step in (-1, 0, 1, 0.5)]
        for word in field.allowed:
            near += [word, str(word).lower(), str(word).upper(), f"{word}x", [word]]
        return near

    def _choose_variant(self, value: dict[str, Any], field: Field) -> None:
        top = field.path.partition(".")[0]
        name = DISCRIMINATORS.get(top)
        if name is None or field.path == top or self.rng.random() < 0.15:
            return
        if top == "speculative_config":
            kinds = [
                base
                for base in SPECULATION
                if not field.variants or base["decoding_type"] in field.variants
            ]
            value[top] = copy.deepcopy(self.rng.choice(kinds or SPECULATION))
        elif field.variants and field.path != f"{top}.{name}":
            _set(value, f"{top}.{name}", self.rng.choice(field.variants))

    def _typo(self, value: dict[str, Any]) -> str:
        path = self.rng.choice(self._leaves(value))
        parent, _, name = path.rpartition(".")
        wrong = misspelt(name, self.rng)
        holder = _get(value, parent)
        if wrong in holder or not all(isinstance(key, str) for key in holder):
            return ""
        holder[wrong] = holder.pop(name)
        return f"{path} -> {wrong}"

    def _other_lines_key(self, value: dict[str, Any]) -> str:
        path = self.rng.choice(self.everywhere)
        type_ = next((field.type for known, field in paths_ever() if known == path), "int")
        _set(value, path, self.rng.choice(SAMPLES.get(type_.partition("|")[0], [1])))
        return path

    def _moved_key(self, value: dict[str, Any]) -> str:
        """A key in the wrong object, or its dotted path as one key."""
        path = self.rng.choice(self.paths)
        if "." not in path:
            place = self.rng.choice(["kv_cache_config", "speculative_config", "moe_config"])
            _set(value, f"{place}.{path}", 1)
            return f"{path} in {place}"
        name = self.rng.choice([path, path.rpartition(".")[2]])
        if name in value:
            return ""
        value[name] = 1
        return f"{name} at the top"

    def _lost_key(self, value: dict[str, Any]) -> str:
        path = self.rng.choice(self._leaves(value))
        holder = _get(value, path.rpartition(".")[0])
        holder.pop(path.rpartition(".")[2], None)
        return path

    def _speculation(self, value: dict[str, Any]) -> str:
        """Another way to speculate, often with a key changed or lost, or with another type.

        The other type keeps the same keys.
        """
        chosen = copy.deepcopy(self.rng.choice(SPECULATION))
        what = self.rng.choice(["whole", "odd", "lost", "other type", "extra"])
        if what == "odd":
            chosen[self.rng.choice(list(chosen))] = self.rng.choice(ODD)
        elif what == "lost":
            chosen.pop(self.rng.choice(list(chosen)))
        elif what == "other type":
            kinds = [
                *(base["decoding_type"] for base in SPECULATION),
                "Medusa",
                "Lookahead",
                "DSpark",
                "eagle3",
                "EAGLE",
            ]
            chosen["decoding_type"] = self.rng.choice(kinds)
        elif what == "extra":
            inside = [path for path in self.paths if path.startswith("speculative_config.")]
            field = self.schema.fields[self.rng.choice(inside)]
            good = self.rng.choice(list(field.allowed) or SAMPLES.get(field.types[0], [1]))
            if not field.path.endswith("decoding_type"):
                _set({"speculative_config": chosen}, field.path, good)
        value["speculative_config"] = chosen
        return f"{what}: {chosen}"

    def _conflict(self, value: dict[str, Any]) -> str:
        chosen = copy.deepcopy(self.rng.choice(CONFLICTS))
        for path in self._leaves(chosen):
            item = _get(chosen, path)
            if (
                not isinstance(item, dict)
                or not item
                or not all(isinstance(key, str) for key in item)
            ):
                _set(value, path, item)
        return str(chosen)

    def _unknown_nested(self, value: dict[str, Any]) -> str:
        objects = [path for path in self.paths if "object" in self.schema.fields[path].types]
        path = f"{self.rng.choice(objects)}.{misspelt('some_key', self.rng)}"
        _set(value, path, self.rng.choice(ODD))
        return path

    def _nothing(self, value: dict[str, Any]) -> str:
        return "unchanged"


def misspelt(word: str, rng: random.Random) -> str:
    """`word` with a letter lost, doubled, changed or put in another case."""
    at = rng.randrange(len(word))
    letter = rng.choice(string.ascii_lowercase)
    return rng.choice(
        [
            word[:at] + word[at + 1 :],
            word[: at + 1] + word[at:],
            word[:at] + letter + word[at + 1 :],
            word.upper(),
            word.replace("_", "-"),
            word + "s",
            word.replace("_", ""),
        ]
    )


def _get(value: dict[str, Any], path: str) -> Any:
    here: Any = value
    for part in path.split(".") if path else []:
        here = (
            next((item for key, item in here.items() if str(key) == part), None)
            if isinstance(here, dict)
            else None
        )
    return here


def _set(value: dict[str, Any], path: str, item: Any) -> None:
    parent, _, name = path.rpartition(".")
    here = value
    for part in parent.split(".") if parent else []:
        if not isinstance(here.get(part), dict):
            here[part] = {}
        here = here[part]
    here[name] = item


def _is_written(value: dict[str, Any], path: str) -> bool:
    """Whether a key of NOT_RUN stands in a file with a value that would have to be run."""
    item = _get(value, path)
    if path == "backend":
        return path in value and item != "pytorch"
    if path == "moe_config.load_balancer":
        return isinstance(item, str)
    if path == "kv_cache_config.disk_cache_path":
        return item not in (None, "/")
    if path == "speculative_config.speculative_model":
        return bool(_get(value, "speculative_config.decoding_type") == "DSpark")
    return item is not None or path in value
