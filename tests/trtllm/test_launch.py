"""Real launches of the stand-in over loopback: readiness, signals, statuses, causes, leftovers."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import command_line

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(
    standin_path: Path, tmp_path: Path, free_port: int, target_dir: Path, tiny_head: Path
) -> Iterator[Start]:
    """Starts `trtspec serve` on the tiny pair.

    `record` under tmp_path tells what the stand-in was given.
    """
    running: list[subprocess.Popen[str]] = []

    def run(
        *words: str,
        target: Path = target_dir,
        head: Path | None = tiny_head,
        log: int = subprocess.PIPE,
        **env: str,
    ) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "trtspec", "serve", str(target)]
        if "--disaggregated" not in words:
            command += ["--port", str(free_port), "--tp-size", "1", "--max-seq-len", "128"]
        command += [*(["--head", str(head)] if head else []), *words]
        environment = {
            **os.environ,
            "STANDIN_RECORD": str(tmp_path / "record"),
            "TRTSPEC_PROGRESS": "1",
            **env,
        }
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True)
        running.append(process)
        return process

    yield run
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until_ready(process: subprocess.Popen[str]) -> str:
    seen = ""
    assert process.stderr is not None
    for line in process.stderr:
        seen += line
        if line.startswith("trtspec: ready"):
            return seen
    raise AssertionError(f"ended with {process.wait()}:\n{seen}")


def recorded(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "record").read_text())


def nothing_left(tmp_path: Path, port: int) -> None:
    command_line.wait_for(lambda: not any(map(command_line.alive, recorded(tmp_path)["pids"])))
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


def test_launch_is_ready_after_a_generation_and_stops_on_sigterm(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    process = start()
    log = until_ready(process)
    assert "trtspec: loading weights" in log and "trtspec: warming up" in log
    with urllib.request.urlopen(f"http://localhost:{free_port}/health", timeout=300) as response:
        assert response.status == 200
    given = recorded(tmp_path)
    assert given["config"]["speculative_config"]["decoding_type"] == "Eagle"
    assert given["argv"][given["argv"].index("--max_seq_len") + 1] == "128"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0
    nothing_left(tmp_path, free_port)
    config = given["argv"][given["argv"].index("--extra_llm_api_options") + 1]
    assert not Path(config).exists()


@pytest.mark.parametrize(
    ("mode", "grace", "number", "statuses", "says"),
    [
        ("", "60", signal.SIGINT, (0, 130), ""),
        ("", "60", signal.SIGKILL, (-9,), ""),  # which nobody can handle: the guard sees it
        ("ignore-term", "1", signal.SIGKILL, (-9,), ""),
        ("ignore-term", "1", signal.SIGTERM, (137,), "did not end within 1 s"),
        ("leave-rank", "60", signal.SIGTERM, (0,), ""),
        ("stubborn-ranks", "3", signal.SIGTERM, (0,), ""),  # the server ends at once
    ],
)
@pytest.mark.clock
def test_a_signal_leaves_no_process_behind(
    start: Start,
    tmp_path: Path,
    free_port: int,
    mode: str,
    grace: str,
    number: int,
    statuses: tuple[int, ...],
    says: str,
) -> None:
    """A signal also ends a process that will not end, and ranks in sessions of their own.

    Process groups of their own too, as Open MPI's are.
    """
    process = start("--stop-grace", grace, STANDIN_MODE=mode)
    until_ready(process)
    pids = recorded(tmp_path)["pids"]  # server, daemon, rank
    assert "rank" not in mode or len({os.getpgid(pid) for pid in pids}) == 3
    process.send_signal(number)
    _, log = process.communicate(timeout=300)
    assert process.returncode in statuses and says in log
    nothing_left(tmp_path, free_port)


@pytest.mark.parametrize(
    ("mode", "words", "status", "says"),
    [
        ("crash-loading", (), 17, "two-model mode"),
        ("oom", (), 1, "lower --max-batch-size"),
        ("die-serving", (), 42, "while serving with status 42"),
    ],
)
@pytest.mark.clock
def test_a_failure_passes_its_status_and_cause(
    start: Start,
    tmp_path: Path,
    free_port: int,
    mode: str,
    words: tuple[str, ...],
    status: int,
    says: str,
) -> None:
    process = start(*words, STANDIN_MODE=mode)
    _, log = process.communicate(timeout=300)
    assert process.returncode == status, log
    assert says in log and "\n-> " in log and "Traceback" not in log
    nothing_left(tmp_path, free_port)


def test_a_server_that_is_never_ready_is_ended(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    seconds = 1
    while not (tmp_path / "record").exists():  # on a busy machine it begins later
        process = start("--startup-timeout", str(seconds), STANDIN_MODE="no-health")
        _, log = process.communicate(timeout=900)
        assert process.returncode == 1 and f"not ready after {seconds} s" in log
        seconds *= 10
    nothing_left(tmp_path, free_port)


@pytest.mark.parametrize("log", ["a full disk", "a reader that has gone"])
def test_the_status_does_not_depend_on_the_log(
    start: Start, tmp_path: Path, free_port: int, log: str
) -> None:
    if log == "a full disk":
        stream = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stream = os.pipe()
        os.close(reader)
    process = start(log=stream, STANDIN_MODE="crash-loading")
    os.close(stream)
    assert process.wait(timeout=300) == 17
    nothing_left(tmp_path, free_port)


def test_an_engine_that_dies_under_load_is_told_and_not_restarted(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    process = start(STANDIN_MODE="die-under-load")
    until_ready(process)
    body = json.dumps({"model": "m", "prompt": "abc", "max_tokens": 1}).encode()

    def ask() -> None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(
                f"http://localhost:{free_port}/v1/completions", body, timeout=300
            ).read()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    _, log = process.communicate(timeout=300)
    for thread in threads:
        thread.join()
    assert process.returncode == 1
    assert (
        "ended while serving with status 1: a GPU kernel crashed" in log and "Traceback" not in log
    )
    nothing_left(tmp_path, free_port)


def test_argv_and_environment_are_what_the_dry_run_said(start: Start, tmp_path: Path) -> None:
    process = start(
        "--dry-run", "--json", "--trtllm-version", "1.3.0rc20", "--", "--log_level", "debug"
    )
    promised = json.loads(process.communicate(timeout=300)[0])
    process = start("--", "--log_level", "debug", MY_OWN="1")
    until_ready(process)
    given = recorded(tmp_path)
    config = given["argv"][-1]
    assert ["trtllm-serve", *given["argv"][:-1], promised["argv"][-1]] == promised["argv"]
    assert config != promised["argv"][-1] and promised["env"].items() <= given["env"].items()
    assert given["env"]["MY_OWN"] == "1" and given["config"] == promised["config"]
    added = {"PYTHONUNBUFFERED", "STANDIN_RECORD", "TRTSPEC_PROGRESS", "MY_OWN"}
    assert set(given["env"]) - set(os.environ) <= added | {
        "PWD",
        "SHLVL",
        "_",
        "OLDPWD",
        "LC_CTYPE",
    }


@pytest.mark.parametrize(
    ("words", "installed", "says"),
    [
        ((), "1.2.1", "TS-LINT-MODEL-TOO-NEW"),
        (
            ("--trtllm-version", "1.4.0rc1"),
            "1.3.0rc20",
            "TS-SERVE-OTHER-ENGINE .*1.3.0rc20 is installed",
        ),
    ],
)
def test_the_installed_version_decides(
    start: Start, tmp_path: Path, words: tuple[str, ...], installed: str, says: str
) -> None:
    """An engine that cannot run the model, or was not judged, is refused before the launch."""
    process = start(*words, STANDIN_VERSION=installed)
    _, log = process.communicate(timeout=300)
    assert process.returncode == 3 and re.search(says, log), log
    assert not (tmp_path / "record").exists()


def test_a_head_with_values_that_are_no_numbers_is_not_launched(
    start: Start, tmp_path: Path, tiny_head: Path
) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny_head, broken)
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["fc.weight"].view(-1)[5] = float("nan")
    save_file(tensors, file)
    process = start(head=broken)
    _, log = process.communicate(timeout=300)
    assert process.returncode != 0 and "NaN" in log, log
    assert not (tmp_path / "record").exists()


def test_a_taken_port_and_forced_acceptance_are_refused(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        process = start(TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS="2")
        _, log = process.communicate(timeout=300)
    assert process.returncode == 3 and "TS-SERVE-PORT" in log and "TS-LINT-FORCED-ACCEPTANCE" in log
    assert not (tmp_path / "record").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_starts_and_stops_leak_nothing(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    """The machine has no marked process and no temporary file left.

    Processes are counted by a mark in their environment.
    """
    mark = f"{os.getpid()}-{tmp_path.name}"

    def marked() -> list[int]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("STANDIN_MARK") == mark:
                    found.append(process.pid)
        return found

    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for cycle in range(100):
        process = start(STANDIN_MARK=mark, STANDIN_LOAD="0", TMPDIR=str(temporary))
        until_ready(process)
        assert cycle % 10 or len(marked()) == 5  # trtspec, guard, server, daemon, rank
        process.send_signal((signal.SIGTERM, signal.SIGINT)[cycle % 2])
        assert process.wait(timeout=300) in (0, 130)
        nothing_left(tmp_path, free_port)
        process.communicate()
        assert not list(temporary.iterdir()) and (cycle % 10 or not marked())
    left = marked()
    print(
        f"\n100 cycles leave {len(left)} processes, {len(list(temporary.iterdir()))} files; "
        f"port {free_port} is free"
    )
    assert not left


def test_upstreams_own_manifest_takes_our_command(
    start: Start, tmp_path: Path, free_port: int, manifests: Path
) -> None:
    """The stand-in with the engine's own list of options takes our command, for the newest line.

    The list replaces our schema.
    """
    process = start(
        "--", "--log_level", "debug", "--num_postprocess_workers", "2", STANDIN_VERSION="1.4.0rc1",
        STANDIN_MANIFEST=str(manifests / "main" / "trtllm_serve_cli.yaml"),
    )  # fmt: skip
    until_ready(process)
    assert "--no-telemetry" in recorded(tmp_path)["argv"]


def test_the_reference_backend_serves_behind_the_standin(start: Start, free_port: int) -> None:
    """The whole path: config, launch, a real speculative generation, and a clean end."""
    process = start(STANDIN_BACKEND="reference")
    log = until_ready(process)
    body = json.dumps({"model": "m", "prompt": "abc", "max_tokens": 4, "temperature": 0})
    with urllib.request.urlopen(f"http://localhost:{free_port}/v1/models", timeout=300) as response:
        body = body.replace('"m"', json.dumps(json.load(response)["data"][0]["id"]))
    request = urllib.request.Request(
        f"http://localhost:{free_port}/v1/completions",
        body.encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        choice = json.load(response)["choices"][0]
    assert choice["avg_decoded_tokens_per_iter"] >= 1, log
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="Open MPI's mpirun is not installed")
def test_two_ranks_under_open_mpi_start_and_end_together(
    start: Start, tmp_path: Path, free_port: int
) -> None:
    config = tmp_path / "config.yml"
    config.write_text("print_iter_log: true\n")
    more = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "LWS_LEADER_ADDRESS": "localhost", "LWS_GROUP_SIZE": "1",
    }  # fmt: skip
    process = start(
        "--config",
        str(config),
        "--launcher",
        "lws",
        "--nodes",
        "1",
        "--gpus-per-node",
        "2",
        "--tp-size",
        "2",
        "--launcher-args",
        "--oversubscribe",
        head=None,
        **more,
    )
    until_ready(process)
    assert sorted((tmp_path / "record.ranks").read_text().split()) == ["0", "1"]
    assert recorded(tmp_path)["argv"][-1] == str(config)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) in (0, 1, 143)  # mpirun's own: 1
    nothing_left(tmp_path, free_port)


def test_the_front_of_a_disaggregated_pair(start: Start, tmp_path: Path, free_port: int) -> None:
    other = command_line.free_port()
    front = tmp_path / "front.yml"
    behind = f"{{num_instances: 1, urls: ['localhost:{free_port}']}}"
    front.write_text(f"hostname: localhost\nport: {other}\ncontext_servers: {behind}\n")
    with front.open("a") as more:
        more.write(f"generation_servers: {behind.replace('localhost', '127.0.0.1')}\n")
    server = start("--role", "context")
    until_ready(server)
    assert recorded(tmp_path)["argv"][-4:-2] == ["--server_role", "CONTEXT"]
    process = start("--disaggregated", str(front), "--startup-timeout", "60", head=None)
    until_ready(process)
    assert recorded(tmp_path)["argv"] == [
        "disaggregated",
        "-c",
        str(front),
        "-t",
        "60",
        "-r",
        "3600",
    ]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 0
    nothing_left(tmp_path, other)
