"""`helm upgrade` between what users change alters no field that must stay as created.

Values are rendered before and after; Kubernetes or a controller keeps such a field.
"""

import itertools
import json
from typing import Any

import pytest

from tests.docker.chart import VALUES, load, merged, named, objects, objects_of, table, with_recipes

pytest.importorskip("helm_python")

# what an update of a kind may change in spec; everything, where a kind is not listed
MUTABLE = {
    "Job": {
        "parallelism",
        "suspend",
        "ttlSecondsAfterFinished",
        "backoffLimit",
        "activeDeadlineSeconds",
    },
    "StatefulSet": {"replicas", "ordinals", "template", "updateStrategy", "minReadySeconds"},
    "ComputeDomain": set(),
}
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


CHANGES = {name: with_recipes(change) for name, change in table("changes.yaml").items()}


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
        f"\n{count} upgrades between {len(rendered)} values, stage {stage}: "
        "no immutable field changes"
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
    pair = "nvidia/Kimi-K2.6-NVFP4 --head nvidia/Kimi-K2.6-Eagle3 --trtllm-version 1.3.0rc20"
    line = f"{pair} --trust-remote-code --gpu gb200 --goal throughput"
    two, four = (
        by_name(
            objects(merged(load(named("two-nodes")), with_recipes({"build": [f"{line} {size}"]})))
        )
        for size in ("--tp-size 8 --nodes 2", "--tp-size 16 --nodes 4")
    )
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
