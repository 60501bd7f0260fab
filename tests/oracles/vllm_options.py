"""The options of `vllm serve` as the parser of the installed release declares them, as JSON: run by a Python with vLLM.

One object per option, by its first long spelling: `spellings`, `kind` (switch, whole, number, json, text or list),
`choices` where they are few and fixed, and `negated` where a --no- form exists.
"""

from __future__ import annotations

import argparse
import json

from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

WHOLE = ("int", "human_readable_int", "human_readable_int_or_auto")


def parser_of(value: object) -> str:
    """Name of the function that reads a value, below the ones that vLLM wraps around it."""
    inner = [cell.cell_contents for cell in getattr(value, "__closure__", None) or ()]
    found = next((parser_of(one) for one in inner if callable(one)), "")
    return found or getattr(value, "__name__", "")


def kind(action: argparse.Action) -> str:
    named = parser_of(action.type)
    if isinstance(action, argparse.BooleanOptionalAction) or action.nargs == 0:
        return "switch"
    if action.nargs in ("*", "+"):
        return "list"
    if named in WHOLE:
        return "whole"
    if named == "float":
        return "number"
    return "json" if named in ("loads", "parse_dataclass") else "text"


def main() -> None:
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    found = {}
    for action in parser._actions:
        spellings = [text for text in action.option_strings if not text.startswith("--no-")]
        if not spellings or isinstance(action, argparse._HelpAction):
            continue
        name = next(text for text in spellings if text.startswith("--"))
        found[name] = {
            "spellings": spellings, "kind": kind(action), "type": parser_of(action.type),
            "choices": [str(one) for one in action.choices] if action.choices else [],
            "negated": len(spellings) != len(action.option_strings), "default": repr(action.default)[:80],
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
