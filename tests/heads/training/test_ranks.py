"""Two processes (gloo) train like one: same loss curve, resumable, one writer.

Started as users do, by torchrun.
"""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.command_line import ROOT, printed, ran
from tests.heads.training.test_training import after_steps, curve
from tests.json_files import read_json
from tests.tiny import read_tensors
from trtspec.errors import UsageError
from trtspec.heads.training.ranks import Ranks, ranks_from_env

LAUNCHERS = {
    "alone": [],
    "replicated": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
}
OPTIONS = [
    "--seq-len",
    "96",
    "--steps",
    "12",
    "--batch-size",
    "5",
    "--lr",
    "0.003",
    "--save-every",
    "3",
]


def command(launcher: str, *arguments: str) -> list[str]:
    return [sys.executable, *LAUNCHERS[launcher], "-m", "trtspec", *arguments]


@pytest.fixture(scope="module")
def train(target_dir, data):
    """The words of the same training, but for its output."""
    words = ["train", str(target_dir), str(data), *OPTIONS]
    return lambda output, prompts="0": [*words, "-o", str(output), "--acceptance-prompts", prompts]


def run(launcher: str, *arguments: str) -> None:
    printed(*command(launcher, *arguments), cwd=ROOT, timeout=900)


def assert_same_curve(ours: Path, theirs: Path) -> None:
    for one, other in zip(curve(ours), curve(theirs), strict=True):
        assert (one["step"], one.get("tokens")) == (other["step"], other.get("tokens"))
        pair = (one.get("held_out", one), other.get("held_out", other))
        assert pair[0]["loss"] == pytest.approx(pair[1]["loss"], rel=2e-5)
        assert pair[0]["accuracy"] == pytest.approx(pair[1]["accuracy"], abs=0.02)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, train):
    output = tmp_path_factory.mktemp("one") / "head"
    run("alone", *train(output))
    return output


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(tmp_path, one_process, train):
    output = tmp_path / "head"
    run("replicated", *train(output, "2"))
    assert_same_curve(output, one_process)
    assert {p.name for p in output.iterdir()} == {p.name for p in one_process.iterdir()}
    training = read_json(output / "provenance.json")["training"]
    assert training["processes"] == 2
    ours, theirs = (read_tensors(path) for path in (output, one_process))
    worst = max(float((ours[n].float() - theirs[n].float()).abs().max()) for n in theirs)
    apart = max(
        abs(a["loss"] - b["loss"])
        for a, b in zip(curve(output), curve(one_process), strict=True)
        if "loss" in a
    )
    print(
        f"losses differ by {apart:.1e}, "
        f"a weight of the export by {worst:.1e} at most after 12 steps"
    )
    assert worst < 1e-2
    assert torch.equal(ours["d2t"], theirs["d2t"]) if "d2t" in theirs else True


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "resumed"),
    [("replicated", "replicated"), ("replicated", "alone"), ("alone", "replicated")],
)
def test_two_processes_killed_go_on(tmp_path, one_process, train, killed, resumed):
    output = tmp_path / "head"
    arguments = train(output)
    group = subprocess.Popen(command(killed, *arguments), cwd=ROOT)
    after_steps(group, output, 7)
    launcher = psutil.Process(group.pid)  # its workers lead sessions of their own
    everybody = [*launcher.children(recursive=True), launcher]
    for process in everybody:
        process.kill()
    psutil.wait_procs(everybody, 20)
    group.wait()
    assert (output / ".trtspec").exists()
    run(resumed, *arguments)
    assert_same_curve(output, one_process)


def test_the_launchers_settings_are_read_or_refused(monkeypatch):
    assert ranks_from_env() == Ranks()
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_from_env() == Ranks(1, 2, 1)
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(UsageError, match="is not a number"):
        ranks_from_env()


@pytest.mark.slow
def test_nodes_that_see_different_disks_are_refused(tmp_path):
    """Each process with a directory of its own in place of a shared one."""
    script = (
        "import pathlib, sys\n"
        "from trtspec.heads.training.ranks import process_group, require_shared\n"
        "with process_group('cpu') as ranks:\n"
        "    require_shared(pathlib.Path(sys.argv[1], 'run'), ranks, 'reads it')\n"
        "    require_shared(pathlib.Path(sys.argv[1], f'run-{ranks.rank}'), ranks, 'reads it')\n"
    )
    python = sys.executable
    line = [python, *LAUNCHERS["replicated"], "--no-python", python, "-c", script, tmp_path]
    done = ran(*line, cwd=ROOT, timeout=900)
    assert done.status != 0
    assert "1 of 2 processes do not see" in done.stderr and "/run-" in done.stderr
    assert not list(tmp_path.rglob(".shared-*"))
