"""Random engine files as people write them: known, misspelt, renamed and misplaced keys.

Comments are everywhere.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from tests.oracles.mutations import misspelt
from trtspec.errors import Problem
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.document import Document, scalar
from trtspec.trtllm.lint import fix, lint
from trtspec.trtllm.schema import Field, Schema, renames

WRONG: list[Any] = [
    None,
    -1,
    0,
    10**6,
    "x",
    "auto",
    True,
    0.5,
    [],
    [1, 2],
    {},
    "8",
    "YES",
    "2.0",
    {1: 2},
]


def with_fixes(file: str | Document, deployment: Deployment) -> tuple[Document, list[Problem]]:
    """The corrected file, and what was corrected."""
    document = Document.parse(file) if isinstance(file, str) else file
    return fix(document, deployment, lint(document, deployment))


def written(schema: Schema, rng: random.Random) -> tuple[str, list[str]]:
    """The text of one file and every comment in it."""
    tree: dict[Any, Any] = {}
    for _ in range(rng.randint(1, 9)):
        path, value = _setting(schema, rng)
        place = tree
        *parents, name = path if isinstance(path, tuple) else path.split(".")
        for parent in parents:
            inner = place.setdefault(parent, {})
            if not isinstance(inner, dict):
                break
            place = inner
        else:
            place[name] = value
    if rng.random() < 0.5:
        spec = tree.setdefault("speculative_config", {})
        if isinstance(spec, dict):
            spec.setdefault(
                "decoding_type", rng.choice(["Eagle", "Eagle3", "eagle", "MTP", "NGram", "Egle"])
            )
            if rng.random() < 0.5:
                spec.setdefault("speculative_model_dir", "/heads/one")
    writer = _Writer(rng)
    lines = writer.block(tree, 0)
    newline = "\r\n" if rng.random() < 0.1 else "\n"
    start = ["---"] if rng.random() < 0.05 else []
    end = writer.lines(0)
    text = newline.join([*start, *lines, *end])
    return text + (newline if rng.random() < 0.9 else ""), writer.comments


def _setting(schema: Schema, rng: random.Random) -> tuple[Any, Any]:
    kind = rng.random()
    if kind < 0.15:
        path = rng.choice(sorted(set(renames()) - set(schema.fields)))
        target = schema.fields.get(renames()[path]["to"])
        return path, _value(target, rng) if target else rng.choice(WRONG)
    path = rng.choice(sorted(schema.fields))
    value = _value(schema.fields[path], rng)
    if kind < 0.25:
        parent, dot, name = path.rpartition(".")
        return f"{parent}{dot}{misspelt(name, rng)}", value
    if kind < 0.32:  # a dotted key instead of a nested one
        return (path,), value
    if kind < 0.38:  # in another place
        return path.rpartition(".")[2], value
    return path, value


def _value(field: Field, rng: random.Random) -> Any:
    if rng.random() < 0.15:
        return rng.choice(WRONG)
    if field.allowed and rng.random() < 0.9:
        word = rng.choice(field.allowed)
        if "list" in field.type:
            return [word]
        return word if rng.random() < 0.8 else str(word).swapcase().replace("_", "")
    made = {
        "int": rng.choice([1, 2, 8, 64]),
        "float": rng.choice([0.5, 1, 0.9]),
        "bool": rng.random() < 0.5,
        "str": rng.choice(["text", "a # b", "/models/x", "it's", 'a "b": c']),
        "object": {},
        "null": None,
        "list[int]": [1, 2, 8],
        "list[float]": [0.5, 0.5],
        "dict[int,int]": {4: 3, 64: 1},
        "dict[str,str]": {"A": "b"},
    }
    return made.get(rng.choice(field.types), [1])


@dataclass
class _Writer:
    rng: random.Random
    comments: list[str] = field(default_factory=list)

    def comment(self) -> str:
        self.comments.append(f"# note {len(self.comments)}: keep it, a: [b")
        return self.comments[-1]

    def lines(self, depth: int) -> list[str]:
        """Lines of comments and empty ones between two keys."""
        if self.rng.random() < 0.75:
            return []
        found = [" " * self.rng.choice([depth, depth, 0, depth + 1]) + self.comment()]
        return found + [""] * (self.rng.random() < 0.3)

    def block(self, tree: dict[Any, Any], depth: int) -> list[str]:
        step, lines = self.rng.choice([2, 2, 2, 4]), []
        for key, value in tree.items():
            lines += self.lines(depth)
            name = " " * depth + (f'"{key}"' if self.rng.random() < 0.05 else scalar(key))
            behind = f"  {self.comment()}" if self.rng.random() < 0.3 else ""
            if isinstance(value, dict) and value and self.rng.random() < 0.75:
                lines += [f"{name}:{behind}", *self.block(value, depth + step)]
            elif isinstance(value, list) and value and self.rng.random() < 0.3:
                items = [f"{' ' * (depth + step)}- {scalar(item)}" for item in value]
                lines += [f"{name}:{behind}", *self.lines(depth + step), *items]
            elif (
                isinstance(value, dict) and value and self.rng.random() < 0.3
            ):  # brackets over several lines
                pairs = [f"{scalar(k)}: {scalar(v)}" for k, v in value.items()]
                inner = pairs[0]
                for pair in pairs[1:]:
                    inner += f",  {self.comment()}\n{' ' * (depth + step)}{pair}"
                lines.append(f"{name}: {{{inner}}}{behind}")
            elif isinstance(value, str) and self.rng.random() < 0.1:
                lines += [f"{name}: |{behind}", f"{' ' * (depth + step)}{value}"]
            else:
                lines.append(f"{name}: {scalar(value)}{behind}")
            if self.rng.random() < 0.04 and not isinstance(value, dict):
                lines.append(f"{name}: {scalar(self.rng.choice(WRONG))}")  # written twice
        return lines
