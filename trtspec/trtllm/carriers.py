"""Engine files inside what carries them: values of a chart, manifests, Slurm recipes and shell scripts. `carried` finds
each with its place, so that a finding names its line of the original and a correction is written there.

One walk over the carrier: whatever text or mapping has an engine's keys is an engine file, at any depth and in any
quoting. A command gives its options, the target, the engine file that it names, the role and the release; the
environment gives its variables.
"""

from __future__ import annotations

import base64
import difflib
import functools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from trtspec.errors import UsageError
from trtspec.trtllm.deployment import ROLES, dynamo_flags, dynamo_options, dynamo_releases
from trtspec.trtllm.intent import Role
from trtspec.trtllm.nodes import BLOCK, Node, YamlError, compose
from trtspec.trtllm.schema import option_names, parse_version, releases, schema_for
from trtspec.trtllm.shell import (
    HEREDOC,
    INTO,
    MASK,
    OMITTED,
    REDIRECTED,
    ShellWord,
    masked,
    statements,
    unmasked,
)

IMAGE = re.compile(r"(?P<name>tensorrt-?llm[\w./-]*):(?P<tag>\w[\w.-]*)")
VARIANT = re.compile(r"-(efa|cuda)[\w-]*$")  # of an image's tag, with the same engine
DYNAMO, VLLM = "dynamo.trtllm", "vllm"
PROGRAMS = ("trtllm-serve", DYNAMO, VLLM)
NOT_SERVING = frozenset(
    (
        "disaggregated",
        "mm_embedding_serve",
        "--help",
        "-h",
        "which",
        "pkill",
        "pgrep",
        "grep",
        "rm",
    )
)
LAUNCH = re.compile(r"(?:trtllm-serve|dynamo\.trtllm|vllm)\s|<<")
NESTED = re.compile(rf"\n|\\n|{LAUNCH.pattern}")
PRINTS = ("echo", "printf")
CONFIG = ("--config", "--extra_llm_api_options")
OVERRIDES = "--override-engine-args"
SCRIPT_KEYS = {"command", "args", "entrypoint"}
VARIABLE = re.compile(r"(?:-e|--env=)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
UNKNOWN = re.compile(rf"\$|\{{\{{|^\{{\w+\}}$|{MASK}")  # of the shell or of a template
TEXT_KEY = re.compile(r"(?m)^[ \t]*[\"']?(\w+)[\"']?:(?=\s|$)")
FRONT_KEYS = {"context_servers", "generation_servers"}
MAX_COMPARED = 20  # keys of a file that are compared with those of an engine by their spelling
GENERIC = {"model", "backend"}  # keys that any recipe has
UNKNOWN_FLAG = "the worker is not known to have this option (`python3 -m dynamo.trtllm --help`)"
UNKNOWN_IMAGE = "this image is not known to carry a release that can be judged"
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

    def column(self, number: int) -> int | None:
        return number + self.indent if self.exact else None

    def inner(self, first: int, text: str) -> Origin:
        """The origin of a text that begins at line `first` of this one."""
        lines = text.count("\n") if self.exact else self.lines
        return Origin(self.line(first), lines, self.indent + _indent(text), self.exact)


@dataclass
class Command:
    """The line that serves, without `engine` if there is none. `words`: options of trtllm-serve, with the line of each
    in `option_lines`. `partial`: the shell puts in more of them. `config`: the engine file that it names."""

    engine: str = ""
    line: int = 0
    role: Role | None = None
    words: list[str] = field(default_factory=list)
    option_lines: dict[str, int] = field(default_factory=dict)
    partial: bool = False
    target: str = ""
    config: str = ""


@dataclass(frozen=True)
class Carried:
    """An engine file (`text`, "" where only a command is here) and the `command` that serves it. `name`: the file's own
    name, as the carrier gives it. `environ`: the lines of the server's variables, from 1. `unread`: why something was
    not read."""

    place: str
    text: str = ""
    origin: Origin = Origin()
    name: str = ""
    command: Command = field(default_factory=Command)
    target: str = ""
    head: str = ""
    version: str | None = None
    role: Role | None = None
    environ: Mapping[str, int] = field(default_factory=dict)
    unread: str = ""

    @property
    def line(self) -> int:
        """The line at which the file begins, or else the command, from 0."""
        return self.command.line if self.command.engine and not self.text else self.origin.first

    def written_into(self, original: str, text: str) -> str:
        """The original with `text` in place of this engine file, if its text there is the same."""
        origin, kept = self.origin, original.splitlines(keepends=True)
        last = origin.first + origin.lines
        if textwrap.dedent("".join(kept[origin.first : last])) != unmasked(self.text):
            return original
        kept[origin.first : last] = [textwrap.indent(unmasked(text), " " * origin.indent)]
        return "".join(kept)


@functools.cache
def _engine_keys() -> tuple[frozenset[str], frozenset[str]]:
    """Keys of the top level of an engine file, and keys of any level."""
    fields = schema_for(str(releases()[-1])).fields
    names = frozenset(part for key in fields for part in key.split("."))
    return names & fields.keys(), names


def is_engine_file(keys: Iterable[str]) -> bool:
    """Whether these keys of a mapping are an engine's: one of its objects, or two settings that are half of all."""
    keys = set(keys)
    known = (keys & _engine_keys()[0]) - GENERIC
    objects = [key for key in known if key.endswith("_config")]
    return bool(objects) or len(keys) <= 2 * len(known) > 2


def is_foreign(keys: Iterable[str]) -> bool:
    """Whether a mapping has several keys that no engine or front has, none of them spelled like one, and no key of one
    but GENERIC ones."""
    keys, known = set(keys), _engine_keys()[1]
    others = keys - known
    if len(others) < 2 or not keys.isdisjoint(known - GENERIC | FRONT_KEYS):
        return False
    compared = [*others][:MAX_COMPARED]
    return not any(difflib.get_close_matches(key, known, n=1, cutoff=0.8) for key in compared)


def carried(text: str) -> list[Carried]:
    """Every engine file and command in a text, by line; none for an engine file itself."""
    carrier, first = _Carrier(text), 0
    for document in re.split(r"^(?=---\s)", text, flags=re.MULTILINE):
        lines = document.count("\n")
        carrier.read_document(document, Origin(first, lines + 1))
        first += lines
    return sorted(carrier.joined(), key=lambda part: part.line)


def role_in(*names: str) -> Role | None:
    """The role that the words of a path, a name or a flag tell."""
    words = re.split(r"[^a-z]+", " ".join(names).lower())
    roles = {ROLES[word] for word in words if word in ROLES}
    return roles.pop() if len(roles) == 1 else None


def release_in(text: str) -> tuple[str | None, str]:
    """The engine's release by the tag of the one image in a text, and the tag of an image of Dynamo whose engine is not
    known. None for no image, for several, a digest, or a release of long ago."""
    images = set(IMAGE.findall(text))
    if len(images) != 1:
        return None, ""
    (name, tag), *_ = images
    if "runtime" in name:
        engine = dynamo_releases().get(VARIANT.sub("", tag))
        return engine, "" if engine else f"{name}:{tag}"
    with suppress(UsageError):
        return str(parse_version(tag)), ""
    return None, ""


class _Carrier:
    """What one file carries, as it is read."""

    def __init__(self, text: str) -> None:
        self.version, unknown = release_in(text)
        self.files: list[Carried] = []
        self.commands: list[Command] = []
        self.others: list[Carried] = []  # texts that are engine files only if a command names them
        self.notes = [Carried(unknown, unread=UNKNOWN_IMAGE)] if unknown else []
        self.variables: list[tuple[str, str, int]] = []
        self.target = self.head = ""
        self.whole = False  # whether the text is an engine file itself
        # mappings of the top level that are no engine file: of a front, or around everything else, which is a mistake
        self.settings = FRONT_KEYS

    def read_document(self, text: str, origin: Origin) -> None:
        """A document of the file: a script, or a tree with engine files and commands in it."""
        before = len(self.files) + len(self.commands)
        hidden = masked(text)
        root, fault = None, None
        try:
            root, _ = compose(hidden)
        except YamlError as error:
            fault = error
        if root is None or root.kind != "mapping":
            self._read_script(Carried("", text, origin))
            if fault and before == len(self.files) + len(self.commands):
                unread = f"this document is not YAML: {fault.message}"
                line = origin.line(fault.line - 1)
                self.notes.append(Carried(f"line {line + 1}", origin=Origin(line), unread=unread))
            return
        self.whole |= is_engine_file(_keys(root))
        model, image = root.value.get("model"), root.value.get("image")
        if isinstance(model, dict) and isinstance(image, dict):  # values of our chart
            self.version = str(image.get("tag") or "") or None
            self.target, self.head = model.get("target") or "", model.get("head") or ""
        secret = root.value.get("kind") == "Secret"
        if len(root.pairs) == 1:
            self.settings = set(_keys(root))
        for path, node in _walk(root, ()):
            part = Carried(".".join(path), name="".join(path[-1:]), role=role_in(*path),
                           origin=_origin(node, hidden, origin))  # fmt: skip
            if node.kind == "scalar":
                commands = not SCRIPT_KEYS.isdisjoint(path[-2:]) or "\n" in node.text.strip()
                text = _decoded(node.text) if secret else node.text
                self._read_text(replace(part, text=text), commands)
            else:
                self._read_collection(part, node, hidden, origin)

    def _read_collection(self, part: Carried, node: Node, text: str, origin: Origin) -> None:
        if part.name == "env" or part.name.endswith("environment"):
            for name, value, line in _environment(node):
                self.variables.append((name, unmasked(value), origin.line(line)))
        if part.place not in self.settings and is_engine_file(_keys(node)):
            inner = text[node.start : node.end]
            if node.style != "flow":
                inner = textwrap.dedent(" " * node.column + inner) + "\n"
            self.files.append(replace(part, text=inner))
        words = [
            ShellWord(unmasked(item.text), origin.line(item.line))
            for key in ("command", "args")
            for item in _scalars(node, key)
        ]
        if not any("\n" in word.text or word.text == "-c" for word in words):
            self._read_command(words, part)

    def _read_script(self, part: Carried) -> None:
        def read_body(match: re.Match[str]) -> str:
            """Reads a here-document, and leaves its lines empty."""
            opened = part.text.rfind("\n", 0, match.start()) + 1
            into = INTO.findall(part.text, opened, match.start("body"))
            body, first = match["body"], part.text.count("\n", 0, match.start("body"))
            text = textwrap.dedent(body if match["quote"] else masked(body))
            self._read_inside(part, "".join(into[:1]), text, part.origin.inner(first, body), True)
            return match["behind"] + "\n" * body.count("\n")

        for words in statements(HEREDOC.sub(read_body, part.text), part.origin.line):
            texts = [*(word.text for word in words), REDIRECTED, ""]
            end = texts.index(REDIRECTED)
            into, prints = texts[end + 1], texts[0] in PRINTS
            for word in words[:end]:
                text, variable = word.text, VARIABLE.fullmatch(word.text)
                if variable:
                    text = variable["value"]
                    self.variables.append((variable["name"], text, word.line))
                text = text.removeprefix("$(")
                if NESTED.search(text) and len(text) < len(part.text):
                    origin = Origin(word.line, word.text.count("\n") + 1, exact=False)
                    text = masked(text.replace("\\n", "\n"))
                    self._read_inside(part, into, text, origin, not prints)
            if not prints:
                self._read_command(words[:end], part)

    def _read_inside(
        self, part: Carried, into: str, text: str, origin: Origin, commands: bool
    ) -> None:
        """A text inside a script, which goes `into` a file."""
        place = into or f"line {origin.first + 1}"
        inside = replace(part, place=place, name=into, role=role_in(into), text=text, origin=origin)
        self._read_text(inside, commands)

    def _read_text(self, part: Carried, commands: bool) -> None:
        """A text of its own: an engine file, or a script where it may have `commands`."""
        if _is_engine_text(part.text):
            count = part.text.count(OMITTED)
            unread = f"{count} lines that only the shell or the template knows" if count else ""
            self.files.append(replace(part, unread=unread))
        elif commands and LAUNCH.search(unmasked(part.text)):
            self._read_script(replace(part, text=unmasked(part.text)))
        elif DATA_FILE.search(part.name):
            self.others.append(part)

    def _read_command(self, words: list[ShellWord], part: Carried) -> None:
        names = [PurePath(word.text).name for word in words]
        start = next((n for n, name in enumerate(names) if name in PROGRAMS), len(names))
        engine, following, *_ = [*names[start:], "", ""]
        serves = following == "serve"
        if not engine or not NOT_SERVING.isdisjoint(names) or (engine == VLLM and not serves):
            return
        command = Command(engine, words[start].line, part.role)
        self.commands.append(command)
        words = words[start + 1 + serves :]
        command.partial = any("@" in word.text for word in words)  # an array of the shell
        if words and not re.match(r"-|.*@", words[0].text):
            command.target = words.pop(0).text
        for flag, values, number in _options(words):
            self._read_option(command, flag, values, number)

    def _read_option(self, command: Command, flag: str, values: list[str], line: int) -> None:
        value = " ".join(values)
        # a variable behind a value, or behind a word that takes none, holds further options
        free = values if flag == "--trust_remote_code" else [flag, *values[1:]]
        command.partial |= any(text.startswith("$") for text in free)
        if command.engine == DYNAMO:
            if flag.replace("--no-", "--") not in dynamo_flags():
                self.notes.append(Carried(flag, origin=Origin(line), unread=UNKNOWN_FLAG))
            flag = dynamo_options().get(flag, "")
        if value.startswith("{") and flag in (*CONFIG, OVERRIDES):
            self.files.append(Carried(flag, masked(value), Origin(line, exact=False), values[0]))
        if flag == "--server_role":
            command.role = role_in(value) or command.role
            if command.engine == DYNAMO:
                return  # whose words for the roles are its own
        if flag in CONFIG:
            command.config = "".join(values[:1])
        elif flag == OVERRIDES and '"trust_remote_code": true' in value:
            command.words.append("--trust_remote_code")
        elif flag == "--model":
            command.target = value
        elif flag and not UNKNOWN.search(value if flag in option_names() else flag):
            command.words += [flag, *values]
            command.option_lines[flag] = line

    def joined(self) -> Iterator[Carried]:
        """Each engine file with the command that names it, and each command whose file is not here."""
        if self.whole:
            return
        commands = [
            (command, self._file_name(command.config, command.line)) for command in self.commands
        ]
        served = {name for _, name in commands}
        files = self.files + [part for part in self.others if part.name in served]
        alone = len(files) == len(commands) == 1
        lonely = self.commands
        for part in files:
            name = self._file_name(part.name, part.line)
            named = [each for each, wanted in commands if alone or (name and wanted == name)]
            lonely = [command for command in lonely if command not in named]
            for command in named or [Command()]:
                yield self._served(part, command)
        for command in lonely:
            yield self._served(Carried(f"`{command.engine}`"), command)
        if files or commands:
            yield from self.notes

    def _file_name(self, text: str, line: int) -> str:
        return PurePath(self._value(text, line)).name

    def _value(self, text: str, line: int) -> str:
        """The text itself; of a variable, the value that the carrier gives it nearest to this line."""
        values = [
            (abs(line - at), value)
            for name, value, at in self.variables
            if text in (f"${name}", f"${{{name}}}")
        ]
        return min(values)[1] if values else text

    def _served(self, part: Carried, command: Command) -> Carried:
        target = self.target or self._value(command.target, command.line)
        environ = {name: line + 1 for name, value, line in self.variables if value}
        return replace(
            part, command=command, version=self.version, head=self.head, environ=environ,
            target="" if UNKNOWN.search(target) else target, role=part.role or command.role,
        )  # fmt: skip


def _is_engine_text(text: str) -> bool:
    """Whether a text is an engine file, which may have an error in its syntax."""
    try:
        root, _ = compose(text if ":" in text else "")
    except YamlError:
        names = set(TEXT_KEY.findall(text))
        return len(names) <= 2 * len(names & _engine_keys()[1]) > 2
    return root is not None and is_engine_file(_keys(root))


def _keys(node: Node) -> list[str]:
    return [pair.key_node.text for pair in node.pairs]


def _walk(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Every node with its path; not below an engine file."""
    if path:
        yield path, node
        if is_engine_file(_keys(node)):
            return
    inner = [(pair.key_node.text, pair.value_node) for pair in node.pairs]
    if node.kind == "sequence":
        inner = [(str(index), item) for index, item in enumerate(node.items)]
    for name, item in inner:
        yield from _walk(item, (*path, name))


def _scalars(node: Node, name: str) -> list[Node]:
    """The scalars below a key: of a list, or the one."""
    values = [pair.value_node for pair in node.pairs if pair.key_node.text == name]
    items = [item for value in values if value.kind == "sequence" for item in value.items]
    return [item for item in (*values, *items) if item.kind == "scalar"]


def _options(words: list[ShellWord]) -> Iterator[tuple[str, list[str], int]]:
    """Each option with its values and line: `--flag value` or `--flag=value`."""
    while words:
        word = words.pop(0)
        flag, equals, value = word.text.partition("=")
        values = [value] if equals else []
        while not equals and words and not re.match(r"-\D", words[0].text):
            values.append(words.pop(0).text)
        yield flag, values, word.line


def _origin(node: Node, text: str, around: Origin) -> Origin:
    """The lines of a node."""
    block = node.style in BLOCK
    indent = _indent(text[node.start : node.end].partition("\n")[2]) if block else node.column
    lines = text.count("\n", node.start, node.end) + (not block)
    exact = node.style == "|" or (node.kind == "mapping" and not node.style)
    return Origin(around.first + node.line + block, lines, indent, exact)


def _environment(node: Node) -> Iterator[tuple[str, str, int]]:
    """Variables of a mapping, of a list of names with values, and of a list of texts, each with its line."""
    for pair in node.pairs:
        yield pair.key_node.text, pair.value_node.text, pair.key_node.line
    for item in node.items if node.kind == "sequence" else ():
        named = [part.text for key in ("name", "value") for part in _scalars(item, key)]
        variable = VARIABLE.fullmatch("=".join(named) or item.text)
        if variable:
            yield variable["name"], variable["value"], item.line


def _decoded(text: str) -> str:
    """A value of a Secret; the text itself if it is not in base64."""
    with suppress(ValueError):
        return base64.b64decode(text, validate=True).decode()
    return text


def _indent(text: str) -> int:
    """Of the first line that is not empty."""
    first = re.search(r"^( *)\S", text, re.MULTILINE)
    return len(first[1]) if first else 0
