"""Defines `trtspec serve`, which runs all checks and then a server.

The server is TensorRT-LLM, the front of several engines, vLLM, or the reference backend in this
process.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

from trtspec.errors import check_failure, errors_in
from trtspec.launch.serve_options import REFERENCE, ServeOptions
from trtspec.records import words
from trtspec.report import Result, print_json

API_KEY = "TRTSPEC_SERVE_API_KEY"  # name of the variable; the key itself is never printed


def serve(options: ServeOptions) -> Result | None:
    """Run all preflight checks, then serve TARGET.

    Signals and the exit status are passed on. Nothing is restarted.
    """
    from trtspec.client.addresses import bearer
    from trtspec.launch.preflight import launch, refuse_errors
    from trtspec.verbs.serve import plan_server, serve_reference

    bearer(options.api_key, "the key of `api_key`")
    plan = None
    if options.mode is REFERENCE:
        result = _reference_result(options)
    else:
        plan = plan_server(options)
        result = Result(plan.to_dict(), plan.problems, text=plan.text())
    if options.dry_run:
        message = "a launch would be refused for the errors above"
        return replace(result, failure=check_failure(message, result.problems))
    if options.json_:
        print_json(result.to_dict())
    if plan is None:
        refuse_errors(errors_in(result.problems))
        serve_reference(options)
    elif status := launch(plan):
        sys.exit(status)
    return None  # --json has printed the result already


def _reference_result(options: ServeOptions) -> Result:
    """Returns the command line and the problems of the reference backend.

    The command line also contains the defaults of the most important options.
    """
    from trtspec.verbs.serve import reference_problems

    problems = reference_problems(options)
    # the key would be visible in the list of processes
    server_options = replace(options, api_key=None, dry_run=False, json_=False)
    argv = [sys.executable, "-m", "trtspec", "serve"]
    argv += words(server_options, always=("backend", "host", "port", "dtype", "device"))
    env: dict[str, str] = {}
    key_assignment = ""
    if options.api_key:
        env = {API_KEY: "(not shown)"}
        key_assignment = f'{API_KEY}="${API_KEY}" '
    text = f"{key_assignment}{shlex.join(argv)}\n"
    return Result({"argv": argv, "env": env, "config": {}}, problems, text=text)
