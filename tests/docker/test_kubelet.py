"""A kubelet in small runs a rendered server's pods: processes, read-only root, probes, preStop.

Engine and checkpoint are the stand-in and kimi-nano. Clients ask through a Service of the ready
pods while the server is scaled out and upgraded: nothing is killed for a probe and no request is
lost.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.command_line import free_port, program
from tests.docker.chart import IMAGE, merged, objects
from trtspec.data_files import DATA, kimi_nano_dir

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clock,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounts need root and unshare"
    ),
]
STANDIN = Path(__file__).parents[1] / "trtllm" / "standin" / "trtllm-serve"
# periods and settling times are divided by it; timeouts and failure thresholds are the chart's
FASTER = 10
ENGINE = (
    "# TensorRT-LLM 1.4.0rc1: trtspec build-config /models/target --head /models/head "
    "--trtllm-version 1.4.0rc1 --goal latency --tp-size 1 --max-batch-size 16 "
    "--max-num-tokens 1024 --max-seq-len 1024 --draft-len 3\n"
    "speculative_config:\n"
    "  decoding_type: Eagle\n"
    "  max_draft_len: 3\n"
    "  speculative_model_dir: /models/head\n"
)
VALUES = {
    "model": {"target": "/models/target", "head": "/models/head", "sizeGiB": 1}, "gpusPerNode": 1,
    "image": {"tag": "1.4.0rc1"}, "engineConfig": ENGINE, "download": {"enabled": False},
    "cache": {"accessMode": "ReadWriteMany"},
    "update": {"strategy": "RollingUpdate", "maxSurge": 1, "maxUnavailable": 0},
}  # fmt: skip
# the pod's volumes over a read-only view of this machine: /tmp is empty and /models holds the
# checkpoint
ROOT = """
set -e; mount --make-rprivate /; mount -t tmpfs none $POD/layer; mkdir $POD/layer/up $POD/layer/work
mount -t overlay none -o lowerdir=/,upperdir=$POD/layer/up,workdir=$POD/layer/work $POD/root
for place in cache models etc/trtspec tmp dev/shm; do mkdir -p $POD/root/$place; done
mount --bind /proc $POD/root/proc; mount --rbind /dev $POD/root/dev
mount -o remount,ro $POD/root
for place in cache tmp; do mount --bind $POD/$place $POD/root/$place; done
mount --bind -o ro $MODELS $POD/root/models; mount --bind -o ro $POD/config $POD/root/etc/trtspec
exec chroot $POD/root "$@"
"""


@dataclass
class Pod:
    """One container that runs, as its object says; `killed` names the probe that ended it."""

    spec: dict[str, Any]
    place: Path
    models: Path
    config: dict[str, str]
    port: int = 0
    ready: bool = False
    killed: str = ""
    stopping: bool = False
    process: subprocess.Popen[bytes] = field(init=False)

    def __post_init__(self) -> None:
        for name in ("root", "layer", "cache", "tmp", "config"):
            (self.place / name).mkdir(parents=True)
        for name, text in self.config.items():
            (self.place / "config" / name).write_text(text)
        self.port = free_port()
        words = [str(self.port) if word == "8000" else word for word in self.spec["args"]]
        assert words[0] == "trtspec"
        self.process = self.run([sys.executable, "-m", *words])
        threading.Thread(target=self.probe, daemon=True).start()

    def run(self, words: list[str]) -> subprocess.Popen[bytes]:
        own = {item["name"]: item["value"] for item in self.spec["env"] if "value" in item}
        mounts = {
            "POD": str(self.place),
            "MODELS": str(self.models),
            "TRTSPEC_DRAIN_PORT": str(self.port),
        }
        faster = {
            "TRTSPEC_DRAIN_SETTLE": str(10 / FASTER),
            "STANDIN_BACKEND": "reference",
            "STANDIN_LOAD": "1",
        }
        environ = {**os.environ, **own, **mounts, **faster}
        with (self.place / "log").open("ab") as log:
            command = ["unshare", "--mount", "bash", "-c", ROOT, "bash", *words]
            return subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def asks(self, probe: dict[str, Any]) -> bool:
        try:
            url = f"http://127.0.0.1:{self.port}{probe['httpGet']['path']}"
            return httpx.get(url, timeout=probe["timeoutSeconds"], trust_env=False).is_success
        except httpx.HTTPError:
            return False

    def failed(self, kind: str) -> bool:
        """Waits for one period of a probe, asks, and says whether it failed as often as it may."""
        probe = self.spec[kind]
        for _ in range(probe["failureThreshold"]):
            time.sleep(probe["periodSeconds"] / FASTER)
            if self.asks(probe) or self.stopping:
                return False
        return True

    def probe(self) -> None:
        if self.failed("startupProbe"):
            self.kill("startupProbe")
        self.ready = True
        threading.Thread(target=self.keep_ready, daemon=True).start()
        while not self.stopping:
            if self.failed("livenessProbe"):
                self.kill("livenessProbe")

    def keep_ready(self) -> None:
        while not self.stopping:
            self.ready = not self.failed("readinessProbe") and not self.stopping

    def kill(self, reason: str) -> None:
        self.killed = self.killed or reason
        os.killpg(self.process.pid, signal.SIGKILL)

    def stop(self, grace: float) -> int:
        """Ends a pod as a kubelet does: leave the Service, preStop, SIGTERM, SIGKILL at `grace`."""
        self.ready, self.stopping = False, True
        ends = time.monotonic() + grace
        hook = self.spec["lifecycle"]["preStop"]["exec"]["command"]
        self.run([sys.executable, *hook[1:]]).wait(grace)
        os.kill(self.process.pid, signal.SIGTERM)
        try:
            return self.process.wait(max(1.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill("terminationGracePeriodSeconds")
            return -9


class Node:
    """Runs the Deployment of a release as `helm install` and `helm upgrade` want it."""

    def __init__(self, place: Path) -> None:
        self.place, self.pods, self.made = place, list[Pod](), 0
        self.models = place / "models"
        shutil.copytree(kimi_nano_dir(), self.models / "target")
        shutil.copytree(DATA / "kimi-nano-eagle3", self.models / "head")

    def apply(self, values: dict[str, Any]) -> list[int]:
        """Statuses of the pods that an update or fewer replicas ended.

        New ones are ready before old ones go.
        """
        found = objects(merged(IMAGE, VALUES, values))
        deployment = next(item for item in found if item["kind"] == "Deployment")
        config = next(
            item["data"]
            for item in found
            if item["kind"] == "ConfigMap" and "engine.yml" in item["data"]
        )
        template = deployment["spec"]["template"]["spec"]
        container = template["containers"][0]
        old = [pod for pod in self.pods if pod.spec != container or pod.config != config]
        for _ in range(deployment["spec"]["replicas"] - (len(self.pods) - len(old))):
            self.made += 1
            pod = Pod(container, self.place / f"pod-{self.made}", self.models, config)
            self.pods.append(pod)
            while not pod.ready:
                assert pod.process.poll() is None and not pod.killed, (
                    pod.place / "log"
                ).read_text()[-3000:]
                time.sleep(0.1)
        statuses = []
        for pod in old:
            statuses.append(pod.stop(template["terminationGracePeriodSeconds"]))
            self.pods.remove(pod)
        return statuses


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    script = program(tmp_path / "bin" / "trtllm-serve", f'exec "{sys.executable}" "{STANDIN}" "$@"')
    # on the pod's PATH, in a place that its own /tmp does not hide
    found = Node(tmp_path)
    shutil.copytree(script.parent, found.models / "bin")
    monkeypatch.setenv("PATH", f"/models/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    yield found
    for pod in found.pods:
        pod.stopping = True
        os.killpg(pod.process.pid, signal.SIGKILL)
        pod.process.wait()


def test_no_probe_kills_and_no_request_is_lost(node: Node) -> None:
    done, answered, lost = threading.Event(), [0], list[str]()

    def client(seed: int) -> None:
        draw = random.Random(seed)
        while not done.is_set():
            ready = [pod for pod in node.pods if pod.ready]
            body = {
                "prompt": "def main(",
                "max_tokens": draw.choice((8, 64, 256)),
                "stream": draw.random() < 0.5,
            }
            url = f"http://127.0.0.1:{draw.choice(ready).port}/v1/completions"
            try:
                answer = httpx.post(url, json=body, timeout=300, trust_env=False)
                ended = (
                    answer.text.rstrip().endswith("[DONE]")
                    if body["stream"]
                    else answer.json()["choices"]
                )
                if not answer.is_success or not ended:
                    lost.append(answer.text[-300:])
            except (httpx.HTTPError, json.JSONDecodeError, KeyError) as error:
                lost.append(repr(error))
            answered[0] += 1

    assert node.apply({}) == []
    assert node.pods[0].run(["touch", "/unwritable"]).wait(30) != 0
    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(12)]
    for one in clients:
        one.start()
    try:
        time.sleep(20)  # busy: more liveness periods than may fail
        assert node.apply({"replicas": 2}) == []
        first = node.pods[0]
        assert first in node.pods and not first.stopping, "scaling out restarts nobody"
        upgraded = node.apply(
            {
                "replicas": 2,
                "engineConfig": ENGINE.replace("len 3", "len 2").replace("len: 3", "len: 2"),
            }
        )
        time.sleep(5)
    finally:
        done.set()
        for one in clients:
            one.join()
    print(
        f"\n{answered[0]} requests, {len(lost)} lost; "
        f"statuses of the two pods that were replaced: {upgraded}"
    )
    assert not lost, lost[:3]
    assert upgraded == [0, 0] and not any(pod.killed for pod in node.pods)
    assert answered[0] > 50
