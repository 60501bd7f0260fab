"""`trtspec serve`: checks, then one server: TensorRT-LLM, the front of several, vLLM, or the reference backend in this
process."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

from trtspec.errors import check_failure, errors_in
from trtspec.launch.serve_options import REFERENCE, ServeOptions
from trtspec.records import words
from trtspec.report import Result, print_json

API_KEY = "TRTSPEC_SERVE_API_KEY"  # the key itself is never printed


def serve(options: ServeOptions) -> Result | None:
    """Run all preflight checks, then serve TARGET. Signals and the exit status are passed on; nothing is restarted."""
    from trtspec.client.addresses import bearer
    from trtspec.launch.preflight import launch, refuse_errors
    from trtspec.verbs.serve import plan_server, serve_reference

    bearer(options.api_key, "the key of `api_key`")
    plan = None
    if options.mode is REFERENCE:
        found = _command(options)
    else:
        plan = plan_server(options)
        found = Result(plan.to_dict(), plan.problems, text=plan.text())
    if options.dry_run:
        message = "a launch would be refused for the errors above"
        return replace(found, failure=check_failure(message, found.problems))
    if options.json_:
        print_json(found.to_dict())
    if plan is None:
        refuse_errors(errors_in(found.problems))
        serve_reference(options)
    elif status := launch(plan):
        sys.exit(status)
    return None


def _command(options: ServeOptions) -> Result:
    """The command with every choice written out."""
    from trtspec.verbs.serve import reference_problems

    problems = reference_problems(options)
    chosen = replace(options, api_key=None, dry_run=False, json_=False)
    argv = [sys.executable, "-m", "trtspec", "serve"]
    argv += words(chosen, always=("backend", "host", "port", "dtype", "device"))
    env, key = (
        ({API_KEY: "(not shown)"}, f'{API_KEY}="${API_KEY}" ') if options.api_key else ({}, "")
    )
    text = f"{key}{shlex.join(argv)}\n"
    return Result({"argv": argv, "env": env, "config": {}}, problems, text=text)
