"""The Dynamo form: objects of Dynamo's own recipes around build-config's engine YAML.

The YAML is exactly the same.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.command_line import trtspec
from trtspec.cli.app import app
from trtspec.errors import UsageError
from trtspec.trtllm.deployment import deployment_of, dynamo_options, dynamo_releases
from trtspec.trtllm.document import Document
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import read_beside

PAIR = ["nvidia/Kimi-K2.5-NVFP4", "--head", "nvidia/Kimi-K2.5-Eagle3", "--trust-remote-code"]
CODE = ["--trust-remote-code"]
RELEASE = ["--trtllm-version", "1.3.0rc22"]
# keys of each level of ai-dynamo/dynamo
# recipes/kimi-k2.5/trtllm/{agg,agg-eagle-round-robin,disagg-eagle-kv-router,
# disagg/wide_ep/gb200}/deploy.yaml that a service may have
SERVICE = {
    "componentType",
    "subComponentType",
    "replicas",
    "extraPodSpec",
    "multinode",
    "resources",
    "sharedMemory",
}
CONTAINER = {"image", "workingDir", "command", "args", "env", "startupProbe", "volumeMounts"}


def run(*words: str) -> str:
    done = CliRunner().invoke(app, ["build-config", *words])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def by_kind(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for item in yaml.safe_load_all(text):
        found.setdefault(item["kind"], []).append(item)
    return found


def options(service: dict[str, Any]) -> dict[str, str]:
    words = service["extraPodSpec"]["mainContainer"]["args"]
    return dict(zip(words[::2], words[1::2], strict=True))


def check_deployment(objects: dict[str, list[Any]]) -> dict[str, Any]:
    """The services; every reference resolves, and no object has what no recipe has."""
    (graph,), (config,) = objects["DynamoGraphDeployment"], objects["ConfigMap"]
    assert graph["apiVersion"] == "nvidia.com/v1alpha1" and set(graph["spec"]) == {
        "backendFramework",
        "services",
    }
    services = graph["spec"]["services"]
    assert services["Frontend"]["componentType"] == "frontend"
    channels = {
        item["spec"]["channel"]["resourceClaimTemplate"]["name"]
        for item in objects.get("ComputeDomain", [])
    }
    for name, service in services.items():
        assert (
            set(service) <= SERVICE and set(service["extraPodSpec"]["mainContainer"]) <= CONTAINER
        )
        if name == "Frontend":
            continue
        pod, typed = service["extraPodSpec"], options(service)
        assert set(typed) <= {*dynamo_options(), *read_beside("dynamo.yaml")["others"]}
        volumes = {item["name"]: item for item in pod["volumes"]}
        assert {item["name"] for item in pod["mainContainer"]["volumeMounts"]} == set(volumes)
        assert volumes["engine"]["configMap"]["name"] == config["metadata"]["name"]
        assert typed["--extra-engine-args"].rpartition("/")[2] in config["data"]
        claims = [item["name"] for item in service["resources"].get("claims", [])]
        assert claims == [item["name"] for item in pod.get("resourceClaims", [])]
        assert {
            item["resourceClaimTemplateName"] for item in pod.get("resourceClaims", [])
        } <= channels
    return services


def check_engines(objects: dict[str, list[Any]], wanted: dict[str, str]) -> None:
    """Byte for byte the files of `--format yaml`, and clean to the linter."""
    data = objects["ConfigMap"][0]["data"]
    assert data == wanted
    for text in data.values():
        found = lint(text, deployment_of(Document.parse(text))[0])
        assert not [item for item in found if item.severity != "info"]


def test_one_server() -> None:
    words = [*PAIR, *RELEASE, "--gpu", "b200", "--tp-size", "8", "--ep-size", "8"]
    text = run(*words, "--format", "dynamo")
    objects = by_kind(text)
    service = check_deployment(objects)["agg"]
    check_engines(objects, {"agg.yaml": run(*words)})
    typed = options(service)
    sizes = {"--tensor-parallel-size": "8", "--expert-parallel-size": "8", "--max-seq-len": "8192"}
    assert sizes.items() <= typed.items()
    assert (typed["--dyn-tool-call-parser"], typed["--dyn-reasoning-parser"]) == (
        "kimi_k2",
        "kimi_k25",
    )
    assert json.loads(typed["--override-engine-args"]) == {"trust_remote_code": True}
    assert service["resources"] == {"limits": {"gpu": "8"}} and "ComputeDomain" not in objects
    assert service["extraPodSpec"]["mainContainer"]["image"].endswith("tensorrtllm-runtime:1.4.2")
    line = text.partition("\n")[0].partition(": trtspec build-config ")[2]
    assert run(*line.split()) == text, "the first line writes the file again"


def test_prefill_and_decode_over_trays_of_one_nvlink_domain(tmp_path: Path) -> None:
    words = [
        *PAIR,
        *RELEASE,
        "--gpu",
        "gb200",
        "--tp-size",
        "8",
        "--nodes",
        "2",
        "--isl",
        "8192",
        "--osl",
        "1024",
    ]
    run(*words, "--disaggregated", str(tmp_path / "d"), "--format", "dynamo")
    run(*words, "--disaggregated", str(tmp_path / "y"))
    objects = by_kind((tmp_path / "d" / "dynamo.yml").read_text())
    services = check_deployment(objects)
    files = {"prefill.yaml": "context.yml", "decode.yaml": "generation.yml"}
    check_engines(
        objects, {name: (tmp_path / "y" / file).read_text() for name, file in files.items()}
    )
    assert [services[name]["subComponentType"] for name in ("prefill", "decode")] == [
        "prefill",
        "decode",
    ]
    assert [options(services[name])["--disaggregation-mode"] for name in ("prefill", "decode")] == [
        "prefill",
        "decode",
    ]
    assert all(services[name]["multinode"] == {"nodeCount": 2} for name in ("prefill", "decode"))
    assert len(objects["ComputeDomain"]) == 2 and services["decode"]["resources"]["limits"] == {
        "gpu": "4"
    }


def test_the_default_release_goes_into_the_newest_image_with_a_warning(tmp_path: Path) -> None:
    path, newest = tmp_path / "agg.yml", next(iter(dynamo_releases()))
    done = trtspec("build-config", *PAIR, "--format", "dynamo", "-o", path)
    text = path.read_text()
    assert text.startswith("# TensorRT-LLM 1.4.0rc1: ") and f"runtime:{newest}\n" in text
    assert "no Dynamo release is known that carries TensorRT-LLM 1.4.0rc1" in done.stderr
    assert trtspec("lint", path, "--strict").status == 0


def test_what_dynamo_cannot_run_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"no Dynamo release is known that carries TensorRT-LLM 1.3.0rc20"
    ):
        run(*PAIR, "--trtllm-version", "1.3.0rc20", "--format", "dynamo")
    assert "image: registry.example.com/mine:1" in run(
        *PAIR,
        "--trtllm-version",
        "1.3.0rc20",
        "--format",
        "dynamo",
        "--image",
        "registry.example.com/mine:1",
    )
    with pytest.raises(UsageError, match="is not on the claim"):
        run(
            "/models/made",
            "--like",
            "nvidia/Kimi-K2.6-NVFP4",
            *RELEASE,
            *CODE,
            "--format",
            "dynamo",
        )
    here = run(
        "/model-cache/made",
        "--like",
        "nvidia/Kimi-K2.6-NVFP4",
        *RELEASE,
        *CODE,
        "--format",
        "dynamo",
    )
    assert "- /model-cache/made" in here


def test_a_commit_is_the_directory_of_its_snapshot_on_the_claim() -> None:
    commit = "fedcba9876543210fedcba9876543210fedcba98"
    pinned = [f"{PAIR[0]}@{commit}", "--head", f"{PAIR[2]}@{commit}", *CODE, *RELEASE]
    text = run(*pinned, "--format", "dynamo")
    service = check_deployment(by_kind(text))["agg"]
    typed, snapshots = options(service), "/model-cache/hub/models--nvidia--Kimi-K2.5"
    assert typed["--model-path"] == f"{snapshots}-NVFP4/snapshots/{commit}"
    assert typed["--served-model-name"] == PAIR[0]
    engine = yaml.safe_load(by_kind(text)["ConfigMap"][0]["data"]["agg.yaml"])
    directory = engine["speculative_config"]["speculative_model_dir"]
    assert directory == f"{snapshots}-Eagle3/snapshots/{commit}"
    with pytest.raises(UsageError, match="v1 is not a whole commit"):
        run(f"{PAIR[0]}@v1", *CODE, *RELEASE, "--format", "dynamo")
