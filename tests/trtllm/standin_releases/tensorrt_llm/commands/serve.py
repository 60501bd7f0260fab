"""The options of `serve`, made of the schema's entries."""

import json
import os
from typing import Any

import click

import tensorrt_llm
from trtspec.trtllm.schema_evidence import expected


@click.group()
def main() -> None:
    """The group that holds `serve`."""


TYPES = {"int": int, "float": float, "bool": bool}


def option(name: str, entry: dict[str, Any]) -> click.Option:
    kind = click.Choice(entry["choices"]) if "choices" in entry else TYPES.get(entry["type"], str)
    flag, many = entry.get("is_flag", False), entry.get("multiple", False)
    shown = {"default": entry["default"]} if entry.get("default") is not None else {}
    off = [word for word in entry["flags"] if word.startswith("--no-")]
    on = [word for word in entry["flags"] if word not in off]
    words = [f"{on[0]}/{off[0]}"] if on and off else entry["flags"]
    return click.Option([*words, name], is_flag=flag, multiple=many, type=None if flag else kind, **shown)


PLANTED = json.loads(os.environ.get("STANDIN_PLANTED_OPTIONS", "{}"))  # None: the release has it not
ENTRIES = {name: dict(entry) for name, entry in expected(tensorrt_llm.__version__)[2].items()}
for planted, change in PLANTED.items():
    ENTRIES[planted] = {**ENTRIES.get(planted, {}), **change} if change is not None else {}
PARAMETERS = [option(name, entry) for name, entry in ENTRIES.items() if entry]
main.add_command(click.Command("serve", params=[click.Argument(["model"]), *PARAMETERS]))
