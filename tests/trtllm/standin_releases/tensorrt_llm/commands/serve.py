"""The options of `serve`, made of the schema's entries."""

import click

import tensorrt_llm
from trtspec.trtllm.schema_evidence import expected


@click.group()
def main() -> None:
    """The group that holds `serve`."""


PARAMETERS = [
    click.Option([*entry["flags"], name], is_flag=entry.get("is_flag", False), multiple=entry.get("multiple", False))
    for name, entry in expected(tensorrt_llm.__version__)[2].items()
    if not any("/" in flag or flag.startswith("--no-") for flag in entry["flags"])
]
main.add_command(click.Command("serve", params=[click.Argument(["model"]), *PARAMETERS]))
