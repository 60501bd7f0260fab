"""The front of a disaggregated deployment: `trtllm-serve disaggregated` over servers that run already."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtspec.errors import Problem, UsageError
from trtspec.files import STDIN, read_yaml_text
from trtspec.trtllm.document import Document

REMEDY = "write it with `trtspec build-config`"
ROLES = {"context_servers": "context", "generation_servers": "generation"}
ADDRESS = re.compile(r"[A-Za-z0-9_.-]+:(\d{1,5})|\[[0-9A-Fa-f:]+\]:(\d{1,5})")


@dataclass(frozen=True)
class Front:
    """`text` is what the file says; `servers`: `host:port` of every server, by role."""

    path: Path
    text: str
    host: str
    port: int
    servers: dict[str, list[str]]
    problems: list[Problem] = field(default_factory=list)

    def argv(self, startup_timeout: float, request_timeout: float) -> list[str]:
        """Both of upstream's own timeouts are 180 s, less than a trillion parameters take to load."""
        words = ["trtllm-serve", "disaggregated", "-c", str(self.path)]
        return [*words, "-t", str(round(startup_timeout)), "-r", str(round(request_timeout))]


def read_front(path: Path) -> Front:
    """Raises UsageError for a file that cannot be read; what is wrong inside is a problem of the result."""
    if str(path) == STDIN:
        raise UsageError("--disaggregated - : the front reads its file itself", "pass the path of one")
    document = Document.parse(read_yaml_text(path, REMEDY))
    if document.error:
        raise UsageError(f"{path}:{document.error_line} cannot be used: {document.error}", REMEDY)
    if not isinstance(document.value, dict):
        raise UsageError(f"{path} is not a YAML mapping", REMEDY)
    host, port = document.get("hostname", "localhost"), document.get("port", 8000)
    problems: list[Problem] = []
    if not isinstance(host, str):
        problems.append(_problem(f"{path} hostname", f"hostname is {host!r}", "write a name or an address"))
        host = "localhost"
    if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
        problems.append(_problem(f"{path} port", f"port is {port!r}", "write a number from 1 to 65535"))
        port = 8000
    servers = {}
    for key, role in ROLES.items():
        found = list(_servers(path, key, role, document.get(key), problems))
        servers[role] = found
    everyone = [f"{host}:{port}", *(address for addresses in servers.values() for address in addresses)]
    for address in sorted({address for address in everyone if everyone.count(address) > 1}):
        message = f"{address} is listed twice"
        problems.append(_problem(str(path), message, "every server and the front need an address of their own"))
    return Front(path, document.text, host, port, servers, problems)


def _servers(path: Path, key: str, role: str, entry: Any, problems: list[Problem]) -> Iterator[str]:
    urls = entry.get("urls") if isinstance(entry, dict) else None
    if not isinstance(urls, list) or not urls:
        remedy = f"write {key}: {{num_instances: 1, urls: ['host:8001']}}"
        problems.append(_problem(f"{path} {key}", f"no {role} server is named", remedy))
        return
    count = entry.get("num_instances", 1)
    if count != len(urls):
        message = f"num_instances is {count} and there are {len(urls)} urls"
        problems.append(_problem(f"{path} {key}", message, f"write num_instances: {len(urls)}"))
    for url in urls:
        match = ADDRESS.fullmatch(str(url))
        if match is None or not 0 < int(match[1] or match[2]) < 65536:
            problems.append(_problem(f"{path} {key}", f"{url!r} is not host:port", "write it without http://"))
        else:
            yield str(url)


def _problem(where: str, message: str, remedy: str) -> Problem:
    return Problem("TS-SERVE-FRONT", "error", where, message, remedy)


def check_servers(front: Front, names: tuple[str, ...]) -> Iterator[Problem]:
    """Servers that do not answer yet, for which the front waits, and those of another model. `names`: what /v1/models
    may call the target."""
    from http.client import HTTPException

    from trtspec.launch.server import model_name, opener

    for role, addresses in front.servers.items():
        for address in addresses:
            try:
                with opener().open(f"http://{address}/health", timeout=2):
                    pass
                served = model_name(f"http://{address}", 2)
            except (OSError, ValueError, HTTPException, LookupError, TypeError) as error:
                reason = getattr(error, "reason", error)
                message = f"the {role} server {address} does not answer yet ({reason})"
                remedy = f"start it with `trtspec serve TARGET --config FILE --role {role}`"
                yield Problem("TS-SERVE-FRONT-WAITS", "warning", address, message, remedy)
                continue
            if served not in names:
                message = f"the {role} server {address} calls its model {served!r}, not {' or '.join(names)}"
                remedy = "pass the target that the servers serve; one with --served-model-name may keep its name"
                yield Problem("TS-SERVE-FRONT-MODEL", "warning", address, message, remedy)
