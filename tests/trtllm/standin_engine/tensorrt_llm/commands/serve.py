"""The options of the stand-in's server, declared with click as the engine declares its own."""

import click


@click.group()
def main() -> None:
    """The group that holds `serve`."""


@main.command("serve")
@click.argument("model")
@click.option("--tensor_parallel_size", "--tp_size", type=int, default=1)
@click.option("--reasoning_parser", type=click.Choice(["kimi_k2", "kimi_k25"]), default=None)
@click.option("--trust_remote_code", is_flag=True, default=False)
@click.option("--telemetry/--no-telemetry", default=True)
@click.option("--middleware", multiple=True, default=None)
def serve(**_: object) -> None:
    """Serves nothing."""
