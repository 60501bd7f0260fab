"""Engine files inside their carriers: values of a chart, manifests, Slurm recipes and scripts.

`carried` finds each file with its lines in the carrier, so that a finding names a line of the
original and a correction is written there.

It walks over the carrier once. Every text or mapping with an engine's keys is an engine file, at
any depth and in any quoting. A command gives its options, the target, the engine file that it
names, the role and the release. The environment gives its variables.
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
from trtspec.trtllm.deployment import ROLES, dynamo_options, dynamo_releases
from trtspec.trtllm.intent import Role
from trtspec.trtllm.nodes import BLOCK, Node, YamlError, compose
from trtspec.trtllm.schema import (
    option_names,
    parse_version,
    read_beside,
    releases,
    schema_for,
)
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
DYNAMO = "dynamo.trtllm"
VLLM = "vllm"
PROGRAMS = ("trtllm-serve", DYNAMO, VLLM)
NOT_SERVING = {
    "disaggregated", "mm_embedding_serve", "--help", "-h", "which", "pkill", "pgrep", "grep", "rm",
}  # fmt: skip
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
    """The lines of a text in the file that carries it.

    Args:
        first: counts from 0.
        lines: how many.
        indent: spaces before each line.
        exact: false if the text is quoted or folded, so that the file has other lines and columns.
    """

    first: int = 0
    lines: int = 1
    indent: int = 0
    exact: bool = True

    def line(self, number: int) -> int:
        """The line of the file for a line of the text, both counted from 0."""
        last = max(self.lines - 1, 0)
        return self.first + min(number, last)

    def column(self, number: int) -> int | None:
        return number + self.indent if self.exact else None

    def inner(self, first: int, text: str) -> Origin:
        """The origin of a text that begins at line `first` of this one."""
        lines = text.count("\n") if self.exact else self.lines
        return Origin(self.line(first), lines, self.indent + _indent(text), self.exact)


@dataclass
class Command:
    """The command that serves.

    Args:
        engine: its program, "" if there is no command.
        words: options of trtllm-serve.
        option_lines: the line of each option, from 0.
        partial: the shell adds more options.
        config: the engine file that it names.
    """

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
    """An engine file and the command that serves it.

    Args:
        location: dotted path, line, option or file in the carrier, "" for the carrier itself.
        text: the engine file, "" if only a command is here.
        name: the file's own name, as the carrier gives it.
        environ: the lines of the server's variables, from 1.
        unread: why something was not read.
    """

    location: str
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
        """The first line of the file, else the line of the command, from 0."""
        if self.command.engine and not self.text:
            return self.command.line
        return self.origin.first

    def written_into(self, original: str, text: str) -> str:
        """The original with `text` in place of this engine file, if its text there is the same."""
        lines = original.splitlines(keepends=True)
        first = self.origin.first
        end = first + self.origin.lines
        before = textwrap.dedent("".join(lines[first:end]))
        if before != unmasked(self.text):
            return original
        indent = " " * self.origin.indent
        lines[first:end] = [textwrap.indent(unmasked(text), indent)]
        return "".join(lines)


@functools.cache
def _engine_keys() -> tuple[frozenset[str], frozenset[str]]:
    """(keys of the top level of an engine file, keys of any level)."""
    fields = schema_for(str(releases()[-1])).fields
    names: set[str] = set()
    for key in fields:
        names.update(key.split("."))
    return frozenset(names & fields.keys()), frozenset(names)


def is_engine_file(keys: Iterable[str]) -> bool:
    """Whether the keys of a mapping are an engine's.

    They are if one is an object of the engine, or if at least two and half of them are settings.
    """
    keys = set(keys)
    top_keys, _ = _engine_keys()
    known = (keys & top_keys) - GENERIC
    objects = [key for key in known if key.endswith("_config")]
    return bool(objects) or len(keys) <= 2 * len(known) > 2


def is_foreign(keys: Iterable[str]) -> bool:
    """Whether the keys of a mapping are another tool's.

    True if a key is unknown to every engine and front, no unknown key is spelled like a known one,
    and the known keys are GENERIC.
    """
    keys = set(keys)
    _, known = _engine_keys()
    others = keys - known
    if not others or not keys.isdisjoint(known - GENERIC | FRONT_KEYS):
        return False
    compared = sorted(others)[:MAX_COMPARED]
    return not any(difflib.get_close_matches(key, known, n=1, cutoff=0.8) for key in compared)


def carried(text: str) -> list[Carried]:
    """Every engine file and command in a text, by line. [] for an engine file itself."""
    carrier = _Carrier(text)
    first = 0
    for document in re.split(r"^(?=---\s)", text, flags=re.MULTILINE):
        lines = document.count("\n")
        carrier.read_document(document, Origin(first, lines + 1))
        first += lines
    return sorted(carrier.joined(), key=lambda part: part.line)


def role_in(*names: str) -> Role | None:
    """The role in the words of a path, a name or a flag. None for no role or several."""
    words = re.split(r"[^a-z]+", " ".join(names).lower())
    roles = {ROLES[word] for word in words if word in ROLES}
    return roles.pop() if len(roles) == 1 else None


def release_in(text: str) -> tuple[str | None, str]:
    """(the engine's release by the tag of the only image in a text, an unknown image of Dynamo).

    None for no image, for several, for a digest and for a very old release.
    """
    images = set(IMAGE.findall(text))
    if len(images) != 1:
        return None, ""
    [(name, tag)] = images
    if "runtime" in name:
        engine = dynamo_releases().get(VARIANT.sub("", tag))
        unknown = "" if engine else f"{name}:{tag}"
        return engine, unknown
    with suppress(UsageError):
        return str(parse_version(tag)), ""
    return None, ""


class _Carrier:
    """The engine files and commands of one file, as it is read."""

    def __init__(self, text: str) -> None:
        self.version, unknown_image = release_in(text)
        self.files: list[Carried] = []
        self.commands: list[Command] = []
        self.others: list[Carried] = []  # texts that are engine files only if a command names them
        self.notes: list[Carried] = []
        if unknown_image:
            self.notes.append(Carried(unknown_image, unread=UNKNOWN_IMAGE))
        self.variables: list[tuple[str, str, int]] = []  # name, value and line from 0
        self.target = ""
        self.head = ""
        self.whole = False  # whether the text is an engine file itself
        # mappings of the top level that are no engine file: of a front, or around everything else,
        # which is a mistake
        self.settings = FRONT_KEYS

    def read_document(self, text: str, origin: Origin) -> None:
        """Reads a document of the file: a script, or a tree with engine files and commands."""
        before = len(self.files) + len(self.commands)
        hidden = masked(text)
        root = None
        fault = None
        try:
            root, _ = compose(hidden)
        except YamlError as error:
            fault = error
        if root is not None and root.kind == "mapping":
            self._read_tree(root, hidden, origin)
            return
        self._read_script(Carried("", text, origin))
        if fault and before == len(self.files) + len(self.commands):
            unread = f"this document is not YAML: {fault.message}"
            line = origin.line(fault.line - 1)
            self.notes.append(Carried(f"line {line + 1}", origin=Origin(line), unread=unread))

    def _read_tree(self, root: Node, text: str, origin: Origin) -> None:
        """Reads every text and mapping below `root`. `text`: of the document, masked."""
        keys = _keys(root)
        self.whole |= is_engine_file(keys)
        values = root.value
        model = values.get("model")
        image = values.get("image")
        if isinstance(model, dict) and isinstance(image, dict):  # values of our chart
            self.version = str(image.get("tag") or "") or None
            self.target = model.get("target") or ""
            self.head = model.get("head") or ""
        is_secret = values.get("kind") == "Secret"
        if len(keys) == 1:
            self.settings = set(keys)
        for path, node in _walk(root, ()):
            part = Carried(
                ".".join(path), name="".join(path[-1:]), role=role_in(*path),
                origin=_origin(node, text, origin),
            )  # fmt: skip
            if node.kind == "scalar":
                written = node.text
                commands = not SCRIPT_KEYS.isdisjoint(path[-2:]) or "\n" in written.strip()
                if is_secret:
                    written = _decoded(written)
                self._read_text(replace(part, text=written), commands)
            else:
                self._read_collection(part, node, text, origin)

    def _read_collection(self, part: Carried, node: Node, text: str, origin: Origin) -> None:
        """Reads variables, an engine file and a command in a mapping or sequence."""
        if part.name == "env" or part.name.endswith("environment"):
            for name, value, line in _environment(node):
                self.variables.append((name, unmasked(value), origin.line(line)))
        if part.location not in self.settings and is_engine_file(_keys(node)):
            inner = text[node.start : node.end]
            if node.style != "flow":
                first_indent = " " * node.column
                inner = textwrap.dedent(first_indent + inner) + "\n"
            self.files.append(replace(part, text=inner))
        words = []
        for item in (*_scalars(node, "command"), *_scalars(node, "args")):
            words.append(ShellWord(unmasked(item.text), origin.line(item.line)))
        if not any("\n" in word.text or word.text == "-c" for word in words):
            self._read_command(words, part)

    def _read_script(self, part: Carried) -> None:
        """Reads the commands of a script, and the texts that it writes into files."""

        def read_body(heredoc: re.Match[str]) -> str:
            """Reads a here-document, and leaves its lines empty."""
            script = part.text
            body = heredoc["body"]
            start = heredoc.start("body")
            line_start = script.rfind("\n", 0, heredoc.start()) + 1
            written_files = INTO.findall(script, line_start, start)
            file = "".join(written_files[:1])
            text = body if heredoc["quote"] else masked(body)
            origin = part.origin.inner(script.count("\n", 0, start), body)
            self._read_inside(part, file, textwrap.dedent(text), origin, True)
            return heredoc["behind"] + "\n" * body.count("\n")

        without_bodies = HEREDOC.sub(read_body, part.text)
        for words in statements(without_bodies, part.origin.line):
            texts = [*(word.text for word in words), REDIRECTED, ""]
            end = texts.index(REDIRECTED)
            file = texts[end + 1]
            prints = texts[0] in PRINTS
            for word in words[:end]:
                self._read_word(word, part, file, not prints)
            if not prints:
                self._read_command(words[:end], part)

    def _read_word(self, word: ShellWord, part: Carried, file: str, commands: bool) -> None:
        """Reads a variable of the script, and a text inside a word, which goes into `file`."""
        text = word.text
        variable = VARIABLE.fullmatch(text)
        if variable:
            text = variable["value"]
            self.variables.append((variable["name"], text, word.line))
        text = text.removeprefix("$(")
        if NESTED.search(text) and len(text) < len(part.text):
            origin = Origin(word.line, word.text.count("\n") + 1, exact=False)
            text = masked(text.replace("\\n", "\n"))
            self._read_inside(part, file, text, origin, commands)

    def _read_inside(
        self, part: Carried, file: str, text: str, origin: Origin, commands: bool
    ) -> None:
        """Reads a text inside a script, which goes into `file`."""
        location = file or f"line {origin.first + 1}"
        inside = replace(
            part, location=location, name=file, role=role_in(file), text=text, origin=origin
        )
        self._read_text(inside, commands)

    def _read_text(self, part: Carried, commands: bool) -> None:
        """Reads an engine file, or a script if the text may have `commands`."""
        text = part.text
        shown = unmasked(text)
        if _is_engine_text(text):
            count = text.count(OMITTED)
            unread = f"{count} lines that only the shell or the template knows" if count else ""
            self.files.append(replace(part, unread=unread))
        elif commands and LAUNCH.search(shown):
            self._read_script(replace(part, text=shown))
        elif DATA_FILE.search(part.name):
            self.others.append(part)

    def _read_command(self, words: list[ShellWord], part: Carried) -> None:
        """Reads the command in a statement, if it serves."""
        names = [PurePath(word.text).name for word in words]
        start = next((index for index, name in enumerate(names) if name in PROGRAMS), len(names))
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
        for flag, values, line in _options(words):
            self._read_option(command, flag, values, line)

    def _read_option(self, command: Command, flag: str, values: list[str], line: int) -> None:
        value = " ".join(values)
        # a variable after a value, or after an option that takes none, has further options
        free = values if flag == "--trust_remote_code" else [flag, *values[1:]]
        command.partial |= any(text.startswith("$") for text in free)
        is_dynamo = command.engine == DYNAMO
        if is_dynamo:
            options = dynamo_options()
            known = {*options, *read_beside("dynamo.yaml")["others"]}
            if flag.replace("--no-", "--") not in known:
                self.notes.append(Carried(flag, origin=Origin(line), unread=UNKNOWN_FLAG))
            flag = options.get(flag, "")
        if value.startswith("{") and flag in (*CONFIG, OVERRIDES):
            self.files.append(Carried(flag, masked(value), Origin(line, exact=False), values[0]))
        if flag == "--server_role":
            command.role = role_in(value) or command.role
            if is_dynamo:
                return  # Dynamo has words of its own for the roles
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
        """Yields each engine file with the command that names it, then each command without a file.

        Notes come last. Yields nothing if the text is an engine file itself.
        """
        if self.whole:
            return
        commands = [
            (command, self._file_name(command.config, command.line)) for command in self.commands
        ]
        served = {name for _, name in commands}
        files = self.files + [part for part in self.others if part.name in served]
        single = len(files) == len(commands) == 1
        without_file = self.commands
        for part in files:
            name = self._file_name(part.name, part.line)
            serving = [each for each, wanted in commands if single or (name and wanted == name)]
            without_file = [command for command in without_file if command not in serving]
            for command in serving or [Command()]:
                yield self._served(part, command)
        for command in without_file:
            yield self._served(Carried(f"`{command.engine}`"), command)
        if files or commands:
            yield from self.notes

    def _file_name(self, text: str, line: int) -> str:
        return PurePath(self._value(text, line)).name

    def _value(self, text: str, line: int) -> str:
        """The text, or the value that the carrier gives to a variable nearest to this line."""
        values = [
            (abs(line - set_at), value)
            for name, value, set_at in self.variables
            if text in (f"${name}", f"${{{name}}}")
        ]
        _, nearest = min(values, default=(0, text))
        return nearest

    def _served(self, part: Carried, command: Command) -> Carried:
        target = self.target or self._value(command.target, command.line)
        if UNKNOWN.search(target):
            target = ""
        environ = {name: line + 1 for name, value, line in self.variables if value}
        role = part.role or command.role
        return replace(
            part, command=command, version=self.version, head=self.head, environ=environ,
            target=target, role=role,
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
    """Yields every node with its path, but none below an engine file."""
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
    """The scalar at a key, or the scalars in its list."""
    values = [pair.value_node for pair in node.pairs if pair.key_node.text == name]
    nodes = [*values]
    for value in values:
        if value.kind == "sequence":
            nodes += value.items
    return [item for item in nodes if item.kind == "scalar"]


def _options(words: list[ShellWord]) -> Iterator[tuple[str, list[str], int]]:
    """Yields (option, values, line) of `--flag value` and `--flag=value`."""
    while words:
        word = words.pop(0)
        flag, equals, value = word.text.partition("=")
        values = [value] if equals else []
        while not equals and words and not re.match(r"-\D", words[0].text):
            values.append(words.pop(0).text)
        yield flag, values, word.line


def _origin(node: Node, text: str, around: Origin) -> Origin:
    """The lines of a node in the file. `text`: of its document. `around`: the document's lines."""
    first = around.first + node.line
    indent = node.column
    lines = text.count("\n", node.start, node.end)
    if node.style in BLOCK:  # its text begins on the next line
        first += 1
        block = text[node.start : node.end]
        indent = _indent(block.partition("\n")[2])
    else:
        lines += 1
    exact = node.style == "|" or (node.kind == "mapping" and not node.style)
    return Origin(first, lines, indent, exact)


def _environment(node: Node) -> Iterator[tuple[str, str, int]]:
    """Yields (name, value, line) of each variable.

    `node`: a mapping, a list of names with values, or a list of texts.
    """
    for pair in node.pairs:
        yield pair.key_node.text, pair.value_node.text, pair.key_node.line
    if node.kind != "sequence":
        return
    for item in node.items:
        scalars = (*_scalars(item, "name"), *_scalars(item, "value"))
        named = "=".join(scalar.text for scalar in scalars)
        variable = VARIABLE.fullmatch(named or item.text)
        if variable:
            yield variable["name"], variable["value"], item.line


def _decoded(text: str) -> str:
    """The value of a Secret, or the text itself if it is not in base64."""
    with suppress(ValueError):
        return base64.b64decode(text, validate=True).decode()
    return text


def _indent(text: str) -> int:
    """The indentation of the first line that is not empty, in spaces."""
    line = re.search(r"^( *)\S", text, re.MULTILINE)
    return len(line[1]) if line else 0
