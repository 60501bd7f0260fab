"""A release comes up: the chart's pods on small clusters, placed in every possible order."""

from collections.abc import Callable

import pytest

from tests.docker.chart import load, merged, named, objects
from tests.docker.cluster import Cluster, Node, orders, pods

pytest.importorskip("helm_python")

LABELS = {"nvidia.com/gpu.product": "NVIDIA-B200", "example.com/kimi": "true"}


def nodes(gpus: int = 2) -> list[Node]:
    """Nodes with eight GPUs, tainted as GPU operators do, behind one without."""
    return [
        Node("cpu"),
        *(Node(f"gpu-{index}", 8, LABELS, ("nvidia.com/gpu",)) for index in range(gpus)),
    ]


CLUSTERS: dict[str, Callable[[], Cluster]] = {
    "network-disk": lambda: Cluster(nodes()),
    "local-disk": lambda: Cluster(nodes(), volume="local"),
    "one-gpu-node": lambda: Cluster(nodes(1)),
    "gpu-nodes-first": lambda: Cluster(nodes()[::-1]),
    "shared": lambda: Cluster(nodes(), shared=True),
}


ALONE = ("network-disk", "local-disk", "one-gpu-node", "gpu-nodes-first")
PATHS = {"models-one-node": ALONE, "models-quantized": ALONE, "models-shared": ("shared",)}


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path, names in PATHS.items() for name in names]
)
def test_the_new_form_ends_and_no_gpu_waits(path: str, name: str) -> None:
    values = load(named(path))
    serving = objects(merged(values, {"stage": "serve"}))
    count = 0
    for jobs in orders(objects(values)):
        cluster = CLUSTERS[name]()
        assert cluster.run(jobs), [pod.name for pod in jobs if not pod.done]
        asked = {
            pod for pod in cluster.waited if "-quantize-" in pod
        }  # the one GPU of quantize.gpus
        servers = pods(serving)
        assert cluster.run(servers), [pod.name for pod in servers if not pod.running]
        assert cluster.waited == asked
        count += 1
    print(f"\nnew form, {path} on {name}: {count} of {count} orders end, no server's GPU waits")


def test_node_local_disks_are_filled_on_every_selected_node_and_a_new_node_too() -> None:
    filling, serving = (objects(load(named(name))) for name in ("models-node-local", "node-local"))
    cluster = Cluster(nodes(3))
    daemons, servers = cluster.daemons(filling), pods(serving)
    assert cluster.run(daemons) and {pod.node.name for pod in daemons if pod.node} == {
        "gpu-0",
        "gpu-1",
        "gpu-2",
    }
    assert cluster.run(servers) and not cluster.waited and len(servers) == 3
    cluster.nodes = nodes(4)
    added = [
        pod
        for pod in cluster.daemons(serving)
        if pod.spec["nodeSelector"]["kubernetes.io/hostname"] == "gpu-3"
    ]
    assert len(added) == 1 and cluster.run(added)


def test_servers_without_a_checkpoint_say_so_instead_of_waiting_for_a_job() -> None:
    serving = pods(objects(merged(load(named("models-one-node")), {"stage": "serve"})))
    assert not Cluster(nodes()).run(serving)
    (init,) = serving[0].spec["initContainers"]
    assert "exit 1" in init["args"][0] and "stage=models first" in init["args"][0]


def test_another_checkpoint_is_fetched_while_the_old_server_runs() -> None:
    """A second release in stage models on the claim of the first, which only one node mounts."""
    for name in ("network-disk", "local-disk", "one-gpu-node"):
        cluster = CLUSTERS[name]()
        first = load(named("models-one-node"))
        assert cluster.run(pods(objects(first))) and cluster.run(
            pods(objects(merged(first, {"stage": "serve"})))
        )
        claim = {"cache": {"existingClaim": "kimi-trtspec-models"}}
        second = merged(load(named("models-eagle31")), claim)
        assert cluster.run(pods(objects(second, name="next"))), name
