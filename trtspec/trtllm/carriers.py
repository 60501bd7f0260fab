"""Engine files inside what carries them: values of a chart, manifests, Slurm recipes and shell scripts. `carried` finds
each with its place, so that a finding names its line of the original and a correction is written there.

One pass over the tree of the carrier: whatever text or mapping has an engine's keys is an engine file, at any depth and
in any quoting. A command gives its options, the target, the engine file that it names, the role and the release. Beside
them stand the variables of the environment.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from trtspec.errors import UsageError
from trtspec.trtllm.deployment import DYNAMO_FLAGS, ROLES, dynamo_releases
from trtspec.trtllm.intent import Role
from trtspec.trtllm.nodes import BLOCK, Node, YamlError, compose
from trtspec.trtllm.schema import newest_known, parse_version, schema_for
from trtspec.trtllm.shell import MASK, OMITTED, Statement, Word, masked, statements, unmasked

IMAGE = re.compile(r"(?P<name>tensorrt-?llm[\w./-]*):(?P<tag>\w[\w.-]*)")
VARIANT = re.compile(r"-(efa|cuda)[\w-]*$")  # of an image's tag, with the same engine
PROGRAMS = {"trtllm-serve", "dynamo.trtllm", "vllm"}
NOT_LAUNCHED = {"echo", "printf", "which", "command", "pkill", "pgrep", "grep", "pip", "rm"}
NOT_SERVING = {"disaggregated", "mm_embedding_serve", "--help", "-h"}
CONFIG = {"--extra_llm_api_options", "--config", "--extra-engine-args"}
OVERRIDES = "--override-engine-args"
ROLE_FLAGS = {"--server_role", "--disaggregation-mode"}
SCRIPT_KEYS = {"command", "args", "entrypoint"}
VARIABLE = re.compile(r"(?:-e|--env=)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
TEXT_KEY = re.compile(r"(?m)^[ \t]*[\"']?(\w+)[\"']?:(?=\s|$)")
GENERIC = {"model", "backend"}  # keys that any recipe has
DATA_FILE = re.compile(r"\.(ya?ml|json)$")


@dataclass(frozen=True)
class Origin:
    """Lines of a text in the file that carries it. `first` counts from 0, and each of the `lines` is indented by
    `indent`. Not `exact`: the text is quoted or folded, so its own lines and columns are not those of the file."""

    first: int = 0
    lines: int = 1
    indent: int = 0
    exact: bool = True

    def line(self, number: int) -> int:
        """The line of the file, both counted from 0."""
        return self.first + min(number, max(self.lines - 1, 0))

    def inner(self, first: int, text: str) -> Origin:
        """The origin of a text that begins at line `first` of this one."""
        lines = text.count("\n") if self.exact else self.lines
        return Origin(self.line(first), lines, self.indent + _indent(text), self.exact)


@dataclass(frozen=True)
class Carried:
    """An engine file (`text`, "" where only a command is here) and how it is served. `name`: the file's own name, as
    the carrier gives it. `words` are options of trtllm-serve, None where no command is known; `command` is their line,
    and `option_lines` has that of each. `partial`: the shell puts in more of them. `engine`: the program that serves.
    `elsewhere`: the engine file that the command names and that is not in this file. `environ`: the variables of the
    server with their lines. `unread`: why something was not read."""

    place: str
    text: str = ""
    origin: Origin = Origin()
    name: str = ""
    words: tuple[str, ...] | None = None
    command: int = 0
    option_lines: Mapping[str, int] = field(default_factory=dict)
    partial: bool = False
    engine: str = ""
    target: str | None = None
    head: str | None = None
    version: str | None = None
    elsewhere: str | None = None
    role: Role | None = None
    environ: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    unread: str = ""

    @property
    def line(self) -> int:
        return self.origin.first if self.text else self.command

    def written_into(self, original: str, text: str) -> str:
        """The original with `text` in place of this engine file, if it stands there as it is."""
        origin, kept = self.origin, original.splitlines(keepends=True)
        old = "".join(kept[origin.first : origin.first + origin.lines])
        if textwrap.dedent(old) != unmasked(self.text):
            return original
        new = textwrap.indent(unmasked(text), " " * origin.indent).splitlines(keepends=True)
        return "".join([*kept[: origin.first], *new, *kept[origin.first + origin.lines :]])


@functools.cache
def _engine_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Keys of the top level of an engine file, and keys of any level."""
    fields = schema_for(str(newest_known())).fields
    return frozenset(key for key in fields if "." not in key), frozenset(
        part for key in fields for part in key.split(".")
    )


def is_engine_file(keys: Iterable[str]) -> bool:
    """Whether these keys of a mapping are an engine's: one of its objects, or two settings that are half of all."""
    keys, (top, _) = set(keys), _engine_keys()
    known = (keys & top) - GENERIC
    objects = [key for key in known if key.endswith("_config")]
    return bool(objects) or (len(known) > 1 and 2 * len(known) >= len(keys))


def is_foreign(keys: Iterable[str]) -> bool:
    """Whether a mapping of several keys has no key of an engine, none of a front, and none that is spelled like one."""
    keys, (_, known) = set(keys), _engine_keys()
    if len(keys) < 2 or keys & (known | {"context_servers", "generation_servers"}):
        return False
    return not any(difflib.get_close_matches(key, known, n=1, cutoff=0.8) for key in keys)


def _is_engine_text(text: str) -> bool:
    """The same of a text, which may have an error in its syntax."""
    if ":" not in text:
        return False
    try:
        root, _ = compose(text)
    except YamlError:
        names = set(TEXT_KEY.findall(text))
        known = names & _engine_keys()[1]
        return len(known) > 1 and 2 * len(known) >= len(names)
    return root is not None and is_engine_file(pair.key_node.text for pair in root.pairs)


def carried(text: str) -> list[Carried]:
    """Every engine file and command in a text, by line; none for an engine file itself."""
    carrier = _Carrier(text)
    for first, chunk in _chunks(text):
        try:
            root = _root(chunk)
        except YamlError as error:
            carrier.read_script(chunk, Origin(first, chunk.count("\n") + 1))
            carrier.broken.append((first, error))
            continue
        if root is None or root.kind != "mapping":
            carrier.read_script(chunk, Origin(first, chunk.count("\n") + 1))
        elif is_engine_file(pair.key_node.text for pair in root.pairs):
            return []
        else:
            carrier.read_tree(root, chunk, first)
    return sorted(carrier.joined(), key=lambda part: part.line)


def role_in(*names: str) -> Role | None:
    """The role that the words of a path, a name or a flag tell."""
    words = [word for name in names for word in re.split(r"[^a-z]+", name.lower())]
    roles = {ROLES[word] for word in words if word in ROLES}
    return roles.pop() if len(roles) == 1 else None


def release_in(text: str) -> tuple[str | None, str]:
    """The engine's release by the tag of the one image in a text, and the tag of an image of Dynamo whose engine is not
    known. None for no image, for several, `latest`, a digest, or a release of long ago."""
    images = {(match["name"], match["tag"]) for match in IMAGE.finditer(text)}
    if len(images) != 1:
        return None, ""
    (name, tag), *_ = images
    if "runtime" in name:
        engine = dynamo_releases().get(VARIANT.sub("", tag))
        return engine, "" if engine or tag == "latest" else f"{name}:{tag}"
    with suppress(UsageError):
        return str(parse_version(tag)), ""
    return None, ""


def _chunks(text: str) -> Iterator[tuple[int, str]]:
    """The documents of a YAML stream, each with its first line; empty ones are left out."""
    lines = text.splitlines(keepends=True)
    starts = [0, *(at for at, line in enumerate(lines) if re.match(r"---(\s|$)", line))]
    for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        chunk = "".join(lines[begin:end])
        if re.search(r"^[^#\s-]", chunk, re.MULTILINE):
            yield begin, chunk


def _root(text: str) -> Node | None:
    """The tree of a document, with what a template puts in as plain scalars. Raises YamlError."""
    try:
        return compose(text)[0]
    except YamlError:
        if "{{" not in text:
            raise
        return compose(masked(text))[0]


def _walk(node: Node, path: tuple[str, ...], image: str) -> Iterator[tuple[Any, Node, str]]:
    """Every node with its path and the image of the container around it; not below an engine file."""
    for pair in node.pairs:
        if pair.key == "image" and pair.value_node.kind == "scalar":
            image = pair.value_node.text
    yield path, node, image
    if len(path) > 1 and is_engine_file(pair.key_node.text for pair in node.pairs):
        return
    for pair in node.pairs:
        yield from _walk(pair.value_node, (*path, pair.key_node.text), image)
    if node.kind == "sequence":
        for index, item in enumerate(node.items):
            yield from _walk(item, (*path, str(index)), image)


def _scalars(node: Node, name: str) -> list[Node]:
    """The scalars below a key: of a list, or the one."""
    values = [pair.value_node for pair in node.pairs if pair.key_node.text == name]
    items = [item for value in values for item in (value.items or [value])]
    return [item for item in items if getattr(item, "kind", "") == "scalar"]


class _Carrier:
    """What one file carries, as it is read."""

    def __init__(self, text: str) -> None:
        self.version, self.unknown_image = release_in(text)
        self.files: list[Carried] = []
        self.commands: list[Carried] = []
        self.others: list[
            Carried
        ] = []  # files without an engine's keys, unless a command names them
        self.variables: list[tuple[str, str, int, Role | None]] = []
        self.broken: list[tuple[int, YamlError]] = []
        self.target = self.head = None

    def read_tree(self, root: Node, text: str, first: int) -> None:
        model, image = root.value.get("model"), root.value.get("image")
        if isinstance(model, dict) and isinstance(image, dict):  # values of our chart
            self.version = str(image.get("tag") or "") or None
            self.target, self.head = model.get("target"), model.get("head")
        encoded = root.value.get("kind") == "Secret"
        lines = text.splitlines(keepends=True)
        for path, node, image in _walk(root, (), ""):
            place, line = ".".join(path), first + node.line
            if node.kind == "mapping":
                self._read_mapping(path, node, image, text, first)
            elif node.kind == "scalar" and node.text:
                exact = node.style == "|"
                begin = node.line + 1 if node.style in BLOCK else node.line
                end = node.line + 1 + text.count("\n", node.start, node.end)
                origin = Origin(first + begin, max(end - begin, 1), exact=exact)
                if exact:
                    origin = replace(origin, indent=_indent("".join(lines[begin:end])))
                inner = node.text
                if encoded and path[0] == "data":
                    with suppress(binascii.Error, UnicodeDecodeError):
                        inner = base64.b64decode(node.text, validate=True).decode()
                        origin = Origin(line, exact=False)
                commands = not SCRIPT_KEYS.isdisjoint(path[-2:]) or "\n" in inner.strip()
                self._read_text(inner, origin, place, path[-1], commands, image)

    def _read_mapping(
        self, path: tuple[str, ...], node: Node, image: str, text: str, first: int
    ) -> None:
        name = path[-1] if path else ""
        if name in ("env", "environment") or name.endswith("_environment"):
            for pair in node.pairs:
                self._set(
                    pair.key_node.text, pair.value_node.text, first + pair.key_node.line, path
                )
        variable = [item.text for key in ("name", "value") for item in _scalars(node, key)]
        if "env" in path[-2:] and len(variable) == 2:
            self._set(variable[0], variable[1], first + node.line, path)
        if len(path) > 1 and is_engine_file(pair.key_node.text for pair in node.pairs):
            flow = node.style == "flow"
            inner = text[node.start : node.end]
            end = node.line + 1 + inner.count("\n")
            if not flow:
                inner = textwrap.dedent("".join(text.splitlines(keepends=True)[node.line : end]))
            origin = Origin(first + node.line, end - node.line, node.column, exact=not flow)
            self.files.append(Carried(".".join(path), inner, origin, name, role=role_in(*path)))
        words = [
            Word(item.text, first + item.line)
            for key in ("command", "args")
            for item in _scalars(node, key)
        ]
        if len(words) > 1 and not any("\n" in word.text or word.text == "-c" for word in words):
            self._read_command(words, image, path, Origin(first + node.line))

    def read_script(self, text: str, origin: Origin, image: str = "") -> None:
        assigned: dict[str, str] = {}
        found = statements(text)
        for statement in found:
            for word in statement.words:
                if variable := VARIABLE.fullmatch(word.text):
                    assigned[variable["name"]] = variable["value"]
                    self._set(variable["name"], variable["value"], origin.line(word.line), ())
        for statement in found:
            self._read_statement(statement, origin, image, assigned)

    def _read_statement(
        self, statement: Statement, origin: Origin, image: str, assigned: dict[str, str]
    ) -> None:
        def resolved(text: str) -> str:
            """With the variables of which the script says the value."""
            return re.sub(r"\$\{?(\w+)\}?", lambda match: assigned.get(match[1], match[0]), text)

        into = resolved(statement.into)
        for body in statement.bodies:
            text = masked(body.text) if body.expands else body.text
            place = into or f"line {origin.line(statement.line) + 1}"
            inside = origin.inner(body.first, body.text)
            self._read_text(textwrap.dedent(text), inside, place, into, True, image)
        words = [word for word in statement.words if word.text]
        program = words[0].text if words else ""
        for word in words:
            text = word.text
            if program in ("printf", "echo") and into:
                text = text.replace("\\n", "\n")
            if VARIABLE.fullmatch(text):
                text = VARIABLE.sub(r"\g<value>", text)
            if "\n" in text or (" " in text and any(name in text for name in PROGRAMS)):
                inside = replace(origin, first=origin.line(word.line),
                                 lines=word.text.count("\n") + 1, exact=text == word.text)  # fmt: skip
                place = into or f"line {inside.first + 1}"
                self._read_text(masked(text), inside, place, into, program != "echo", image)
        if program not in NOT_LAUNCHED:
            named = [Word(resolved(word.text) if "/" not in word.text else word.text, word.line)
                     for word in words]  # fmt: skip
            self._read_command(named, image, (), origin)

    def _read_text(
        self, text: str, origin: Origin, place: str, name: str, commands: bool, image: str
    ) -> None:
        """A text of its own, as an engine file or as a script."""
        part = Carried(place, text, origin, name, role=role_in(place))
        if _is_engine_text(text):
            self.files.append(replace(part, unread=_unread_lines(text)))
        elif commands and any(program in text for program in (*PROGRAMS, "<<")):
            self.read_script(unmasked(text), origin, image)
        elif DATA_FILE.search(name):
            self.others.append(part)

    def _read_command(
        self, words: list[Word], image: str, path: tuple[str, ...], origin: Origin
    ) -> None:
        names = [PurePath(word.text).name for word in words]
        start = next((index for index, name in enumerate(names) if name in PROGRAMS), None)
        if start is None:
            return
        engine, rest = names[start], words[start + 1 :]
        if engine == "vllm" and [word.text for word in rest[:1]] != ["serve"]:
            return
        if [word.text for word in rest[:1]] == ["serve"]:
            rest = rest[1:]
        if not NOT_SERVING.isdisjoint(word.text for word in rest):
            return
        line = words[start].line if path else origin.line(words[start].line)
        command = Carried(f"`{engine}{' serve' * (engine == 'vllm')}`", words=(), command=line,
                          engine=engine, version=release_in(image)[0] or self.version)  # fmt: skip
        self.commands.append(self._with_options(command, rest, path, origin))

    def _with_options(
        self, command: Carried, rest: list[Word], path: tuple[str, ...], origin: Origin
    ) -> Carried:
        target, config, role = command.target, None, role_in(*path)
        if rest and not rest[0].text.startswith("-") and "@" not in rest[0].text:
            target = rest.pop(0).text
        options: list[str] = []
        option_lines: dict[str, int] = {}
        partial, dynamo = False, command.engine == "dynamo.trtllm"
        while rest:
            word = rest.pop(0)
            flag, equals, value = word.text.partition("=")
            values = [value] if equals else []
            while not equals and rest and not re.match(r"-\D", rest[0].text):
                values.append(rest.pop(0).text)
            # a variable behind a word that takes no value, or an array of the shell, holds further options
            partial |= "@" in "".join((flag, *values)) or flag.startswith("$")
            partial |= any(value.startswith("$") for value in values[1:])
            partial |= flag == "--trust_remote_code" and bool(values)
            ours = DYNAMO_FLAGS.get(flag, "") if dynamo else flag
            if flag in ROLE_FLAGS and values:
                role = role_in(values[0]) or role
            if flag in CONFIG and values:
                config = values[0]
                self._read_inline(config, flag, word.line if path else origin.line(word.line))
            elif flag == "--model-path" and values:
                target = values[0]
            elif flag == OVERRIDES:
                self._read_inline(
                    " ".join(values), flag, word.line if path else origin.line(word.line)
                )
                options += ["--trust_remote_code"] * (
                    '"trust_remote_code": true' in " ".join(values)
                )
            elif ours and not any("$" in item or "{{" in item for item in (flag, *values)):
                options += [ours, *values]
                option_lines[ours] = word.line if path else origin.line(word.line)
        return replace(command, words=tuple(options), option_lines=option_lines, target=target,
                       elsewhere=config, partial=partial, role=role)  # fmt: skip

    def _read_inline(self, text: str, flag: str, line: int) -> None:
        if text.startswith("{"):
            name = text if flag in CONFIG else flag
            self.files.append(Carried(flag, masked(text), Origin(line, exact=False), name))

    def _set(self, name: str, value: str, line: int, path: Iterable[str]) -> None:
        self.variables.append((name, value, line, role_in(*path)))

    def joined(self) -> Iterator[Carried]:
        """Each engine file with the command that names it, and each command whose file is not here."""
        commands = [command for command in self.commands if command.engine != "vllm"]
        served = [command.elsewhere for command in self.commands if command.elsewhere]
        self.files += [
            part for part in self.others if any(_same_file(name, part.name) for name in served)
        ]
        own = [part for part in self.files if not part.name.startswith(OVERRIDES)]
        alone = len(own) == len(self.commands) == 1
        used: list[Carried] = []
        for part in self.files:
            named = [
                command
                for command in self.commands
                if _same_file(command.elsewhere or "", part.name) or (alone and part in own)
            ]
            used += named
            for command in named or [Carried("")]:
                yield self._served(part, command)
        for command in commands:
            if command not in used:
                yield self._served(command, command)
        if self.broken and (self.files or self.commands):
            for first, error in self.broken:
                if not any(part.line >= first for part in (*self.files, *self.commands)):
                    yield Carried(f"line {first + error.line}", command=first + error.line - 1,
                                  unread=f"this document is not YAML: {error.message}")  # fmt: skip
        if self.unknown_image and (self.files or self.commands):
            yield Carried(
                self.unknown_image, unread="which TensorRT-LLM this image carries is not known"
            )

    def _served(self, part: Carried, command: Carried) -> Carried:
        role = part.role or command.role
        environ = {
            name: (value, line)
            for name, value, line, own in self.variables
            if role is None or own is None or own == role
        }
        return replace(
            part,
            words=command.words,
            command=command.command,
            option_lines=command.option_lines,
            partial=command.partial,
            engine=command.engine,
            target=self.target or command.target,
            head=self.head,
            version=command.version or self.version,
            role=role,
            environ=environ,
        )


def _indent(text: str) -> int:
    """Of the first line that is not empty."""
    filled = next((line for line in text.splitlines() if line.strip()), "")
    return len(filled) - len(filled.lstrip(" "))


def _unread_lines(text: str) -> str:
    lines = re.findall(rf"{OMITTED}({MASK}+)", text)
    if not lines:
        return ""
    return f"{', '.join(map(unmasked, lines))}: lines that only the shell or the template knows"


def _same_file(name: str, other: str) -> bool:
    return bool(name and other) and (name == other or PurePath(name).name == PurePath(other).name)
