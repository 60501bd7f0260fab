"""The front of a disaggregated deployment, `trtllm-serve disaggregated`.

Reads the front's file and checks its servers, which their own commands start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from trtspec.checkpoint.hub import engine_name, find_target
from trtspec.client.client import RequestFailed, ask_once, first_model, health
from trtspec.errors import CheckFailed, Problem, UsageError
from trtspec.files import STDIN, first_fault, read_yaml_text
from trtspec.launch.preflight import ServerPlan, check_port
from trtspec.launch.serve_options import ServeOptions
from trtspec.launch.server_launch import LogPatterns, ServerAddress
from trtspec.trtllm.nodes import YamlError, load_text
from trtspec.trtllm.serve.command import ENVIRONMENT, PATTERNS, PROGRAM, engine_version

# Seconds that the front waits for one answer. TensorRT-LLM's own 180 cut long reasoning off.
REQUEST_TIMEOUT = 3600.0
MODELS_TIMEOUT = 2.0  # seconds for /v1/models of a server
BUILD_FRONT = "write it with `trtspec build-config`"
ADDRESS = re.compile(r"(?:[A-Za-z0-9_.-]+|\[[0-9A-Fa-f:]+\]):(\d{1,5})")


def host_and_port(url: str) -> str:
    """Returns `url` itself if it is host:port. Raises ValueError for any other text."""
    match = ADDRESS.fullmatch(url)
    if match is None or not 0 < int(match[1]) < 65536:
        raise ValueError(f"{url!r} is not host:port, without http://")
    return url


class Servers(BaseModel):
    """The servers of one role, as the front's file lists them.

    Args:
        num_instances: number of servers. None if the file has no number.
        urls: addresses as host:port.
    """

    num_instances: int | None = None
    urls: Annotated[list[Annotated[str, AfterValidator(host_and_port)]], Field(min_length=1)]

    @model_validator(mode="after")
    def _are_counted(self) -> Servers:
        """Returns itself. Raises ValueError if `num_instances` is not the number of urls."""
        if self.num_instances not in (None, len(self.urls)):
            raise ValueError(
                f"num_instances is {self.num_instances} and there are {len(self.urls)} urls"
            )
        return self


class Front(BaseModel):
    """The settings of the front's file that trtspec reads."""

    model_config = ConfigDict(strict=True)

    hostname: str = "localhost"
    port: Annotated[int, Field(gt=0, lt=65536)] = 8000
    context_servers: Servers
    generation_servers: Servers

    @model_validator(mode="after")
    def _have_addresses_of_their_own(self) -> Front:
        """Returns itself. Raises ValueError if an address is listed twice."""
        front = f"{self.hostname}:{self.port}"
        addresses = [front, *self.context_servers.urls, *self.generation_servers.urls]
        repeated = {address for address in addresses if addresses.count(address) > 1}
        if repeated:
            listed = " and ".join(sorted(repeated))
            raise ValueError(f"{listed} is listed twice")
        return self


def plan_front(options: ServeOptions, *, launching: bool) -> ServerPlan:
    """Plans the start of a front, with the problems of its servers.

    Raises UsageError if the file cannot be read or the target is not known. Raises CheckFailed if
    the file's values do not describe a front. `launching`: false for a dry run.
    """
    find_target(options.target)
    path = options.disaggregated
    assert path is not None  # because only this option chooses a front
    name = str(path)
    if name == STDIN:
        message = "`disaggregated` - : the front reads its file itself"
        raise UsageError(message, "pass the path of one")
    text = read_yaml_text(path, BUILD_FRONT)
    front = read_front(text, path)
    names = {engine_name(options.target), Path(options.target).resolve().name}
    problems = [
        *check_servers("context", front.context_servers.urls, names),
        *check_servers("generation", front.generation_servers.urls, names),
    ]
    version = ""
    if launching:
        problems += [*check_port(front.hostname, front.port), *PROGRAM.check()]
        version = engine_version() or ""
    # by default the front gives its servers 180 s, less than a trillion parameters take to load
    timeouts = ["-t", str(round(options.startup_timeout)), "-r", str(round(REQUEST_TIMEOUT))]
    return ServerPlan(
        program=PROGRAM,
        patterns=LogPatterns.load(PATTERNS),
        argv=["trtllm-serve", "disaggregated", "-c", name, *timeouts],
        env=dict(ENVIRONMENT),
        config=load_text(text),
        config_text=text,
        config_path=name,
        problems=problems,
        version=(version, "installed here" if version else "not asked"),
        endpoint=ServerAddress(front.hostname, front.port),
        limits=options.limits,
    )


def read_front(text: str, path: Path) -> Front:
    """Reads the settings of a front's file. `path`: path of the file, for messages.

    Raises UsageError if the text is not YAML, and CheckFailed if its values do not describe a
    front.
    """
    try:
        return Front.model_validate(load_text(text))
    except YamlError as error:
        message = f"{path}:{error.line} cannot be used: {error.message}"
        raise UsageError(message, BUILD_FRONT) from None
    except ValidationError as error:
        raise CheckFailed(f"{path} {first_fault(error)}", BUILD_FRONT, "TS-SERVE-FRONT") from None


def check_servers(role: str, addresses: list[str], names: set[str]) -> Iterator[Problem]:
    """Yields a warning for each server that does not answer yet, or that serves another model.

    The front waits for servers that do not answer.

    Args:
        role: role of the servers.
        addresses: addresses of the servers, as host:port.
        names: names of the target that /v1/models may show.
    """

    async def model_id(client: httpx.AsyncClient) -> str:
        """Name of the model that a healthy server serves."""
        await health(client)
        model = await first_model(client, MODELS_TIMEOUT)
        return str(model["id"])

    for address in addresses:
        try:
            served = ask_once(f"http://{address}", model_id, headers={})
        except RequestFailed as failure:
            message = f"the {role} server {address} does not answer yet ({failure.message})"
            remedy = f"start it with `trtspec serve TARGET --config FILE --role {role}`"
            yield Problem("TS-SERVE-FRONT-WAITS", "warning", address, message, remedy)
            continue
        if served not in names:
            expected = " or ".join(sorted(names))
            message = f"the {role} server {address} calls its model {served!r}, not {expected}"
            remedy = "pass the target that the servers serve; "
            remedy += "one with `served_model_name` may keep its name"
            yield Problem("TS-SERVE-FRONT-MODEL", "warning", address, message, remedy)
