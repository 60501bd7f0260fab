"""A small cluster: places the pods of rendered objects and runs them to a standstill.

Rules, as Kubernetes documents them: resource requests hold for the pod's life, taints and
tolerations, node selectors, required pod affinity (the first pod of its kind may start anywhere)
and anti-affinity by host, claims that bind with their first consumer, ReadWriteOnce as one node at
a time, local volumes as that node for good. A pod that has its volume runs its init containers,
then its containers. What a step of the chart waits for or writes are the files /models/.trtspec/*,
read from the commands.
"""

import itertools
import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

GPU = "nvidia.com/gpu"
MARKER = re.compile(r"/models/\.trtspec/[\w-]+")
HOST = "kubernetes.io/hostname"


@dataclass
class Node:
    name: str
    gpus: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    taints: tuple[str, ...] = ()  # keys of NoSchedule


@dataclass(eq=False)
class Pod:
    name: str
    spec: dict[str, Any]
    labels: dict[str, str]
    job: bool
    node: Node | None = None
    done: bool = False
    running: bool = False

    @property
    def gpus(self) -> int:
        containers = self.spec["containers"]
        return sum(int(c.get("resources", {}).get("limits", {}).get(GPU, 0)) for c in containers)

    def markers(self, key: str) -> set[str]:
        containers = self.spec.get(key, [])
        words = [word for c in containers for word in c.get("command", []) + c.get("args", [])]
        return {found for word in words for found in MARKER.findall(word)}

    @property
    def claim(self) -> str | None:
        claims = [
            v["persistentVolumeClaim"]["claimName"]
            for v in self.spec["volumes"]
            if "persistentVolumeClaim" in v
        ]
        return claims[0] if claims else None


def pods(objects: Iterable[dict[str, Any]]) -> list[Pod]:
    """Of everything but DaemonSets, whose pods depend on the nodes: see `Cluster.daemons`."""
    found = []
    for item in objects:
        name, spec = item["metadata"]["name"], item.get("spec", {})
        templates: list[tuple[dict[str, Any], int]] = []
        if item["kind"] == "Job":
            templates = [(spec["template"], spec.get("completions", 1))]
        elif item["kind"] in ("Deployment", "StatefulSet"):
            templates = [(spec["template"], spec.get("replicas", 1))]
        elif item["kind"] == "LeaderWorkerSet":
            group, replicas = spec["leaderWorkerTemplate"], spec.get("replicas", 1)
            templates = [
                (group["leaderTemplate"], replicas),
                (group["workerTemplate"], replicas * (group["size"] - 1)),
            ]
        for template, count in templates:
            found += [
                Pod(
                    f"{name}-{index}",
                    template["spec"],
                    template["metadata"]["labels"],
                    item["kind"] == "Job",
                )
                for index in range(count)
            ]
    return found


@dataclass
class Cluster:
    """`volume` backs a claim without ReadWriteMany; `shared`: every claim mounts everywhere."""

    nodes: list[Node]
    volume: Literal["network", "local"] = "network"
    shared: bool = False
    placed: list[Pod] = field(default_factory=list)
    attached: dict[str, Node] = field(default_factory=dict)
    pinned: dict[str, Node] = field(default_factory=dict)
    written: set[tuple[str, str]] = field(default_factory=set)  # (place, marker)
    waited: set[str] = field(default_factory=set)  # pods that held GPUs and waited for a checkpoint

    def place_of(self, pod: Pod) -> str:
        """Where its files are: in the claim, or on its node."""
        return pod.claim or (pod.node.name if pod.node else "")

    def fits(self, pod: Pod, node: Node) -> bool:
        spec, claim = pod.spec, pod.claim
        tolerated = {item.get("key") for item in spec.get("tolerations", [])}
        used = sum(other.gpus for other in self.placed if other.node is node and not other.done)
        labels = {**node.labels, HOST: node.name}
        return (
            all(key in tolerated for key in node.taints)
            and all(labels.get(key) == value for key, value in spec.get("nodeSelector", {}).items())
            and used + pod.gpus <= node.gpus
            and (claim not in self.pinned or self.pinned[claim] is node)
            and all(self.near(pod, node, term) for term in terms(spec, "podAffinity"))
            and not any(self.seen(term, node) for term in terms(spec, "podAntiAffinity"))
        )

    def seen(self, term: dict[str, Any], node: Node | None = None) -> bool:
        wanted = term["labelSelector"]["matchLabels"].items()
        alive = [pod for pod in self.placed if not pod.done and (node is None or pod.node is node)]
        return any(wanted <= pod.labels.items() for pod in alive)

    def near(self, pod: Pod, node: Node, term: dict[str, Any]) -> bool:
        own = term["labelSelector"]["matchLabels"].items() <= pod.labels.items()
        return self.seen(term, node) or (own and not self.seen(term))

    def mounts(self, pod: Pod) -> bool:
        """Attaches the claim where nobody else keeps it on another node."""
        if pod.claim is None or self.shared or pod.node is None:
            return True
        users = [
            other
            for other in self.placed
            if other.claim == pod.claim and not other.done and other is not pod
        ]
        holder = self.attached.get(pod.claim)
        if (
            holder is not None
            and holder is not pod.node
            and any(other.node is holder for other in users)
        ):
            return False
        self.attached[pod.claim] = pod.node
        return True

    def daemons(self, objects: Iterable[dict[str, Any]]) -> list[Pod]:
        """A pod of each DaemonSet for every node that it may run on."""
        templates = [item["spec"]["template"] for item in objects if item["kind"] == "DaemonSet"]
        found = []
        for template in templates:
            for node in self.nodes:
                pod = Pod(
                    f"daemon-{node.name}", template["spec"], template["metadata"]["labels"], False
                )
                pod.spec = {
                    **pod.spec,
                    "nodeSelector": {**pod.spec.get("nodeSelector", {}), HOST: node.name},
                }
                found += [pod] if self.fits(pod, node) else []
        return found

    def step(self, waiting: list[Pod]) -> bool:
        """Whether anything changed."""
        changed = False
        for pod in waiting:
            if pod.node is None:
                pod.node = next((node for node in self.nodes if self.fits(pod, node)), None)
                if pod.node is not None:
                    changed = True
                    self.placed.append(pod)
                    if pod.claim is not None and self.volume == "local" and not self.shared:
                        self.pinned.setdefault(pod.claim, pod.node)
                    if not self.mounts(pod):
                        continue
        for pod in self.placed:
            if pod.done or pod.running or not self.mounts(pod):
                continue
            if pod.name.startswith("daemon-"):
                changed = pod.running = True
                self.written |= {
                    (self.place_of(pod), marker) for marker in pod.markers("initContainers")
                }
                continue
            here = {marker for place, marker in self.written if place == self.place_of(pod)}
            if not pod.markers("initContainers") <= here:
                self.waited |= {pod.name} if pod.gpus else set()
                continue
            changed = True
            if pod.job:
                pod.done = True
                self.written |= {
                    (self.place_of(pod), marker) for marker in pod.markers("containers")
                }
            else:
                pod.running = True
        return changed

    def run(self, wanted: list[Pod]) -> bool:
        """To a standstill; whether every Job is done and every server runs."""
        while self.step([pod for pod in wanted if pod.node is None]):
            pass
        return all(pod.done or pod.running for pod in wanted)


def terms(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    found = (
        spec.get("affinity", {})
        .get(kind, {})
        .get("requiredDuringSchedulingIgnoredDuringExecution", [])
    )
    assert all(term["topologyKey"] == HOST for term in found)
    return found


def orders(objects: Iterable[dict[str, Any]], most: int = 60) -> Iterator[list[Pod]]:
    """Fresh pods in every order of the scheduler: all orders of a few, else a fixed sample."""
    listed = list(objects)
    count = len(pods(listed))
    few: Iterable[Iterable[int]] = itertools.permutations(range(count))
    draw = random.Random(0)
    for order in few if count <= 4 else (draw.sample(range(count), count) for _ in range(most)):
        fresh = pods(listed)
        yield [fresh[index] for index in order]
