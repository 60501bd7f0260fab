"""Faults that stop TensorRT-LLM between its argument classes and its first answer, planted one at a time."""

import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from trtspec.checkpoint.hub import load_head, load_target
from trtspec.trtllm.deployment import Deployment
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

ROWS: list[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("startup_faults.yaml").read_text()
)
DECIDED = [row for row in ROWS if "rule" in row]
TARGET, HEAD = "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-Eagle3"
CLEAN = f"""\
speculative_config: {{decoding_type: Eagle, max_draft_len: 3, speculative_model_dir: {HEAD}}}
moe_config: {{backend: TRTLLM}}
"""


def errors(row: dict[str, Any], rng: random.Random) -> tuple[set[str], str]:
    """Codes of the errors that lint finds in the planted file, and the file."""
    values = yaml.safe_load(CLEAN)
    for path, choices in row["set"].items():
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = rng.choice(choices)
        if place[name] is None:
            del place[name]
    version = rng.choice(row.get("releases", ["1.3.0rc20", "1.3.0rc27.dev0"]))
    deployment = Deployment(
        schema_for(version),
        load_target(TARGET).spec,
        TARGET,
        load_head(HEAD).spec,
        HEAD,
        gpu="10.0",
        here=True,
    )
    text = yaml.safe_dump(values)
    return {
        finding.code for finding in lint(text, deployment) if finding.severity == "error"
    }, f"{version}\n{text}"


@pytest.mark.parametrize("row", DECIDED, ids=lambda row: row["site"][:40])
def test_each_fault_is_refused_by_its_rule(row: dict[str, Any]) -> None:
    for seed in range(6):
        found, file = errors(row, random.Random(seed))
        assert any(code.startswith(row["rule"]) for code in found), (found, file)


def test_two_hundred_seeded_faults() -> None:
    rng = random.Random(34)
    rows = [rng.choice(ROWS) for _ in range(200)]
    refused = sum(bool(errors(row, rng)[0]) for row in rows)
    print(
        f"\n{len(DECIDED)} of {len(ROWS)} sites decidable; {refused} of {len(rows)} seeded faults refused"
    )
    assert all(row.get("undecidable") for row in ROWS if row not in DECIDED)
    assert refused >= 0.95 * len(rows) and all(
        errors(row, rng)[0] for row in rows if row in DECIDED
    )
