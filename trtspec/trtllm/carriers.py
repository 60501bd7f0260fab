"""Engine files inside their carriers: Helm values, manifests, Slurm recipes and shell scripts.

`carried` finds each engine file with its lines in the carrier. So a finding names a line of the
original, and a correction is written into the original.

The carrier is read once. Every text or mapping with an engine's keys is an engine file, at any
depth and in any quoting. A serving command gives its options, the target, the engine file that it
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
VARIANT = re.compile(r"-(efa|cuda)[\w-]*$")  # suffix of an image's tag: the engine is the same
DYNAMO = "dynamo.trtllm"
VLLM = "vllm"
PROGRAMS = ("trtllm-serve", DYNAMO, VLLM)
# words of a command that names one of PROGRAMS but does not start the server of an engine
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
UNKNOWN = re.compile(rf"\$|\{{\{{|^\{{\w+\}}$|{MASK}")  # an expansion of a shell or template
TEXT_KEY = re.compile(r"(?m)^[ \t]*[\"']?(\w+)[\"']?:(?=\s|$)")
FRONT_KEYS = {"context_servers", "generation_servers"}
MAX_COMPARED = 20  # unknown keys of a file whose spelling is compared with the engine's keys
MISSPELLED = 0.8  # likeness (difflib) from which an unknown key is a misspelled key of the engine
GENERIC = {"model", "backend"}  # keys that any recipe has
UNKNOWN_FLAG = "the worker is not known to have this option (`python3 -m dynamo.trtllm --help`)"
UNKNOWN_IMAGE = "this image is not known to carry a release that can be judged"
DATA_FILE = re.compile(r"\.(ya?ml|json)$")


@dataclass(frozen=True)
class Origin:
    """Lines of a text in the file that carries it.

    Args:
        first: number of the first line, from 0.
        lines: number of lines.
        indent: number of spaces before each line.
        exact: false if the text is quoted or folded, so that the file has other lines and columns.
    """

    first: int = 0
    lines: int = 1
    indent: int = 0
    exact: bool = True

    def line(self, number: int) -> int:
        """Number of the file's line for line `number` of the text, both counted from 0."""
        last = max(self.lines - 1, 0)
        return self.first + min(number, last)

    def column(self, number: int) -> int | None:
        """Column of the file for column `number` of the text, from 0. None if not `exact`."""
        return number + self.indent if self.exact else None

    def inner(self, first: int, text: str) -> Origin:
        """Origin in the file of a text that begins at line `first` of this text."""
        lines = text.count("\n") if self.exact else self.lines
        return Origin(self.line(first), lines, self.indent + _indent(text), self.exact)


@dataclass
class Command:
    """A command that starts the server of an engine, as the carrier has it.

    Args:
        engine: name of the program, "" if there is no command.
        line: number of the command's line in the file, from 0.
        words: options of trtllm-serve with their values.
        option_lines: number of each option's line, from 0.
        partial: whether the shell adds options that the carrier does not show.
        target: name of the checkpoint, "" if the command has none.
        config: name of the engine file, "" if the command names none.
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
    """An engine file in a carrier, and the command that serves it.

    Args:
        location: dotted path, line, option or file in the carrier, "" for the carrier itself.
        text: text of the engine file, "" if the carrier only has a command.
        origin: lines of the text in the carrier.
        name: name of the engine file in the carrier, "" if it has none.
        environ: lines of the server's variables by name, from 1.
        unread: reason why a part of the carrier was not read, else "".
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
        """Number of the engine file's first line, from 0, or of the command's without a file."""
        if self.command.engine and not self.text:
            return self.command.line
        return self.origin.first

    def written_into(self, original: str, text: str) -> str:
        """Returns the carrier's text `original` with `text` in place of this engine file.

        Returns `original` unchanged if its lines are not the text of this engine file.
        """
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
    """Returns the keys of the newest release: names at the top level, and names at any level."""
    fields = schema_for(str(releases()[-1])).fields
    names: set[str] = set()
    for key in fields:
        names.update(key.split("."))
    return frozenset(names & fields.keys()), frozenset(names)


def is_engine_file(keys: Iterable[str]) -> bool:
    """Whether the keys of a mapping are settings of an engine.

    True if one key is an object of the engine, or if two or more keys and half of all are settings.
    """
    keys = set(keys)
    top_keys, _ = _engine_keys()
    settings = top_keys - GENERIC
    has_object = any(key.endswith("_config") for key in keys & settings)
    return has_object or _are_mostly(keys, settings)


def _are_mostly(names: set[str], known: frozenset[str]) -> bool:
    """Whether two or more of the names are known, and at least half of them."""
    known_count = len(names & known)
    return known_count >= 2 and len(names) <= 2 * known_count


def is_foreign(keys: Iterable[str]) -> bool:
    """Whether the keys of a mapping are settings of another tool.

    True if a key is not one of TensorRT-LLM's newest release or of a front, no such key is spelled
    like a known one, and all known keys are GENERIC. Compares the spelling of at most MAX_COMPARED.
    """
    keys = set(keys)
    _, known = _engine_keys()
    unknown = keys - known
    telling = known - GENERIC | FRONT_KEYS
    if not unknown or keys & telling:
        return False
    for key in sorted(unknown)[:MAX_COMPARED]:
        if difflib.get_close_matches(key, known, n=1, cutoff=MISSPELLED):
            return False
    return True


def carried(text: str) -> list[Carried]:
    """Finds every engine file and serving command in a carrier's text, in the order of their lines.

    Returns [] if the text is an engine file itself.
    """
    carrier = _Carrier(text)
    first = 0  # line of the file, from 0
    for document in re.split(r"^(?=---\s)", text, flags=re.MULTILINE):
        lines = document.count("\n")
        carrier.read_document(document, Origin(first, lines + 1))
        first += lines
    return sorted(carrier.joined(), key=lambda part: part.line)


def role_in(*names: str) -> Role | None:
    """Role in a disaggregated deployment that the words of paths, names or flags contain.

    None if they contain no role, or several roles.
    """
    words = re.split(r"[^a-z]+", " ".join(names).lower())
    roles = {ROLES[word] for word in words if word in ROLES}
    return roles.pop() if len(roles) == 1 else None


def release_in(text: str) -> tuple[str | None, str]:
    """Returns the engine's release, and the unknown image, of the only container image in a text.

    The release is None for no image, several images, a digest, and a release that is not known. The
    unknown image is `name:tag` if Dynamo's image is not among the known ones, else "".
    """
    images = set(IMAGE.findall(text))
    if len(images) != 1:
        return None, ""
    [(name, tag)] = images
    if "runtime" in name:
        engine = dynamo_releases().get(VARIANT.sub("", tag))
        unknown = "" if engine else f"{name}:{tag}"
        return engine, unknown
    with suppress(UsageError):  # because a tag such as `latest` is not a release
        return str(parse_version(tag)), ""
    return None, ""


class _Carrier:
    """Reads one carrier and collects its engine files, serving commands and variables."""

    def __init__(self, text: str) -> None:
        self.version, unknown_image = release_in(text)
        self.files: list[Carried] = []
        self.commands: list[Command] = []
        self.others: list[Carried] = []  # data files, engine files only if a command names them
        self.notes: list[Carried] = []
        if unknown_image:
            self.notes.append(Carried(unknown_image, unread=UNKNOWN_IMAGE))
        self.variables: list[tuple[str, str, int]] = []  # name, value and line from 0
        self.target = ""
        self.head = ""
        self.whole = False  # whether the text is an engine file itself
        # keys of the top level whose mapping is not an engine file: the servers of a front, or a
        # single key around the whole file, which is a mistake that lint reports
        self.settings = FRONT_KEYS

    def read_document(self, text: str, origin: Origin) -> None:
        """Reads one YAML document or script, and collects its engine files and commands.

        `origin`: lines of the document in the file.
        """
        count_before = len(self.files) + len(self.commands)
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
        # because a script is rarely YAML, the syntax error matters only if nothing was found
        if fault and count_before == len(self.files) + len(self.commands):
            unread = f"this document is not YAML: {fault.message}"
            line = origin.line(fault.line - 1)
            self.notes.append(Carried(f"line {line + 1}", origin=Origin(line), unread=unread))

    def _read_tree(self, root: Node, text: str, origin: Origin) -> None:
        """Reads every text and mapping below `root`.

        Args:
            text: masked text of the document.
            origin: lines of the document in the file.
        """
        keys = _keys(root)
        self.whole |= is_engine_file(keys)
        values = root.value
        model = values.get("model")
        image = values.get("image")
        if isinstance(model, dict) and isinstance(image, dict):
            # only the values of our Helm chart have these two mappings
            self.version = str(image.get("tag") or "") or None
            self.target = model.get("target") or ""
            self.head = model.get("head") or ""
        is_secret = values.get("kind") == "Secret"
        if len(keys) == 1:
            self.settings = set(keys)
        for path, node in _walk(root, ()):
            part = Carried(
                ".".join(path), name=path[-1], role=role_in(*path),
                origin=_origin(node, text, origin),
            )  # fmt: skip
            if node.kind == "scalar":
                written = node.text
                # the key of a text in a list is one level above, so two names are compared
                in_script = not SCRIPT_KEYS.isdisjoint(path[-2:])
                may_launch = in_script or "\n" in written.strip()
                if is_secret:
                    written = _decoded(written)
                self._read_text(replace(part, text=written), may_launch)
            else:
                self._read_collection(part, node, text, origin)

    def _read_collection(self, part: Carried, node: Node, text: str, origin: Origin) -> None:
        """Reads the variables, the engine file and the command in one mapping or sequence.

        Args:
            part: path and lines of the node.
            text: masked text of the document.
            origin: lines of the document in the file.
        """
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
        # because _read_tree reads a script in `command` as a text, this reads plain words only
        if not any("\n" in word.text or word.text == "-c" for word in words):
            self._read_command(words, part)

    def _read_script(self, part: Carried) -> None:
        """Reads the commands of a script, and the texts that the script writes into files."""

        def read_body(heredoc: re.Match[str]) -> str:
            """Reads a here-document. Returns as many empty lines."""
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
            # two more words, so that a statement without a redirection also has an end and a file
            texts = [*(word.text for word in words), REDIRECTED, ""]
            end = texts.index(REDIRECTED)
            file = texts[end + 1]
            is_printed = texts[0] in PRINTS
            for word in words[:end]:
                self._read_word(word, part, file, not is_printed)
            if not is_printed:
                self._read_command(words[:end], part)

    def _read_word(self, word: ShellWord, part: Carried, file: str, may_launch: bool) -> None:
        """Reads a variable of the script, or a text inside one word.

        Args:
            part: script that has the word.
            file: name of the file that the text is written to, or "".
            may_launch: whether the text may have commands that serve.
        """
        text = word.text
        variable = VARIABLE.fullmatch(text)
        if variable:
            text = variable["value"]
            self.variables.append((variable["name"], text, word.line))
        text = text.removeprefix("$(")
        # because a word that is the whole script would be read without end, it must be shorter
        if NESTED.search(text) and len(text) < len(part.text):
            origin = Origin(word.line, word.text.count("\n") + 1, exact=False)
            text = masked(text.replace("\\n", "\n"))
            self._read_inside(part, file, text, origin, may_launch)

    def _read_inside(
        self, part: Carried, file: str, text: str, origin: Origin, may_launch: bool
    ) -> None:
        """Reads a masked text inside the script `part`.

        Args:
            file: name of the file that the script writes the text to, or "".
            origin: lines of the text.
        """
        location = file or f"line {origin.first + 1}"
        inside = replace(
            part, location=location, name=file, role=role_in(file), text=text, origin=origin
        )
        self._read_text(inside, may_launch)

    def _read_text(self, part: Carried, may_launch: bool) -> None:
        """Collects a text that is an engine file, or reads a script if it may launch a server."""
        text = part.text
        shown = unmasked(text)
        if _is_engine_text(text):
            count = text.count(OMITTED)
            unread = f"{count} lines that only the shell or the template knows" if count else ""
            self.files.append(replace(part, unread=unread))
        elif may_launch and LAUNCH.search(shown):
            self._read_script(replace(part, text=shown))
        elif DATA_FILE.search(part.name):
            self.others.append(part)

    def _read_command(self, words: list[ShellWord], part: Carried) -> None:
        """Collects the command in a statement's words, if it starts the server of an engine.

        `part`: the script or mapping that has the statement.
        """
        names = [PurePath(word.text).name for word in words]
        programs = [index for index, name in enumerate(names) if name in PROGRAMS]
        if not programs or not NOT_SERVING.isdisjoint(names):
            return
        start = programs[0]
        engine = names[start]
        command = Command(engine, words[start].line, part.role)
        words = words[start + 1 :]
        if words and PurePath(words[0].text).name == "serve":
            words.pop(0)
        elif engine == VLLM:  # another subcommand, such as `vllm bench`
            return
        self.commands.append(command)
        command.partial = any("@" in word.text for word in words)  # an array of the shell
        # a first word that is neither an option nor an array is the target
        if words and not re.match(r"-|.*@", words[0].text):
            command.target = words.pop(0).text
        for flag, values, line in _options(words):
            self._read_option(command, flag, values, line)

    def _read_option(self, command: Command, flag: str, values: list[str], line: int) -> None:
        """Adds one option to `command`, as its engine file, target, role or words.

        Args:
            values: words after the option.
            line: number of the option's line in the file, from 0.
        """
        value = " ".join(values)
        # a variable after a value, or after an option that takes none, has further options
        beyond_value = values if flag == "--trust_remote_code" else [flag, *values[1:]]
        command.partial |= any(text.startswith("$") for text in beyond_value)
        is_dynamo = command.engine == DYNAMO
        if is_dynamo:
            options = dynamo_options()
            known = {*options, *read_beside("dynamo.yaml")["others"]}
            if flag.replace("--no-", "--") not in known:
                self.notes.append(Carried(flag, origin=Origin(line), unread=UNKNOWN_FLAG))
            flag = options.get(flag, "")  # trtllm-serve's option, "" without one
        if value.startswith("{") and flag in (*CONFIG, OVERRIDES):
            self.files.append(Carried(flag, masked(value), Origin(line, exact=False), values[0]))
        if flag == "--server_role":
            command.role = role_in(value) or command.role
            if is_dynamo:
                return  # Dynamo has words of its own for the roles
        # because only the shell knows an expansion, an option with one in its value is not judged
        judged = value if flag in option_names() else flag
        if flag in CONFIG:
            command.config = "".join(values[:1])
        elif flag == OVERRIDES and '"trust_remote_code": true' in value:
            command.words.append("--trust_remote_code")
        elif flag == "--model":
            command.target = value
        elif flag and not UNKNOWN.search(judged):
            command.words += [flag, *values]
            command.option_lines[flag] = line

    def joined(self) -> Iterator[Carried]:
        """Yields each engine file with each command that names it, then commands without a file.

        Yields notes on unread parts last. Yields nothing if the text is an engine file itself.
        """
        if self.whole:
            return
        commands = [
            (command, self._file_name(command.config, command.line)) for command in self.commands
        ]
        served = {name for _, name in commands}
        files = self.files + [part for part in self.others if part.name in served]
        single = len(files) == 1 and len(commands) == 1
        without_file = self.commands
        for part in files:
            name = self._file_name(part.name, part.line)
            # the only command serves the only file, also if it names the file by a variable
            serving = [
                command for command, config in commands if single or (name and config == name)
            ]
            without_file = [command for command in without_file if command not in serving]
            for command in serving or [Command()]:
                yield self._served(part, command)
        for command in without_file:
            yield self._served(Carried(f"`{command.engine}`"), command)
        if files or commands:
            yield from self.notes

    def _file_name(self, text: str, line: int) -> str:
        """Name of a file without its folder. A variable has its value nearest to `line`."""
        return PurePath(self._value(text, line)).name

    def _value(self, text: str, line: int) -> str:
        """Value that the carrier gives to the variable `text`, nearest to this line (from 0).

        Returns `text` itself if it is not a variable of the carrier.
        """
        values = [
            (abs(line - set_at), value)
            for name, value, set_at in self.variables
            if text in (f"${name}", f"${{{name}}}")
        ]
        _, nearest = min(values, default=(0, text))
        return nearest

    def _served(self, part: Carried, command: Command) -> Carried:
        """Returns an engine file with its command, and the facts of the carrier for all files."""
        target = self.target or self._value(command.target, command.line)
        if UNKNOWN.search(target):  # a name that only the shell or a template knows
            target = ""
        environ = {name: line + 1 for name, value, line in self.variables if value}
        role = part.role or command.role
        return replace(
            part, command=command, version=self.version, head=self.head, environ=environ,
            target=target, role=role,
        )  # fmt: skip


def _is_engine_text(text: str) -> bool:
    """Whether a text is an engine file, also one with a syntax error."""
    if ":" not in text:  # no mapping, so that most words of a script need no parser
        return False
    try:
        root, _ = compose(text)
    except YamlError:
        _, known = _engine_keys()
        return _are_mostly(set(TEXT_KEY.findall(text)), known)
    return root is not None and is_engine_file(_keys(root))


def _keys(node: Node) -> list[str]:
    """Texts of a mapping's keys, in order. [] for any other node."""
    return [pair.key_node.text for pair in node.pairs]


def _walk(node: Node, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yields the path and the node of every value below `node`, except inside an engine file.

    `path`: the keys and list indices that lead to `node`.
    """
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
    """Scalar nodes at the key `name` of a mapping: the value, or the items of its list."""
    values = [pair.value_node for pair in node.pairs if pair.key_node.text == name]
    nodes = [*values]
    for value in values:
        if value.kind == "sequence":
            nodes += value.items
    return [item for item in nodes if item.kind == "scalar"]


def _options(words: list[ShellWord]) -> Iterator[tuple[str, list[str], int]]:
    """Yields (option, values, line) for each `--flag value` and `--flag=value`. Empties `words`."""
    while words:
        word = words.pop(0)
        flag, equals, value = word.text.partition("=")
        values = [value] if equals else []
        while not equals and words and not re.match(r"-\D", words[0].text):
            values.append(words.pop(0).text)
        yield flag, values, word.line


def _origin(node: Node, text: str, around: Origin) -> Origin:
    """Lines of a node in the file.

    Args:
        text: masked text of the node's document.
        around: lines of the document in the file.
    """
    first = around.first + node.line
    indent = node.column
    lines = text.count("\n", node.start, node.end)
    if node.style in BLOCK:  # the text of a block scalar begins on the line after its key
        first += 1
        block = text[node.start : node.end]
        indent = _indent(block.partition("\n")[2])
    else:
        lines += 1
    exact = node.style == "|" or (node.kind == "mapping" and not node.style)
    return Origin(first, lines, indent, exact)


def _environment(node: Node) -> Iterator[tuple[str, str, int]]:
    """Yields (name, value, line from 0 in the document) of each variable.

    `node`: a mapping, a list of mappings with `name` and `value`, or a list of `NAME=value`.
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
    """Value of a Secret, decoded from base64. Any other text is returned unchanged."""
    with suppress(ValueError):
        return base64.b64decode(text, validate=True).decode()
    return text


def _indent(text: str) -> int:
    """Number of spaces before the first line that is not empty."""
    line = re.search(r"^( *)\S", text, re.MULTILINE)
    return len(line[1]) if line else 0
