"""Engine files inside what carries them: Helm values, Kubernetes manifests (Dynamo's too), upstream's Slurm recipes,
and shell scripts with a `trtllm-serve` command. `carried` finds each with its place, so that a finding names its
line of the original and a correction is written there.

An engine file is a block of text that parses to engine keys, a here-document, or a mapping below SECTIONS. A command
gives its options, the target, the engine file that it names, and the release, by the tag of its image.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from trtspec.errors import UsageError
from trtspec.trtllm.deployment import DYNAMO_OPTIONS, PARSERS, dynamo_releases
from trtspec.trtllm.document import Document
from trtspec.trtllm.nodes import Node, YamlError, compose
from trtspec.trtllm.schema import parse_version

ENGINE_KEYS = {
    "speculative_config",
    "kv_cache_config",
    "moe_config",
    "cuda_graph_config",
    "cache_transceiver_config",
}
SECTIONS = {
    "worker_config",
    "trtllm_config",
}  # of upstream's Slurm recipes and of srt-slurm: a mapping for each role
IMAGE = re.compile(r"(?P<name>tensorrt-?llm[\w./-]*):(?P<tag>[\w.]+)")
HEREDOC = re.compile(r"<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)['\"]?")
INTO = re.compile(r"(?:>|tee)\s*['\"]?(?P<file>[^\s'\"<>|]+\.ya?ml)")
PROGRAMS = {"trtllm-serve", "dynamo.trtllm"}
STOP = {"&", "&&", "|", "||", ";", ">", ">>", "2>&1", "<"}
CONFIG = {"--extra_llm_api_options", "--config", "--extra-engine-args"}
# options of dynamo.trtllm, as trtllm-serve's
DYNAMO = {theirs: f"--{key}" for key, theirs in DYNAMO_OPTIONS.items()} | {
    their: our for our, their in PARSERS.items()
}


@dataclass(frozen=True)
class Carried:
    """An engine file (`text`, "" where only a command is here) and how it is served. `first` is the line of the
    original at which it begins, from 0; each of its `lines` lines is indented by `indent`. `expands`: a shell puts
    variables in. `words` are options of trtllm-serve, None where no command is known, and `command` their line;
    `partial`: the shell puts in more of them. `dynamo`: the worker is Dynamo's. `elsewhere` is the engine file that the
    command names and that is not in this file."""

    place: str
    text: str = ""
    first: int = 0
    lines: int = 0
    indent: int = 0
    expands: bool = False
    words: tuple[str, ...] | None = None
    command: int = 0
    partial: bool = False
    dynamo: bool = False
    target: str | None = None
    head: str | None = None
    version: str | None = None
    elsewhere: str | None = None

    def written_into(self, original: str, text: str) -> str:
        """The original with `text` in place of this engine file."""
        kept = original.splitlines(keepends=True)
        new = textwrap.indent(text, " " * self.indent).splitlines(keepends=True)
        return "".join([*kept[: self.first], *new, *kept[self.first + self.lines :]])


def carried(text: str) -> list[Carried]:
    """Every engine file and command in a text; none for an engine file itself."""
    found: list[Carried] = []
    for first, chunk in _chunks(text):
        try:
            root, _ = compose(chunk)
        except YamlError:
            return _script(text)
        if root is None or not isinstance(root.value, dict):
            return _script(text)
        if set(root.value) & ENGINE_KEYS:
            return []
        found += [replace(item, first=item.first + first) for item in _in_yaml(root, chunk)]
    return _joined(found)


def _chunks(text: str) -> Iterator[tuple[int, str]]:
    """The documents of a YAML stream, each with its first line; empty ones are left out."""
    lines = text.splitlines(keepends=True)
    starts = [0, *(at for at, line in enumerate(lines) if re.match(r"---(\s|$)", line))]
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        chunk = "".join(lines[begin:end])
        if re.search(r"^[^#\s-]", chunk, re.MULTILINE):
            yield begin, chunk


def _in_yaml(root: Node, text: str) -> Iterator[Carried]:
    common: dict[str, Any] = {"version": _release(text)}
    model, image = root.value.get("model"), root.value.get("image")
    if isinstance(model, dict) and isinstance(image, dict):  # values of our chart
        common = {
            "version": str(image.get("tag") or "") or None,
            "target": model.get("target"),
            "head": model.get("head"),
        }
    for path, node in _nodes(root, ()):
        if node.kind == "scalar" and node.style == "|" and _is_engine_file(node.text):
            first = next(line for line in text.splitlines()[node.line + 1 :] if line.strip())
            indent = len(first) - len(first.lstrip())
            yield Carried(
                ".".join(path), node.text, node.line + 1, node.text.count("\n"), indent, **common
            )
        elif (
            node.kind == "mapping"
            and node.style != "flow"
            and len(path) > 1
            and path[-2] in SECTIONS
        ):
            lines = text.splitlines(keepends=True)[node.line : text.count("\n", 0, node.end) + 1]
            inner = textwrap.dedent("".join(lines))
            yield Carried(".".join(path), inner, node.line, len(lines), node.column, **common)
        elif node.kind == "mapping":
            words = [item for name in ("command", "args") for item in _texts(node, name)]
            if words:
                line = (
                    words[0] if len(words) == 1 else shlex.join(words)
                )  # docker compose takes a line of a shell
                script = "\n".join(words[words.index("-c") + 1 :]) if "-c" in words else line
                version = _release(text[node.start : node.end]) or common["version"]
                for item in _script(script):
                    yield replace(item, first=node.line, version=item.version or version)


def _nodes(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    yield path, node
    for pair in node.pairs:
        yield from _nodes(pair.value_node, (*path, pair.key_node.text))
    if node.kind == "sequence":
        for at, item in enumerate(node.items):
            yield from _nodes(item, (*path, str(at)))


def _texts(node: Node, name: str) -> list[str]:
    """The words below a key: a list of scalars, or one scalar."""
    found = [pair.value_node for pair in node.pairs if pair.key_node.text == name]
    items = [
        item for value in found for item in (value.items if value.kind == "sequence" else [value])
    ]
    return [item.text for item in items if item.kind == "scalar"]


def _is_engine_file(text: str) -> bool:
    value = Document.parse(text).value
    return isinstance(value, dict) and bool(set(value) & ENGINE_KEYS)


def _release(text: str) -> str | None:
    """The engine's release by the tag of the one image in a text; None where it names none, several, latest, a digest,
    or a release of long ago."""
    tags = {(match["name"], match["tag"]) for match in IMAGE.finditer(text)}
    if len(tags) != 1:
        return None
    (name, tag), *_ = tags
    with suppress(UsageError):
        return str(parse_version(dynamo_releases().get(tag, "") if "runtime" in name else tag))
    return None


def _script(text: str) -> list[Carried]:
    """Here-documents with engine keys, and commands."""
    lines, found, at = text.split("\n"), [], 0
    while at < len(lines):
        begin, joined = at, lines[at]
        while joined.endswith("\\") and at + 1 < len(lines):
            at += 1
            joined = joined[:-1] + " " + lines[at].strip()
        at += 1
        document, into = HEREDOC.search(joined), INTO.search(joined)
        if document:
            end = next(
                (
                    n
                    for n in range(at, len(lines))
                    if lines[n].strip().rstrip("'\"") == document["end"]
                ),
                len(lines),
            )
            inner = "".join(f"{line}\n" for line in lines[at:end])
            if _is_engine_file(textwrap.dedent(inner)):
                indent = len(inner) - len(inner.lstrip(" "))
                place = into["file"] if into else f"line {begin + 1}"
                found.append(
                    Carried(
                        place, textwrap.dedent(inner), at, end - at, indent, not document["quote"]
                    )
                )
            at = end + 1
        elif any(program in joined for program in PROGRAMS):
            found += [
                replace(command, first=begin, version=_release(text))
                for command in _command(joined)
            ]
    return _joined(found)


def _command(line: str) -> Iterator[Carried]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quotation mark that ends on another line
        return
    start = next((n for n, word in enumerate(words) if PurePath(word).name in PROGRAMS), None)
    if start is None:
        return
    program, rest = PurePath(words[start]).name, words[start + 1 :]
    rest = rest[: next((n for n, word in enumerate(rest) if word in STOP), len(rest))]
    if rest[:1] == ["serve"]:
        rest = rest[1:]
    if "--help" in rest or rest[:1] in (["disaggregated"], ["mm_embedding_serve"]):
        return
    target = rest.pop(0) if rest and not rest[0].startswith("-") and "@" not in rest[0] else None
    # a variable behind a word that takes no value, or an array of the shell, holds further options
    hidden = [
        before for before, word in zip(["", *rest], rest, strict=False) if word.startswith("$")
    ]
    partial = "@" in line or any(
        not before.startswith("-") or before == "--trust_remote_code" for before in hidden
    )
    options, config, dynamo = [], None, program != "trtllm-serve"
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        values = [value] if equals else []
        while (
            not equals
            and rest
            and not (rest[0].startswith("-") and not re.fullmatch(r"-\d+", rest[0]))
        ):
            values.append(rest.pop(0))
        if flag in CONFIG and values:
            config = values[0]
        elif flag == "--model-path" and values:
            target = values[0]
        elif flag == "--override-engine-args" and re.search(
            r'"trust_remote_code":\s*true', " ".join(values)
        ):
            options.append("--trust_remote_code")
        elif (not dynamo or flag in DYNAMO) and not any(
            "$" in word or "{{" in word for word in (flag, *values)
        ):
            options += [DYNAMO[flag] if dynamo else flag, *values]
    served = Carried(f"`{program}`", words=tuple(options), target=target, elsewhere=config)
    yield replace(served, partial=partial, dynamo=dynamo)


def _joined(found: list[Carried]) -> list[Carried]:
    """Each engine file with the command that names it; a command whose file is not here stays alone."""
    commands = [item for item in found if item.words is not None]
    files = [item for item in found if item.words is None]
    joined = []
    for file in files:
        name = PurePath(file.place.rpartition("/")[2]).name
        own = [
            item
            for item in commands
            if item.elsewhere and f".{PurePath(item.elsewhere).name}" in f".{name}"
        ]
        own = own or (commands if len(files) == len(commands) == 1 else [])
        if not own:
            joined.append(file)
            continue
        command = own[0]
        commands.remove(command)
        target, version = file.target or command.target, command.version or file.version
        known = {name: getattr(command, name) for name in ("words", "partial", "dynamo")}
        joined.append(replace(file, **known, command=command.first, target=target, version=version))
    return [*joined, *(replace(command, command=command.first) for command in commands)]
