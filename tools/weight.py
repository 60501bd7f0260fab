"""Weight of the code: what a reader has to follow, however it is laid out.

`python tools/weight.py` prints it by room.

Counted are the nodes of Python's syntax tree that do something: calls, attribute reads, operators,
comparisons, constants, comprehensions, branches, loops and definitions. Names, assignments, tuples,
parameters, annotations and docstrings are free: taking a dense statement apart, or naming an
intermediate value, costs nothing. budgets.toml limits the weights, and the bytes of data that
people write.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FREE = (
    ast.Name,
    ast.expr_context,
    ast.Assign,
    ast.AnnAssign,
    ast.Expr,
    ast.Tuple,
    ast.arguments,
    ast.arg,
    ast.Module,
    ast.operator,
    ast.unaryop,
    ast.boolop,
    ast.cmpop,
    ast.alias,
    ast.Import,
    ast.ImportFrom,
)
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SINGLE_FILE_ROOMS = ("calibrate", "vllm")
MADE_BY_TOOLS = (
    "trtspec/__init__.pyi",
    "trtspec/data/kernels",
    "trtspec/data/kimi-nano",
    "trtspec/trtllm/snapshots",
)


def main() -> None:
    for name, amount in measured().items():
        print(f"{name:12} {amount:9,}")


def measured() -> Counter[str]:
    """Weights of the package, tests, tools and each room of the package, and `data_bytes`."""
    amounts = Counter(data_bytes=data_bytes())
    for tree in ("trtspec", "tests", "tools"):
        for path in (ROOT / tree).rglob("*.py"):
            amount = weight(path.read_text(encoding="utf-8"))
            amounts["package" if tree == "trtspec" else tree] += amount
            if tree == "trtspec":
                amounts[room(path.relative_to(ROOT / tree))] += amount
    return amounts


def room(path: Path) -> str:
    """The folder of the package; its top files are `ground`, but for single-file rooms."""
    if len(path.parts) > 1:
        return path.parts[0]
    return path.stem if path.stem in SINGLE_FILE_ROOMS else "ground"


def weight(text: str) -> int:
    """Counts the syntax nodes of a module that are not free."""
    tree = ast.parse(text)
    free: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and ast.get_docstring(node, clean=False) is not None:
            free.add(id(node.body[0].value))  # type: ignore[attr-defined]
        for hint in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if hint is not None:
                free.update(id(part) for part in ast.walk(hint))
    return sum(not isinstance(node, FREE) and id(node) not in free for node in ast.walk(tree))


def data_bytes() -> int:
    """Size of the files of the package that are neither code nor written by a tool."""
    files = [path for path in (ROOT / "trtspec").rglob("*") if path.is_file()]
    written = [path for path in files if path.suffix != ".py" and "__pycache__" not in path.parts]
    names = {path: path.relative_to(ROOT).as_posix() for path in written}
    return sum(path.stat().st_size for path in written if not names[path].startswith(MADE_BY_TOOLS))


if __name__ == "__main__":
    main()
