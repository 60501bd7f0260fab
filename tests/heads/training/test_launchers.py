"""What `train --print-launch` prints runs as printed: two nodes on loopback train to the losses of one process."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trtspec.heads.training.processes import TrainingNodes, launch_text

ROOT = Path(__file__).parents[3]
OPTIONS = ["--seq-len", "96", "--steps", "6", "--batch-size", "4", "--acceptance-prompts", "0", "--device", "cpu"]
OPTIONS += ["--config", "train.yaml"]
# srun starts the script's line once per node, scontrol names the nodes: all that the script asks of Slurm
STUBS = {
    "scontrol": '#!/bin/bash\nprintf "127.0.0.1\\n127.0.0.1\\n"\n',
    "srun": """#!/bin/bash
shift  # --kill-on-bad-exit=1
for node in $(seq "$SLURM_JOB_NUM_NODES"); do "$@" & pids+=($!); done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit $status
""",
}


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def environment(directory: Path) -> dict[str, str]:
    """The launchers and the stubs on the PATH, the package where the text's directory does not hold it."""
    for name, text in STUBS.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    path = os.pathsep.join([str(directory), str(Path(sys.executable).parent), os.environ["PATH"]])
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return (
        os.environ | {"PATH": path, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n"} | more
    )


def trtspec(*words: str, cwd: Path) -> str:
    line = [sys.executable, "-m", "trtspec", *words]
    done = subprocess.run(line, cwd=cwd, env=environment(cwd), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(output: Path) -> list[float]:
    rows = [json.loads(line) for line in (output / "training.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # processes that import ModelOpt, on a busy machine
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "slurm"])
def test_two_nodes_train_to_the_losses_of_one_process(tmp_path, target_dir, data, launcher):
    words = ["train", str(target_dir), str(data), *OPTIONS]
    (tmp_path / "train.yaml").write_text("precision: fp32\n")
    trtspec(*words, "-o", "alone", cwd=tmp_path)
    text = trtspec(
        *words, "-o", "nodes", "--print-launch", launcher, "--nodes", "2", "--gpus-per-node", "1", cwd=tmp_path
    )
    env = environment(tmp_path)
    if launcher == "slurm":
        assert f"#SBATCH --chdir={tmp_path}" in text  # which sbatch obeys, and bash does not
        nodes = [subprocess.Popen(["bash", "-c", text], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)]
    else:
        nodes = [
            subprocess.Popen(
                ["bash", "-c", text], env=env | {"NODE_RANK": rank}, cwd="/", stderr=subprocess.PIPE, text=True
            )
            for rank in "01"
        ]
    for node in nodes:
        _, err = node.communicate(timeout=900)
        assert node.returncode == 0, err[-3000:]
    worst = max(abs(a - b) for a, b in zip(losses(tmp_path / "nodes"), losses(tmp_path / "alone"), strict=True))
    print(f"{launcher}, 2 nodes x 1 process: losses of 6 steps differ by {worst:.1e} from one process")
    assert worst < 2e-5 * max(losses(tmp_path / "alone"))
    training = json.loads((tmp_path / "nodes/provenance.json").read_text())["training"]
    assert (training["processes"], training["sharded"]) == (2, launcher == "accelerate")


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate", "slurm"])
@pytest.mark.parametrize("cluster", [TrainingNodes(1, 8), TrainingNodes(2, 8)])
def test_the_text_is_shell_and_carries_the_words(launcher, cluster, tmp_path):
    words = ["moonshotai/Kimi-K2.6", "an answer's file.jsonl", "-o", "head", "--device", "cuda"]
    text = launch_text(launcher, words, cluster, tmp_path / "a b")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    (line,) = [line for line in text.splitlines() if " -m trtspec train " in line]
    assert shlex.split(line)[-len(words) :] == words
    assert ("--gpus-per-node=8" in text) == (launcher == "slurm")


def test_a_cluster_gives_as_much_as_is_needed():
    assert TrainingNodes(2, 8).holding(8) == TrainingNodes(1, 8)
    assert TrainingNodes(2, 8).holding(100) == TrainingNodes(2, 8)
    assert TrainingNodes(4, 4).holding(8) == TrainingNodes(2, 4)
    assert TrainingNodes(1, 8).holding(3) == TrainingNodes(1, 3)
