"""TensorRT-LLM's traps with Kimi and Eagle3: what lint says of a file or pair for a release."""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import find_target, load_head
from trtspec.errors import Problem, UsageError
from trtspec.specs import QuantSpec
from trtspec.trtllm.deployment import Deployment, compute_capability
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

CLEAN = """\
speculative_config: {decoding_type: Eagle, max_draft_len: 3, \
speculative_model_dir: nvidia/Kimi-K2.6-Eagle3}
moe_config: {backend: TRTLLM}
"""
# who names where it is known from
SOURCES = ("TensorRT-LLM", "DecodingBaseConfig", "TorchLlmArgs", "Medusa")
TRAPS = yaml.safe_load(Path(__file__).with_name("traps.yaml").read_text())["traps"]
Context = Mapping[str, Any]


def found(text: str, version: str, context: Context) -> dict[str, Problem]:
    """Findings by code. A text that begins with + is laid over the clean file."""
    more = dict(context)
    target, changed, head = more.pop("target", ""), more.pop("changed", {}), more.pop("head", None)
    if "quant" in changed:
        algorithm, group, exclude, cache = changed["quant"]
        changed = {"quant": QuantSpec(algorithm, group, tuple(exclude), cache)}
    if target:
        more |= {
            "target": replace(find_target(target).spec, **changed),
            "target_name": "" if changed else target,
        }
    if head is not None:
        more["head"] = replace(load_head("nvidia/Kimi-K2.6-Eagle3").spec, **head)
    if text.startswith("+"):
        values, own = yaml.safe_load(CLEAN), yaml.safe_load(f"{{{text[1:]}}}") or {}
        values["speculative_config"] |= own.pop("speculative_config", {})
        text = yaml.safe_dump(values | own)
    return {
        finding.code.removeprefix("TS-LINT-"): finding
        for finding in lint(text, Deployment(schema_for(version), **more))
    }


@pytest.mark.parametrize("trap", TRAPS, ids=lambda row: " ".join(map(str, row))[:60])
def test_a_trap_is_caught_where_it_is_one(trap: list[Any]) -> None:
    expected, version, text, context = [*trap, {}][:4]
    findings = found(text, version, context)
    errors = [finding for finding in findings.values() if finding.severity == "error"]
    for word in expected.split():
        code, _, severity = word.replace("~", "=").partition("=")
        if word in ("ok", "error"):
            assert bool(errors) == (word == "error"), errors
        elif word.startswith("-"):
            assert word[1:] not in findings, findings[word[1:]]
        else:
            assert code in findings, findings.keys()
            finding = findings[code]
            assert finding.remedy
            assert not severity or finding.severity == severity
            assert "=" not in word or any(name in finding.message for name in SOURCES)
            if not context and not text.startswith("+") and code != "VERSION-NEWER":
                assert finding.line and finding.line <= text.count("\n") + 1


def test_the_engine_is_no_dependency() -> None:
    """No dependency is the engine: its index entry is a stub that fetches the wheel elsewhere.

    It does so while metadata are read.
    """
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    everyday = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    assert not [name for name in everyday if "tensorrt" in name]


@pytest.mark.parametrize(
    ("gpu", "capability"),
    [("b200", "10.0"), ("GB300", "10.3"), ("h200", "9.0"), ("sm120", "12.0"), ("sm_100a", "10.0")],
)
def test_a_gpu_is_named_or_given_by_its_capability(gpu: str, capability: str) -> None:
    assert compute_capability(gpu) == capability
    with pytest.raises(UsageError):
        compute_capability("b9000")
