"""`helm upgrade` between what users change: rendered before and after, no object changes a field that Kubernetes or its
controller keeps as it was created."""

import itertools
import json
from typing import Any

import pytest

from tests.docker.chart import VALUES, built, load, merged, named, objects, objects_of
from tests.docker.test_chart import LOADER

pytest.importorskip("helm_python")

# what an update of a kind may change in spec; everything, where a kind is not listed
MUTABLE = {
    "Job": {"parallelism", "suspend", "ttlSecondsAfterFinished", "backoffLimit", "activeDeadlineSeconds"},
    "StatefulSet": {"replicas", "ordinals", "template", "updateStrategy", "minReadySeconds"},
    "ComputeDomain": set(),
}  # fmt: skip
KEPT = {  # paths in spec that stay, of kinds whose other fields may change
    "Deployment": ["selector"],
    "DaemonSet": ["selector"],
    "LeaderWorkerSet": ["leaderWorkerTemplate.size"],  # refused by the controller's older releases
    "Service": ["clusterIP"],
}
Objects = dict[tuple[str, str], dict[str, Any]]


def by_name(found: Any) -> Objects:
    return {
        (item["kind"], item["metadata"]["name"]): item for item in found if item["kind"] != "Pod"
    }


def at(spec: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        spec = spec.get(part, {}) if isinstance(spec, dict) else {}
    return spec


def bytes_of(quantity: str) -> float:
    units = {"Gi": 2**30, "Ti": 2**40, "G": 1e9, "T": 1e12}
    unit = next(unit for unit in units if quantity.endswith(unit))
    return float(quantity.removesuffix(unit)) * units[unit]


def refused(before: Objects, after: Objects) -> list[str]:
    """What the API server would refuse, one line for each object."""
    found = []
    for key in before.keys() & after.keys():
        kind, old, new = key[0], before[key].get("spec", {}), after[key].get("spec", {})
        if kind in MUTABLE:
            changed = {name for name in old.keys() | new.keys() if old.get(name) != new.get(name)}
            found += [f"{key} {name}" for name in changed - MUTABLE[kind]]
        found += [f"{key} {path}" for path in KEPT.get(kind, []) if at(old, path) != at(new, path)]
        if kind == "PersistentVolumeClaim":
            sizes = [bytes_of(spec["resources"]["requests"]["storage"]) for spec in (old, new)]
            rest = [{**spec, "resources": None} for spec in (old, new)]
            found += [f"{key} shrinks"] if sizes[1] < sizes[0] else []
            found += [f"{key} spec"] if rest[0] != rest[1] else []
    return found


def recipe(line: str) -> dict[str, Any]:
    import yaml

    return yaml.load(built(line), Loader=LOADER)


K26 = "nvidia/Kimi-K2.6-NVFP4 --head nvidia/Kimi-K2.6-Eagle3 --trtllm-version 1.4.0rc1 --trust-remote-code --gpu b200"
K25 = "nvidia/Kimi-K2.5-NVFP4 --head nvidia/Kimi-K2.5-Eagle3 --trtllm-version 1.4.0rc1 --trust-remote-code --gpu b200"
NEWER = K26.replace("1.4.0rc1", "1.3.0rc29")
CHANGES: dict[str, dict[str, Any]] = {
    "a token": {"hfToken": {"existingSecret": "other"}},
    "an image tag": {"image": {"tag": "1.4.0rc1-7"}},
    "an image digest": {"image": {"digest": "sha256:" + 64 * "b"}},
    "a registry": {"image": {"repository": "mirror.example.com/trtspec"}},
    "a pull secret": {"imagePullSecrets": [{"name": "registry"}]},
    "a pull policy": {"image": {"pullPolicy": "Always"}},
    "the pod's security context": {"podSecurityContext": {"runAsUser": 2000, "fsGroup": 2000}},
    "the container's security context": {"securityContext": {"readOnlyRootFilesystem": True}},
    "tolerations": {"tolerations": []},
    "a node selector": {"nodeSelector": {"pool": "b200"}},
    "job placement": {"jobs": {"nodeSelector": {"pool": "cpu"}, "ttlSeconds": 60}},
    "download resources": {"download": {"resources": {"requests": {"cpu": "1", "memory": "1Gi"}}}},
    "resources": {"resources": {"cpu": "8", "memory": "512Gi", "sharedMemory": "100Gi"}},
    "a larger claim": {"cache": {"size": "2Ti"}},
    "the account": {"serviceAccount": {"create": False}},
    "the service": {"service": {"type": "LoadBalancer", "port": 80}},
    "probes": {"probes": {"loadMiBPerSecond": 2000}, "shutdown": {"drainSeconds": 5}},
    "environment": {"server": {"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}},
    "a scheduler": {"schedulerName": "kai-scheduler", "priorityClassName": "serving"},
    "the stage": {"stage": "models"},
    "a budget and a policy": {"podDisruptionBudget": {"enabled": True}, "networkPolicy": {"enabled": True}},
    "a bench job": {"bench": {"enabled": True}},
    "sizes": {"engineConfig": recipe(f"{K26} --max-batch-size 8")["engineConfig"]},
    "eight GPUs": {"gpusPerNode": 8, "engineConfig": recipe(f"{K26} --tp-size 8")["engineConfig"]},
    "two nodes": recipe(f"{K26} --tp-size 16 --nodes 2") | {"ssh": {"existingSecret": "mpi"}},
    "another release": recipe(NEWER),
    "another model": recipe(K25),
}  # fmt: skip


@pytest.mark.parametrize("stage", ["models", "serve"])
def test_what_users_change_is_taken(stage: str) -> None:
    """From the plain release to each change, back, and from each change to each other."""
    base = merged(
        load(named("models-one-node")),
        {"stage": stage, "cache": {"accessMode": "ReadWriteMany"}},
    )
    rendered = {"nothing": by_name(objects(base))}
    rendered |= {name: by_name(objects(merged(base, change))) for name, change in CHANGES.items()}
    count = 0
    for before, after in itertools.permutations(rendered, 2):
        if before != "a larger claim":  # a claim never shrinks
            assert not refused(rendered[before], rendered[after]), (before, after)
            count += 1
    print(
        f"\n{count} upgrades between {len(rendered)} values, stage {stage}: no immutable field changes"
    )
    if stage == "models":
        jobs = {name: [key for key in found if key[0] == "Job"] for name, found in rendered.items()}
        for name in (
            "a token",
            "an image tag",
            "a pull secret",
            "the pod's security context",
            "download resources",
        ):
            assert jobs[name] != jobs["nothing"], name


def test_nodes_of_a_group_change() -> None:
    two, four = (
        by_name(objects(merged(load(named("two-nodes")), recipe(line))))
        for line in (
            K26.replace("b200", "gb200") + " --tp-size 8 --nodes 2 --goal throughput",
            K26.replace("b200", "gb200") + " --tp-size 16 --nodes 4 --goal throughput",
        )
    )  # fmt: skip
    assert not refused(two, four) and not refused(four, two)


def test_every_values_set_follows_every_other() -> None:
    """As one release, where both keep the same claim."""
    sets = {path.stem: by_name(objects_of(path)) for path in VALUES}

    def claims(found: Objects) -> str:
        return json.dumps(
            [item["spec"] for key, item in found.items() if key[0] == "PersistentVolumeClaim"]
        )

    pairs = [
        (a, b) for a, b in itertools.permutations(sets, 2) if claims(sets[a]) == claims(sets[b])
    ]
    for before, after in pairs:
        assert not refused(sets[before], sets[after]), (before, after)
    print(f"\n{len(pairs)} upgrades between {len(sets)} values sets: no immutable field changes")
    assert len(pairs) > 50
