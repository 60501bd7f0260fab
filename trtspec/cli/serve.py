"""`trtspec serve`: checks, then one server: TensorRT-LLM, the front of several, vLLM, or the reference backend in this
process."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

from trtspec.cli.options import directory_of
from trtspec.errors import UsageError, check_failure
from trtspec.launch.options import FRONT, REFERENCE, VLLM, ServeOptions
from trtspec.machine import check_device, listen
from trtspec.records import fill, words
from trtspec.report import Result, announce, print_json

if TYPE_CHECKING:
    from trtspec.launch.preflight import ServerPlan

API_KEY = "TRTSPEC_SERVE_API_KEY"  # the key itself is never printed


def serve(options: ServeOptions) -> Result | None:
    """Run all preflight checks, then serve TARGET. Signals and the exit status are passed on; nothing is restarted."""
    from trtspec.client.addresses import bearer
    from trtspec.launch.preflight import launch, refuse_errors

    bearer(options.api_key, "the key of --api-key or TRTSPEC_SERVE_API_KEY")
    plan = None
    if options.mode is REFERENCE:
        found = _command(options)
    else:
        plan = _planned(options)
        found = Result(plan.to_dict(), plan.problems, text=plan.text())
    if options.dry_run:
        message = "a launch would be refused for the errors above"
        return replace(found, failure=check_failure(message, found.problems))
    if options.json_:
        print_json(found.to_dict())
    if plan is None:
        refuse_errors(found.problems)
        _run(options)
    elif status := launch(plan):
        raise typer.Exit(status)
    return None


def _planned(options: ServeOptions) -> ServerPlan:
    """What an engine is started with, or the front of several."""
    if options.mode is FRONT:
        from trtspec.trtllm.serve.front import plan_front

        return plan_front(options, launching=not options.dry_run)
    if options.port == 0:
        raise UsageError(
            "an engine cannot be asked for any free port", "pass --port with a number above 0"
        )
    if options.mode is VLLM:
        from trtspec.vllm import plan_vllm

        return plan_vllm(options, launching=not options.dry_run)
    from trtspec.trtllm.serve.start import plan_engine

    return plan_engine(options, launching=not options.dry_run)


def _command(options: ServeOptions) -> Result:
    """The command with every choice written out; names are looked up, nothing is fetched."""
    from trtspec.checkpoint.heads.pairing import learned_problems
    from trtspec.checkpoint.hub import load_head, load_target
    from trtspec.checkpoint.target_problems import sound

    target = load_target(options.target)
    if target.resolved.path is not None:
        sound(target.resolved.target)
    head = load_head(options.head) if options.head else None
    problems = learned_problems(head.resolved, target.resolved) if head is not None else []
    chosen = replace(options, api_key=None, dry_run=False, json_=False)
    argv = [sys.executable, "-m", "trtspec", "serve"]
    argv += words(chosen, always=("backend", "host", "port", "dtype", "device"))
    env, key = (
        ({API_KEY: "(not shown)"}, f'{API_KEY}="${API_KEY}" ') if options.api_key else ({}, "")
    )
    text = f"{key}{shlex.join(argv)}\n"
    return Result({"argv": argv, "env": env, "config": {}}, problems, text=text)


def _run(options: ServeOptions) -> None:
    """Fetches what is not here, then serves until a signal ends it."""
    from trtspec.checkpoint.hub import resolve

    check_device(options.device)
    listen(options.host, options.port).close()
    from trtspec.engine.server import ServerOptions, run

    target = resolve(options.target)
    head = resolve(options.head) if options.head else None
    announce(f"trtspec: loading {target.name}")
    more = (
        {} if options.prefix_cache_mib is None else {"prefix_bytes": options.prefix_cache_mib << 20}
    )
    published = target.hub_id.name if target.hub_id is not None else None
    settings = fill(
        ServerOptions, options, served_model_name=options.served_model_name or published, **more
    )
    run(directory_of(target), directory_of(head) if head is not None else None, settings)
