"""Engine files inside what carries them: values of a chart, manifests, Slurm recipes and shell scripts. `carried` finds
each with its place, so that a finding names its line of the original and a correction is written there.

One pass over the tree of the carrier: whatever text or mapping has an engine's keys is an engine file, at any depth and
in any quoting. A command gives its options, the target, the engine file that it names, the role and the release; the
environment gives its variables.
"""

from __future__ import annotations

import base64
import difflib
import functools
import itertools
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
DYNAMO, OTHER_ENGINES = "dynamo.trtllm", {"vllm"}
PROGRAMS = {"trtllm-serve", DYNAMO} | OTHER_ENGINES
PRINTS = {"echo", "printf"}
NOT_LAUNCHED = {*PRINTS, "which", "command", "pkill", "pgrep", "grep", "pip", "rm"}
# fields of a command that an engine file takes over
OF_A_COMMAND = ("words", "command", "option_lines", "partial", "engine", "elsewhere")
NOT_SERVING = {"disaggregated", "mm_embedding_serve", "--help", "-h"}
CONFIG = {"--extra_llm_api_options", "--config", "--extra-engine-args"}
OVERRIDES = "--override-engine-args"
ROLE_FLAGS = {"--server_role", "--disaggregation-mode"}
SCRIPT_KEYS = {"command", "args", "entrypoint"}
VARIABLE = re.compile(r"(?:-e|--env=)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
TEXT_KEY = re.compile(r"(?m)^[ \t]*[\"']?(\w+)[\"']?:(?=\s|$)")
FRONT_KEYS = {"context_servers", "generation_servers"}
COMPARED = 20  # keys of a file that are compared with those of an engine by their spelling
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
    elsewhere: str = ""
    role: Role | None = None
    environ: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    unread: str = ""

    @property
    def line(self) -> int:
        return self.origin.first if self.text else self.command

    @property
    def foreign(self) -> bool:
        """Whether another engine than TensorRT-LLM serves."""
        return self.engine in OTHER_ENGINES

    @property
    def dynamo(self) -> bool:
        return self.engine == DYNAMO

    def written_into(self, original: str, text: str) -> str:
        """The original with `text` in place of this engine file, if its text there is the same."""
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
    if len(keys) < 2 or keys & (known | FRONT_KEYS):
        return False
    return not any(
        difflib.get_close_matches(key, known, n=1, cutoff=0.8) for key in [*keys][:COMPARED]
    )


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
    return root is not None and is_engine_file(_keys(root))


def carried(text: str) -> list[Carried]:
    """Every engine file and command in a text, by line; none for an engine file itself."""
    carrier = _Carrier(text)
    for first, chunk in _chunks(text):
        origin = Origin(first, chunk.count("\n") + 1)
        try:
            root = _root(chunk)
        except YamlError as error:
            carrier.read_broken(chunk, origin, error)
            continue
        if root is None or root.kind != "mapping":
            carrier.read_script(Carried("", chunk, origin))
        elif is_engine_file(_keys(root)):
            return []
        else:
            carrier.read_tree(root, chunk, origin)
    return sorted(carrier.joined(), key=lambda part: part.line)


def role_in(*names: str) -> Role | None:
    """The role that the words of a path, a name or a flag tell."""
    words = [word for name in names for word in re.split(r"[^a-z]+", name.lower())]
    roles = {ROLES[word] for word in words if word in ROLES}
    return roles.pop() if len(roles) == 1 else None


@functools.lru_cache(maxsize=8)
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


def _keys(node: Node) -> list[str]:
    return [pair.key_node.text for pair in node.pairs]


def _walk(node: Node, path: tuple[str, ...], image: str) -> Iterator[tuple[Any, Node, str]]:
    """Every node with its path and the image of the container around it; not below an engine file."""
    image = "".join(item.text for item in _scalars(node, "image")) or image
    yield path, node, image
    if len(path) > 1 and is_engine_file(_keys(node)):
        return
    for pair in node.pairs:
        yield from _walk(pair.value_node, (*path, pair.key_node.text), image)
    if node.kind == "sequence":
        for index, item in enumerate(node.items):
            yield from _walk(item, (*path, str(index)), image)


def _scalars(node: Node, name: str) -> list[Node]:
    """The scalars below a key: of a list, or the one."""
    values = [pair.value_node for pair in node.pairs if pair.key_node.text == name]
    lists = [value.items if value.kind == "sequence" else [value] for value in values]
    return [item for item in itertools.chain(*lists) if item.kind == "scalar"]


class _Carrier:
    """What one file carries, as it is read."""

    def __init__(self, text: str) -> None:
        self.version, self.unknown_image = release_in(text)
        self.files: list[Carried] = []
        self.commands: list[Carried] = []
        self.others: list[Carried] = []  # texts that are engine files only if a command names them
        self.notes: list[Carried] = []
        self.variables: list[tuple[str, str, int, Role | None]] = []
        self.target = self.head = None

    def read_broken(self, text: str, origin: Origin, error: YamlError) -> None:
        """A document that is not YAML: a script, or engine settings that nobody can read."""
        before = len(self.files) + len(self.commands)
        self.read_script(Carried("", text, origin))
        if before == len(self.files) + len(self.commands):
            reason = f"this document is not YAML: {error.message}"
            line = origin.line(error.line - 1)
            self.notes.append(Carried(f"line {line + 1}", command=line, unread=reason))

    def read_tree(self, root: Node, text: str, origin: Origin) -> None:
        model, image = root.value.get("model"), root.value.get("image")
        if isinstance(model, dict) and isinstance(image, dict):  # values of our chart
            self.version = str(image.get("tag") or "") or None
            self.target, self.head = model.get("target"), model.get("head")
        encoded = root.value.get("kind") == "Secret"
        for path, node, around in _walk(root, (), ""):
            version = release_in(around)[0]
            part = Carried(".".join(path), name="".join(path[-1:]), role=role_in(*path),
                           version=version, origin=_origin(node, text, origin))  # fmt: skip
            if node.kind == "scalar" and node.text:
                inner = _decoded(node.text) if encoded else node.text
                commands = not SCRIPT_KEYS.isdisjoint(path[-2:]) or "\n" in inner.strip()
                self._read_text(replace(part, text=inner), commands)
                continue
            if part.name == "env" or part.name.endswith("environment"):
                self.variables += [
                    (name, value, origin.line(line), part.role)
                    for name, value, line in _environment(node)
                ]
            if len(path) > 1 and is_engine_file(_keys(node)):
                inner = text[node.start : node.end]
                if node.style != "flow":
                    inner = textwrap.dedent(" " * node.column + inner) + "\n"
                self.files.append(replace(part, text=inner))
            words = [
                Word(item.text, origin.line(item.line))
                for key in ("command", "args")
                for item in _scalars(node, key)
            ]
            if len(words) > 1 and not any("\n" in word.text or word.text == "-c" for word in words):
                self._read_command(words, part)

    def read_script(self, part: Carried) -> None:
        for statement in statements(part.text, part.origin.line):
            for word in statement.words:
                if variable := VARIABLE.fullmatch(word.text):
                    self.variables.append((variable["name"], variable["value"], word.line, None))
            self._read_statement(statement, part)

    def _read_statement(self, statement: Statement, part: Carried) -> None:
        into = statement.into
        inside = replace(part, name=into, role=role_in(into))
        for body in statement.bodies:
            text = textwrap.dedent(masked(body.text) if body.expands else body.text)
            origin = part.origin.inner(body.first, body.text)
            place = into or f"line {origin.first}"
            self._read_text(replace(inside, place=place, text=text, origin=origin), True)
        program = "".join(word.text for word in statement.words[:1])
        for word in statement.words:
            text = VARIABLE.sub(r"\g<value>", word.text)
            if program in PRINTS and into:
                text = text.replace("\\n", "\n")
            if "\n" in text or any(f"{name} " in text for name in PROGRAMS):
                lines = word.text.count("\n") + 1
                origin = Origin(word.line, lines, part.origin.indent, exact=text == word.text)
                place = into or f"line {word.line + 1}"
                quoted = replace(inside, place=place, text=masked(text), origin=origin)
                self._read_text(quoted, program not in PRINTS)
        if program not in NOT_LAUNCHED:
            self._read_command(statement.words, part)

    def _read_text(self, part: Carried, commands: bool) -> None:
        """A text of its own: an engine file, or a script where it may have `commands`."""
        if _is_engine_text(part.text):
            self.files.append(replace(part, unread=_unread_lines(part.text)))
        elif commands and any(program in part.text for program in (*PROGRAMS, "<<")):
            self.read_script(replace(part, text=unmasked(part.text)))
        elif DATA_FILE.search(part.name):
            self.others.append(part)

    def _read_command(self, words: list[Word], part: Carried) -> None:
        names = [PurePath(word.text).name for word in words]
        start = next((index for index, name in enumerate(names) if name in PROGRAMS), len(names))
        engine, options = "".join(names[start : start + 1]), words[start + 1 :]
        serves = names[start + 1 : start + 2] == ["serve"]
        if not engine or (engine in OTHER_ENGINES and not serves):
            return
        if not NOT_SERVING.isdisjoint(names[start + 1 :]):
            return
        command = Carried(f"`{engine}`", words=(), command=words[start].line, engine=engine,
                          version=part.version or self.version, role=part.role)  # fmt: skip
        self.commands.append(self._with_options(command, options[serves:]))

    def _with_options(self, command: Carried, words: list[Word]) -> Carried:
        dynamo = command.engine == DYNAMO
        partial = any("@" in word.text for word in words)  # an array of the shell
        if words and not re.match(r"-|.*@", words[0].text):
            command = replace(command, target=words.pop(0).text)
        options: list[str] = []
        option_lines: dict[str, int] = {}
        for word, values in _options(words):
            flag, value = word.text, " ".join(values)
            # a variable behind a value, or behind a word that takes none, holds further options
            free = values if flag == "--trust_remote_code" else [flag, *values[1:]]
            partial |= any(text.startswith("$") for text in free)
            ours = DYNAMO_FLAGS.get(flag, "") if dynamo else flag
            if flag in ROLE_FLAGS:
                command = replace(command, role=role_in(value) or command.role)
            if flag in CONFIG or flag == OVERRIDES:
                name = flag if flag == OVERRIDES else "".join(values[:1])
                if value.startswith("{"):
                    self.files.append(
                        Carried(flag, masked(value), Origin(word.line, exact=False), name)
                    )
                if flag in CONFIG:
                    command = replace(command, elsewhere=name)
                elif '"trust_remote_code": true' in value:
                    options.append("--trust_remote_code")
            elif flag == "--model-path":
                command = replace(command, target=value)
            elif ours and not any(re.search(r"\$|\{\{", text) for text in (flag, value)):
                options += [ours, *values]
                option_lines[ours] = word.line
        return replace(command, words=tuple(options), option_lines=option_lines, partial=partial)

    def joined(self) -> Iterator[Carried]:
        """Each engine file with the command that names it, and each command whose file is not here."""
        commands = [
            (command, PurePath(self._value(command.elsewhere, command.line)).name)
            for command in self.commands
        ]
        served = {name for _, name in commands}
        self.files += [part for part in self.others if part.name in served]
        own = [part for part in self.files if part.name != OVERRIDES]
        alone = len(own) == len(self.commands) == 1
        used: list[Carried] = []
        for part in self.files:
            name = PurePath(self._value(part.name, part.line)).name
            named = [
                command
                for command, wanted in commands
                if (name and wanted == name) or (alone and part in own)
            ]
            used += named
            for command in named or [Carried("")]:
                yield self._served(part, command)
        for command in self.commands:
            if command not in used and not command.foreign:
                yield self._served(command, command)
        if self.files or self.commands:
            yield from self.notes
            if self.unknown_image:
                reason = "this image is not known to carry a release that can be judged"
                yield Carried(self.unknown_image, unread=reason)

    def _value(self, text: str, line: int) -> str:
        """The text itself; of a variable, the value that the carrier gives it nearest to this line."""
        variable = re.fullmatch(r"\$\{?(\w+)\}?", text)
        values = [
            (abs(line - at), value)
            for name, value, at, _ in self.variables
            if variable and name == variable[1]
        ]
        return min(values)[1] if values else text

    def _served(self, part: Carried, command: Carried) -> Carried:
        role = part.role or command.role
        environ = {
            name: (value, line)
            for name, value, line, own in self.variables
            if own in (None, role) or role is None
        }
        known = {name: getattr(command, name) for name in OF_A_COMMAND}
        version = command.version or part.version or self.version
        target = self.target or self._value(command.target or "", command.line) or None
        return replace(part, **known, version=version, target=target, head=self.head, role=role,
                       environ=environ)  # fmt: skip


def _options(words: list[Word]) -> Iterator[tuple[Word, list[str]]]:
    """Each option with its values: `--flag value` or `--flag=value`."""
    while words:
        word = words.pop(0)
        flag, equals, value = word.text.partition("=")
        values = [value] if equals else []
        while not equals and words and not re.match(r"-\D", words[0].text):
            values.append(words.pop(0).text)
        yield replace(word, text=flag), values


def _origin(node: Node, text: str, around: Origin) -> Origin:
    """The lines of a node."""
    begin = node.line + (node.style in BLOCK)
    end = node.line + 1 + text.count("\n", node.start, node.end)
    indent = node.column
    if node.style in BLOCK:
        indent = _indent(text[text.find("\n", node.start) + 1 : node.end])
    exact = node.style == "|" or (node.kind == "mapping" and not node.style)
    return Origin(around.first + begin, max(end - begin, 1), indent, exact)


def _environment(node: Node) -> Iterator[tuple[str, str, int]]:
    """Variables of a mapping, of a list of names with values, and of a list of texts, each with its line."""
    for pair in node.pairs:
        yield pair.key_node.text, pair.value_node.text, pair.key_node.line
    for item in node.items if node.kind == "sequence" else ():
        named = [part for key in ("name", "value") for part in _scalars(item, key)]
        if len(named) == 2:
            yield named[0].text, named[1].text, item.line
        elif variable := VARIABLE.fullmatch(item.text):
            yield variable["name"], variable["value"], item.line


def _decoded(text: str) -> str:
    """A value of a Secret; the text itself if it is not in base64."""
    try:
        return base64.b64decode(text, validate=True).decode()
    except ValueError:
        return text


def _indent(text: str) -> int:
    """Of the first line that is not empty."""
    filled = next((line for line in text.splitlines() if line.strip()), "")
    return len(filled) - len(filled.lstrip(" "))


def _unread_lines(text: str) -> str:
    lines = re.findall(rf"{OMITTED}({MASK}+)", text)
    if not lines:
        return ""
    return f"{', '.join(map(unmasked, lines))}: lines that only the shell or the template knows"
