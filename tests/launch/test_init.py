"""trtspec as process 1 of a container: signals reach it at any moment."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.command_line import TRTSPEC, program, wait_for

# a PID namespace with a /proc of its own, as a container has
CONTAINER = [
    "unshare",
    "--user",
    "--map-root-user",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]


def containers_work() -> bool:
    return (
        shutil.which("unshare") is not None
        and subprocess.run([*CONTAINER, "true"], check=False).returncode == 0
    )


pytestmark = pytest.mark.skipif(
    not containers_work(), reason="this machine makes no PID namespaces"
)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_checks_before_a_launch(tmp_path: Path, number: int, status: int) -> None:
    """The engine is asked for its version, and does not answer."""
    asked = tmp_path / "asked"
    program(tmp_path / "trtllm-serve", f"touch {asked}\nexec sleep 600")
    words = [*TRTSPEC, "serve", "nvidia/Kimi-K2.6-NVFP4"]
    process = subprocess.Popen(
        [*CONTAINER, *words],
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: asked.exists() or process.poll() is not None)
        (first,) = psutil.Process(process.pid).children()
        first.send_signal(number)
        assert process.wait(300) == status
    finally:
        process.kill()
        process.communicate()
