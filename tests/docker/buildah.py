"""Debian's buildah, and bases that stand in for the public ones.

They are a Debian with Python, and on it, for each tag of the engine's image, the libraries that the
release pins.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import printed, ran

ROOT = Path(__file__).resolve().parents[2]
INCLUDED = "python3,python3-venv,ca-certificates"  # what the public Python image has
# the machine's own way to its package index, given to the build and absent from the image
MOUNTS = [Path("/etc/ssl/certs"), Path("/etc/pip.conf"), Path.home() / ".config" / "pip"]


def missing() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "building a base image with debootstrap needs root on Linux"
    return next(
        (
            f"{name} is not installed"
            for name in ("buildah", "debootstrap")
            if not shutil.which(name)
        ),
        None,
    )


REALLY_BUILT = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(missing()), reason=str(missing())),
]


class Buildah:
    """buildah with everything it writes below one directory."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.command = [
            "buildah",
            "--root",
            str(scratch / "root"),
            "--runroot",
            str(scratch / "run"),
        ]
        self.environ = {**os.environ, "STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}

    def __call__(self, *words: str, timeout: float = 1800) -> str:
        line = [*self.command, *words]
        return printed(*line, env=self.environ, cwd=ROOT, timeout=timeout).strip()

    def config(self, image: str, base: str) -> dict[str, Any]:
        """What the image says of itself, with what every image of ours must say."""
        config = json.loads(self("inspect", "--type", "image", image))["Docker"]["config"]
        assert config["User"] == "1000" and config["Healthcheck"]["Test"][0] == "CMD"
        assert config["Labels"]["org.opencontainers.image.base.name"] == base
        private = ("PIP_", "SSL_", "HF_TOKEN")
        assert not [value for value in config["Env"] if value.startswith(private)]
        return config  # type: ignore[no-any-return]

    def build(self, dockerfile: str, tag: str, *words: str, context: str = ".") -> None:
        given = ["--pull-never", "--format", "docker", "--timestamp", "0", *mounts()]
        self("bud", *given, *words, "-f", dockerfile, "-t", tag, context, timeout=3000)

    def run(self, image: str, *command: str, user: str = "1000") -> str:
        """What a command prints in a container of the image, which is removed again."""
        container = self("from", "--pull-never", image)
        try:
            return self("run", "--user", user, container, "--", *command)
        finally:
            self("rm", container)

    def import_debian(self, tag: str = "localhost/base") -> None:
        container = self("from", "scratch")
        self("add", "--quiet", container, str(debian(self.scratch)), "/")
        self("commit", "--quiet", container, tag)
        self("rm", container)
        shutil.rmtree(self.scratch / "base", ignore_errors=True)

    def clean(self) -> None:
        ran(*self.command, "rm", "--all", env=self.environ)
        shutil.rmtree(self.scratch, ignore_errors=True)


def mounts() -> list[str]:
    """Also every directory that pip's settings name."""
    settings = ran(sys.executable, "-m", "pip", "config", "list").stdout
    named = {Path(word) for word in re.findall(r"(?:file://)?(/[^\s'\"\\]+)", settings)}
    # an index's pages lie in `simple` and point at files beside it
    places = [
        *MOUNTS,
        *sorted(
            {path.parent if path.name == "simple" else path for path in named if path.is_dir()}
        ),
    ]
    return [word for path in places if path.exists() for word in ("--volume", f"{path}:{path}:ro")]


def debian_mirror() -> str:
    """The mirror of this machine's own apt sources."""
    words = ("indextargets", "--format", "$(SITE)", "Created-By: Packages")
    listed = ran("apt-get", *words).stdout.split()
    found = [site for site in listed if site.rstrip("/").endswith("/debian")]
    return found[0] if found else "http://deb.debian.org/debian"


def debian(scratch: Path) -> Path:
    """A Debian with Python: made here, or the tar that TRTSPEC_DEBIAN_TAR names."""
    if ready := os.environ.get("TRTSPEC_DEBIAN_TAR"):
        return Path(ready)
    base = scratch / "base"
    subprocess.run(
        [
            "debootstrap",
            "--variant=minbase",
            f"--include={INCLUDED}",
            "bookworm",
            str(base),
            debian_mirror(),
        ],
        check=True,
        stdout=subprocess.DEVNULL,
        timeout=1800,
    )
    return base
