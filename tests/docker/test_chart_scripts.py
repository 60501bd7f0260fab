"""The chart's scripts, run: leader of several nodes, liveness probe, drain before a stop."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import printed, program
from tests.docker.chart import CHART
from trtspec.trtllm.serve.command import lws_hosts

SCRIPTS = CHART / "scripts"


@pytest.mark.parametrize("name", ["leader.sh", "worker.sh"])
def test_scripts_parse(name: str) -> None:
    printed("bash", "-n", SCRIPTS / name)


def test_the_leader_waits_for_its_workers_and_hands_on_what_belongs_to_all(tmp_path: Path) -> None:
    """leader.sh waits for its workers and gives mpirun what all need.

    ssh fails at first; trtspec and mpirun print what they are given.
    """
    programs = tmp_path / "bin"
    once = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 1; }}"
    bodies = {"ssh": once, "sleep": "true", "mpirun": "true", "trtspec": 'printf "%s\\n" "$@"'}
    for name, body in bodies.items():
        program(programs / name, body)
    (tmp_path / "id_ed25519").write_text("key\n")
    environ = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TRTSPEC_SSH_KEYS": str(tmp_path),
        "LWS_LEADER_ADDRESS": "kimi-0.kimi.serving",
        "LWS_GROUP_SIZE": "3",
        "PYTHONUNBUFFERED": "1",
        "NCCL_DEBUG": "WARN",
        "HOSTNAME": "kimi-0",
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    }
    command = [
        "bash",
        str(SCRIPTS / "leader.sh"),
        "trtspec",
        "serve",
        "model",
        "--launcher",
        "lws",
        "--nodes",
        "3",
    ]
    said, *words = printed(*command, "--", "--log_level", "info", env=environ).splitlines()
    assert said == "waiting for kimi-0-1.kimi.serving"
    assert words[:2] == ["serve", "--launcher-args"] and words[3:] == [
        *command[4:],
        "--",
        "--log_level",
        "info",
    ]
    import shlex

    given = shlex.split(words[2])
    assert given[:2] == ["--prefix", str(tmp_path)] and given[2:4] == ["--mca", "plm_rsh_args"]
    assert f"-i {tmp_path}/ssh/id_ed25519" in given[4] and "-p 2222" in given[4]
    exported = {after for word, after in zip(given, given[1:], strict=False) if word == "-x"}
    assert {"NCCL_DEBUG", "PATH"} <= exported
    assert (
        not {"HOSTNAME", "KUBERNETES_SERVICE_HOST", "LWS_GROUP_SIZE", "PYTHONUNBUFFERED"} & exported
    )
    assert (tmp_path / "ssh" / "id_ed25519").stat().st_mode & 0o77 == 0
    assert lws_hosts(environ)[1:] == ["kimi-0-1.kimi.serving", "kimi-0-2.kimi.serving"]


def drain(port: int, limit: float) -> subprocess.Popen[bytes]:
    environ = {**os.environ, "TRTSPEC_DRAIN_PORT": str(port), "TRTSPEC_DRAIN_SETTLE": "0"}
    return subprocess.Popen([sys.executable, str(SCRIPTS / "drain.py"), str(limit)], env=environ)


@pytest.mark.clock
def test_the_drain_waits_for_the_last_connection_and_no_longer_than_its_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert drain(port, 60).wait(300) == 0, "nobody is connected"
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        waiting = drain(port, 120)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(1)
        client.close()
        accepted.close()
        assert waiting.wait(300) == 0
        with socket.create_connection(("127.0.0.1", port)):
            held, _ = server.accept()
            start = time.monotonic()
            assert drain(port, 1).wait(300) == 0 and time.monotonic() - start >= 1
            held.close()
