"""Prints the build argument that pins the base image of each Dockerfile to the digest that its registry has now.

    python3 docker/pin_bases.py [--trtllm-version 1.3.0rc20] [--json] [DOCKERFILE ...]

The digests come from the registry (OCI distribution API) and nowhere else: nothing is written down here. Needs nothing
but Python. Status 1 when a registry cannot be reached or does not have the tag.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
DOCKER_HUB = {"docker.io": "registry-1.docker.io"}
LOCAL = ("localhost", "127.0.0.1")
MANIFESTS = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)


def base_of(dockerfile: Path, version: str | None) -> str:
    """The default of ARG BASE, with the version in it."""
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile.read_text(encoding="utf-8"), re.MULTILINE))
    if version is not None and "TRTLLM_VERSION" in arguments:
        arguments["TRTLLM_VERSION"] = version
    return re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], arguments["BASE"])


def split(reference: str) -> tuple[str, str, str]:
    """`registry/name:tag` in parts."""
    registry, _, rest = reference.partition("/")
    name, _, tag = rest.rpartition(":")
    return registry, name, tag


def digest(reference: str) -> str:
    """`sha256:...` of a tag's manifest, or of its index where there is one for several platforms."""
    registry, name, tag = split(reference)
    host = DOCKER_HUB.get(registry, registry)
    scheme = "http" if host.partition(":")[0] in LOCAL else "https"
    request = urllib.request.Request(f"{scheme}://{host}/v2/{name}/manifests/{tag}", headers={"Accept": MANIFESTS})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise
        request.add_header("Authorization", f"Bearer {token(challenge)}")
        answer = urllib.request.urlopen(request, timeout=60)
    with answer:
        body = answer.read()
        told = answer.headers.get("Docker-Content-Digest")
    found = f"sha256:{hashlib.sha256(body).hexdigest()}"
    if told is not None and told != found:
        raise ValueError(f"{host} says {told} of a manifest whose digest is {found}")
    return found


def token(challenge: str) -> str:
    """Anonymous, or for REGISTRY_USER and REGISTRY_PASSWORD."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    request = urllib.request.Request(f"{fields['realm']}?{query}")
    if user := os.environ.get("REGISTRY_USER"):
        secret = f"{user}:{os.environ.get('REGISTRY_PASSWORD', '')}"
        request.add_header("Authorization", f"Basic {base64.b64encode(secret.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    return found.get("token") or found["access_token"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dockerfiles", nargs="*", type=Path, default=sorted(HERE.glob("*.Dockerfile")))
    parser.add_argument("--trtllm-version", help="instead of the serving image's own default")
    parser.add_argument("--json", action="store_true", help="one object: Dockerfile -> pinned reference")
    options = parser.parse_args()
    pinned = {}
    for dockerfile in options.dockerfiles:
        reference = base_of(dockerfile, options.trtllm_version)
        try:
            pinned[dockerfile.name] = f"{reference.rpartition(':')[0]}@{digest(reference)}"
        except (OSError, ValueError, LookupError) as error:
            print(f"{dockerfile.name}: {reference}: {error}", file=sys.stderr)
            return 1
    if options.json:
        print(json.dumps(pinned, indent=2))
    else:
        for name, reference in pinned.items():
            print(f"docker build -f docker/{name} --build-arg BASE={reference} .")
    return 0


if __name__ == "__main__":
    sys.exit(main())
