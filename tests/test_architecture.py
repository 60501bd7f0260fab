"""Rules of the layout over the source: imports, owners, torch-free rooms, budgets in weight."""

import ast
import functools
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.command_line import printed
from tools import plain, weight

PACKAGE = Path(__file__).resolve().parent.parent / "trtspec"
FILES = sorted(
    path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "data"
)

# a room may import rooms with a smaller number, and itself
LEVEL = {
    "__init__": 9, "__main__": 9,
    "cli": 8,
    "verbs": 7,
    "engine": 6, "heads": 6, "calibrate": 6, "trtllm": 6, "vllm": 6, "bench": 6,
    "models": 5, "planning": 5, "launch": 5,
    "quant": 4,
    "checkpoint": 3, "client": 3, "records": 3,
    "specs": 1, "report": 1,
    "files": 0, "machine": 0,
    "formats": 0, "families": 0,
    "foreign": -1,
    "errors": -2,
    "data_files": -3,
}  # fmt: skip
TORCH_FREE = (
    "__main__",
    "cli",
    "verbs",
    "trtllm",
    "vllm",
    "planning",
    "launch",
    "formats",
    "specs",
    "records",
    "report",
    "errors",
    "families",
    "foreign",
    "data_files",
    "files",
    "machine",
    "bench",
    "client",
)
TORCH_FREE_CHECKPOINT = (
    "headers",
    "identity",
    "target_problems",
    "heads",
    "hub",
    "tokenizer",
    "remote_code",
    "data_rows",
    "conversations",
    "chat_parser",
)
HEAVY = ("torch", "transformers", "modelopt", "accelerate", "datasets")
# the files that alone import a package
OWNERS = {
    "modelopt": ("quant/modelopt", "heads/training/module"),
    "typer": ("records", "cli/app"),
}
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "base", "helpers", "misc"}


def module_name(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def room(path: Path) -> str:
    return module_name(path).partition("/")[0]


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def at_import_time(tree: ast.Module) -> ast.Module:
    """The module without function bodies and without `if TYPE_CHECKING:` blocks."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
            return None

        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if "TYPE_CHECKING" in ast.dump(node.test) else self.generic_visit(node)

    return Strip().visit(ast.parse(ast.unparse(tree)))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """Not to be changed: every test of this file looks at the same tree."""
    return ast.parse(path.read_bytes(), str(path))


@pytest.fixture(scope="module", autouse=True)
def trees_are_forgotten() -> Iterator[None]:
    yield
    parsed.cache_clear()


def test_imports_go_down_only() -> None:
    offenders = []
    for path in FILES:
        here = room(path)
        assert here in LEVEL, f"{here} is not a room of the design"
        for name, line in imports(parsed(path)):
            if not name.startswith("trtspec."):
                continue
            there = name.split(".")[1]
            if there != here and LEVEL.get(there, 99) >= LEVEL[here]:
                offenders.append(f"{module_name(path)}:{line} imports {name}")
    assert not offenders, "\n".join(offenders)


def test_modelopt_and_typer_are_imported_in_two_files_each() -> None:
    importers: dict[str, set[str]] = {package: set() for package in OWNERS}
    for path in FILES:
        for name, _ in imports(parsed(path)):
            importers.get(name.split(".")[0], set()).add(module_name(path))
    assert importers == {package: set(files) for package, files in OWNERS.items()}


def torch_free_modules() -> list[Path]:
    chosen = [path for path in FILES if room(path) in TORCH_FREE]
    free = [PACKAGE / "checkpoint" / name for name in TORCH_FREE_CHECKPOINT]
    chosen += [path for path in FILES if path.with_suffix("") in free or path.parent in free]
    return chosen


def test_torch_free_modules_name_no_heavy_package_at_import() -> None:
    offenders = [
        f"{module_name(path)}:{line} imports {name}"
        for path in torch_free_modules()
        for name, line in imports(at_import_time(parsed(path)))
        if name.split(".")[0] in HEAVY
    ]
    assert not offenders, "\n".join(offenders)


def test_torch_free_modules_load_no_torch() -> None:
    """The AST sees direct imports only; a fresh interpreter sees the transitive ones."""
    names = ["trtspec." + module_name(path).replace("/", ".") for path in torch_free_modules()]
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name.removesuffix('.__init__'))\n"
        f"    loaded = [m for m in ('torch', 'transformers', 'modelopt') if m in sys.modules]\n"
        "    assert not loaded, f'{name} loads {loaded}'\n"
    )
    printed(sys.executable, "-c", script)


def test_init_files_are_empty() -> None:
    filled = [path for path in FILES if path.stem == "__init__" and path.stat().st_size]
    assert filled == [PACKAGE / "__init__.py"], "only the Python API is in one"


# a command, and what it does or shows
SAME_SUBJECT = {"__init__", "bench", "calibrate", "lint", "prove", "watch"}


def test_files_and_classes_have_one_name_each() -> None:
    """A file of verbs/ has the name of the command in cli/ whose work it does."""
    stems = [path.stem for path in FILES if room(path) != "verbs"]
    assert twice(stems) == SAME_SUBJECT
    assert not {*stems, *(path.parent.name for path in FILES)} & FORBIDDEN_NAMES
    nodes = [node for path in FILES for node in parsed(path).body]
    assert not twice(node.name for node in nodes if type(node) is ast.ClassDef)


def twice(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def test_rooms_keep_their_budgets() -> None:
    """budgets.toml limits weights and bytes, and what tools/plain.py counts in each room.

    A change that raises a weight names the user who needs it; a count of tools/plain.py only falls.
    """
    limits = tomllib.loads((PACKAGE.parent / "budgets.toml").read_text("utf-8"))
    by_area = {"weight": limits, **limits.pop("plain")}
    weights = weight.measured()
    assert weights.keys() == limits.keys()
    for area, counts in {"weight": weights, **plain.measured()}.items():
        allowed = by_area[area]
        over = [f"{name} {counts[name]}" for name in allowed if counts[name] > allowed[name]]
        assert not over, f"{area}: write it lighter or plainer; a weight may rise for a named user"


def test_no_two_functions_have_the_same_body() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                code = node.body[1:] if ast.get_docstring(node) else node.body
                if code and (node.end_lineno or 0) - code[0].lineno >= 3:
                    places.setdefault(ast.dump(ast.Module(code, [])), []).append(
                        f"{module_name(path)}: {node.name}"
                    )
    assert not [where for where in places.values() if len(where) > 1]


def depends_on(path: Path, modules: set[str]) -> set[str]:
    """Modules of the package that a file imports anywhere, in functions and for types too."""
    found = set()
    for name, _ in imports(parsed(path)):
        plain = name.removeprefix("trtspec.").replace(".", "/")
        found |= {plain, plain.rpartition("/")[0]} & modules
    return found


def test_no_cycles_between_files() -> None:
    modules = {module_name(path) for path in FILES}
    ahead = {module_name(path): depends_on(path, modules) - {module_name(path)} for path in FILES}
    while leaves := {name for name, needs in ahead.items() if not needs}:
        ahead = {name: needs - leaves for name, needs in ahead.items() if name not in leaves}
    while tops := set(ahead) - {need for needs in ahead.values() for need in needs}:
        ahead = {name: needs for name, needs in ahead.items() if name not in tops}
    assert not ahead, f"files that import each other in a circle are among {sorted(ahead)}"


MESSAGES = {
    "UsageError",
    "TrtspecError",
    "CheckFailed",
    "MissingDependency",
    "Interrupted",
    "ServerFailed",
    "Problem",
}
NAMED = {
    "message",
    "remedy",
    "why",
    "text",
    "REMEDY",
    "EXAMPLE",
}  # variables that messages are put together in
COMMAND_LINE = re.compile(r"(trtspec|trtllm-serve|vllm|hf|docker:|start it with|pass --) [^`;]*")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+(?!\w)")  # trtllm-serve's own have underscores


def texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    """The strings below a node, f-strings whole, with their lines."""
    if isinstance(node, ast.JoinedStr):
        yield (
            node.lineno,
            "".join(v.value if isinstance(v, ast.Constant) else "x" for v in node.values),
        )  # type: ignore[misc]
        node = ast.Module(
            [value.value for value in node.values if isinstance(value, ast.FormattedValue)], []
        )  # type: ignore[misc]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def test_the_library_never_speaks_of_flags() -> None:
    """It names an option as its parameter, in backticks; the command line shows the flag."""
    offenders = []
    for path in FILES:
        for node in ast.walk(parsed(path)) if room(path) != "cli" else ():
            parts: list[ast.AST] = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in MESSAGES:
                parts = [*node.args, *node.keywords]
            elif (
                isinstance(node, ast.Assign)
                and {getattr(name, "id", "") for name in node.targets} & NAMED
            ):
                parts = [node.value]
            for line, text in (found for part in parts for found in texts(part)):
                if FLAG.search(COMMAND_LINE.sub("", text)):
                    offenders.append(f"{module_name(path)}:{line}: {text[:100]}")
    assert not offenders, "\n".join(offenders)


OF_THE_MACHINE = {
    "cpu_count",
    "process_cpu_count",
    "sched_getaffinity",
    "virtual_memory",
    "disk_usage",
    "statvfs",
}


def test_cores_memory_and_disk_are_asked_for_in_machine_only() -> None:
    offenders = []
    for path in FILES:
        for node in ast.walk(parsed(path)) if module_name(path) != "machine" else ():
            asks = isinstance(node, ast.Attribute) and node.attr in OF_THE_MACHINE
            reads = isinstance(node, ast.Constant) and "/sys/fs/cgroup" in str(node.value)
            if asks or reads:
                offenders.append(f"{module_name(path)}:{node.lineno}")
    assert not offenders, "\n".join(offenders)


def owned_words() -> dict[str, tuple[str, ...]]:
    """Names that one file spells and all others ask for -> the files that may compare with them."""
    from trtspec.checkpoint.heads.dialects import DIALECTS
    from trtspec.data_files import gpu_names
    from trtspec.families.known import FAMILIES, REFUSED_TYPES
    from trtspec.formats import WeightFormat
    from trtspec.trtllm import schema

    words: dict[str, tuple[str, ...]] = {format.value: ("formats",) for format in WeightFormat}
    words |= {name: ("checkpoint/heads/dialects", "checkpoint/heads/config") for name in DIALECTS}
    words |= {path.stem: ("trtllm/schema",) for path in schema.SCHEMAS.glob("*.yaml")}
    types = [name for family in FAMILIES for name in (*family.model_types, *family.text_types)]
    words |= dict.fromkeys((*types, *REFUSED_TYPES), ())
    return words | dict.fromkeys(gpu_names(), ("data_files",))


def test_formats_dialects_families_lines_and_gpus_are_compared_in_their_owners_only() -> None:
    owners, offenders = owned_words(), []
    for path in FILES:
        for node in ast.walk(parsed(path)):
            sides: list[ast.expr] = []
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                sides = [node.value]
            for item in (item for side in sides for item in ast.walk(side)):
                word = item.value if isinstance(item, ast.Constant) else None
                if (
                    isinstance(word, str)
                    and word in owners
                    and module_name(path) not in (*owners[word], "formats")
                ):
                    offenders.append(f"{module_name(path)}:{item.lineno} compares with {word!r}")
    assert not offenders, "\n".join(offenders)


# calls that write, delete or carry a file
WRITES = {
    "unlink",
    "rmtree",
    "rename",
    "touch",
    "mkdir",
    "mkstemp",
    "write_text",
    "write_bytes",
    "write_atomic",
    "write_json",
    "write_shard",
    "create",
    "remove_file",
    "remove_folder",
    "carry_files",
    "ShardFile",
    "Journal",
}
# functions with a path that the test below cannot judge: names made of numbers, and divisions of
# numbers
UNJUDGED = {
    "checkpoint/writer: __init__",
    "heads/synthesis: write_provenance",
    "heads/training/ranks: require_shared",
    "heads/training/streamed: _write",
    "launch/preflight: launch",
    "quant/shards: convert_shards",
}
BOUNDARY = ("plain_name", "PlainName")


def called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def plain_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Parameters annotated as plain names, results of the boundary's call, and their items."""
    arguments = [node for node in ast.walk(function.args) if isinstance(node, ast.arg)]
    names = {a.arg for a in arguments if a.annotation and "PlainName" in ast.unparse(a.annotation)}
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and called(node.value) in BOUNDARY
        ):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.For) and getattr(node.iter, "id", "") in names:
            names.add(getattr(node.target, "id", ""))
    return names


def joined(node: ast.AST) -> ast.expr | None:
    """What a path is joined with, or what is divided by."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.right
    if isinstance(node, ast.Call) and called(node) in ("with_name", "joinpath") and node.args:
        return node.args[0]
    return None


def test_what_is_written_or_deleted_has_a_plain_name() -> None:
    """In functions that write, delete or carry, a path is joined with a literal or a PlainName."""
    unjudged = set()
    for path in FILES:
        for function in ast.walk(parsed(path)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            nodes = list(ast.walk(function))
            if not {called(node) for node in nodes if isinstance(node, ast.Call)} & WRITES:
                continue
            names = plain_variables(function)
            for part in filter(None, map(joined, nodes)):
                word = getattr(part, "id", getattr(part, "attr", ""))
                if isinstance(part, ast.Constant) or word.isupper() or word in names:
                    continue
                if not (isinstance(part, ast.Call) and called(part) in BOUNDARY):
                    unjudged.add(f"{module_name(path)}: {function.name}")
    assert unjudged == UNJUDGED, unjudged ^ UNJUDGED


def test_trees_are_removed_in_one_place() -> None:
    """report.remove_folder follows no link, and takes a PlainName."""
    assert [path for path in FILES if "rmtree" in path.read_text()] == [PACKAGE / "report.py"]
