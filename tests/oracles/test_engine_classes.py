"""Files with a mistake in them, judged by lint and by TensorRT-LLM's own classes.

TRTSPEC_TRTLLM_SOURCES names a folder with one folder of sources for each release, called like it (1.4.0rc1); without it
these tests are skipped. Upstream's sources are never part of the project.
"""

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import ROOT, printed
from tests.oracles.mutations import Mutator
from trtspec.trtllm.deployment import Deployment, Finding
from trtspec.trtllm.lint import lint
from trtspec.trtllm.schema import schema_for

AGREE = 0.997
# Errors of lint about what the engine does with a file that its classes take: code, key (a pattern), reason.
BEYOND = (
    ("TS-LINT-DYNAMIC-TREE", "", "no Kimi runs with dynamic trees: latent attention"),
    ("TS-LINT-HEAD-ARCH", "", "the other head class is not Kimi's"),
    ("TS-LINT-EPLB-SLOTS", "", "MoeLoadBalancerConfig.setup asserts it when the model loads"),
    ("TS-LINT-KV-CONNECTOR", "", "py_executor_creator asserts it"),
    ("TS-LINT-TRANSCEIVER", "", "the transceiver refuses it when it is made"),
    ("TS-LINT-DUPLICATE-KEY", "", "YAML keeps the last of two without a word"),
    ("TS-LINT-NO-EFFECT", "", "the setting is dropped or overwritten without a word"),
    (
        "TS-LINT-COMBINATION",
        r"moe_config\.backend",
        "the kernels assert it when the model is built",
    ),
    ("TS-LINT-STATIC-TREE", "", "the server raises an exception when drafts are written"),
    ("TS-LINT-DRAFT-PIPELINE", "", "PyExecutor raises NotImplementedError when it is made"),
    ("TS-LINT-TRANSFER-BLOCKS", "", "the transceiver's buffer asserts it when it is made"),
    ("TS-LINT-REJECTION-CRASH", "", "the server stops at its first warm-up step"),
    ("TS-LINT-GUIDED-SCHEDULE", "", "the server stops while graphs are captured"),
    ("TS-LINT-(MLA-)?TWO-MODEL", "", "two-model speculation with latent attention has no class"),
    ("TS-LINT-FORCED-ACCEPTANCE", "", "made-up throughput"),
    ("TS-LINT-(STOPS-AT-START|NO-WEIGHTS)", "", "the model loader raises, or loads nothing"),
    ("TS-LINT-DISAGGREGATED-NO-HEAD", "", "the two sides of a disaggregated server must agree"),
    (
        "TS-LINT-(TRANSFER-BUFFER|POOL|NO-SIZE)",
        "",
        "too small for the longest prompt, or for a server",
    ),
    ("TS-LINT-SET-TWICE", "", "which of two places wins changed between releases"),
    ("TS-LINT-MTP-KIMI", "", "Kimi-K2 has no MTP layers"),
    ("TS-LINT-BACKEND", "", "the attention backend does not run Eagle3 heads"),
    ("TS-LINT-COMBINATION", "moe_.*parallel_size", "Mapping asserts it when the ranks start"),
    (
        "TS-LINT-COMBINATION",
        "enable_iter_req_stats|return_perf_metrics|perf_metrics_max_.*",
        "nothing is collected",
    ),
    (
        "TS-LINT-BAD-VALUE",
        "reasoning_parser|dtype",
        "looked up when the first answer is parsed, or the model is read",
    ),
    (
        "TS-LINT-WRONG-TYPE",
        r"moe_config\.load_balancer$",
        "MoeLoadBalancer takes a mapping or a path",
    ),
    (
        "TS-LINT-WRONG-TYPE",
        r"speculative_config\.num_nextn_predict_layers",
        "dropped beside max_draft_len",
    ),
    (
        "TS-LINT-BAD-VALUE",
        r"sparse_attention_config\.kt_cache_dtype",
        "looked up when the cache is made",
    ),
    ("TS-LINT-WRONG-TYPE", "telemetry_config$", "anything but a mapping is dropped without a word"),
    (
        "TS-LINT-WRONG-TYPE",
        "load_format$",
        "the class takes the number of an enumeration, which nobody publishes",
    ),
    (
        "TS-LINT-NO-DRAFT-MODEL|TS-NAME-PLACEHOLDER",
        "",
        "the engine stops when it looks for the model",
    ),
    ("TS-LINT-BAD-VALUE", "attn_backend", "get_attention_backend raises when the model is built"),
    (
        "TS-LINT-(BAD-VALUE|WRONG-TYPE)",
        r"telemetry_config\.usage_context",
        "trtllm-serve overwrites it",
    ),
    (
        "TS-LINT-WRONG-TYPE",
        r"batched_logits_processor|checkpoint_loader|.*\.drafter|.*\.resource_manager",
        "a Python object, which no file can hold",
    ),
)


@dataclass(frozen=True)
class Judged:
    what: str
    text: str
    errors: tuple[Finding, ...]
    why: str  # why the class refuses it, "" where it takes it
    unsure: bool  # lint says that it does not know whether this release takes something in it

    @property
    def false_alarm(self) -> bool:
        """An error where the class takes the file, and which is about the class."""
        return not self.why and any(not is_beyond(finding) for finding in self.errors)

    @property
    def stricter(self) -> bool:
        return not self.why and bool(self.errors) and not self.false_alarm


def is_beyond(finding: Finding) -> bool:
    return any(
        re.fullmatch(code, finding.code) and re.match(key, finding.key) for code, key, _ in BEYOND
    )


def releases() -> list[str]:
    place = os.environ.get("TRTSPEC_TRTLLM_SOURCES")
    if not place:
        return []
    return sorted(
        folder.name for folder in Path(place).iterdir() if (folder / "tensorrt_llm").is_dir()
    )


def judged(release: str, count: int, seed: int) -> Iterator[Judged]:
    schema = schema_for(release)
    cases = list(itertools.islice(Mutator(schema, seed), count))
    sources = Path(os.environ["TRTSPEC_TRTLLM_SOURCES"]) / release
    words = [sys.executable, "-m", "tests.oracles.engine_classes", sources]
    asked = "".join(json.dumps({"text": text}) + "\n" for _, text in cases)
    lines = printed(*words, input=asked, cwd=ROOT).splitlines()
    answers = [json.loads(line) for line in lines][1:]
    assert len(answers) == count
    for (what, text), answer in zip(cases, answers, strict=True):
        found = lint(text, Deployment(schema))
        unsure = any(finding.code.endswith("-UNCERTAIN") for finding in found)
        yield Judged(
            what, text, tuple(f for f in found if f.severity == "error"), answer["why"], unsure
        )


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [400, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "release", releases() or [pytest.param("", marks=pytest.mark.skip("no sources"))]
)
def test_lint_agrees(release: str, count: int) -> None:
    seed = 11 if count == 400 else int(os.environ.get("TRTSPEC_SEED", "1"))
    every = list(judged(release, count, seed))
    alarms = [one for one in every if one.false_alarm]
    missed = [one for one in every if one.why and not one.errors and not one.unsure]
    unsure = sum(bool(one.why) and not one.errors and one.unsure for one in every)
    stricter = sum(one.stricter for one in every)
    refused = sum(bool(one.why) for one in every)
    agreed = count - len(alarms) - len(missed)
    print(
        f"\n{release}: {count} files, {refused} refused by the class, {agreed} judged alike ({agreed / count:.2%}),"
    )
    print(f"{stricter} of them with an error about behaviour alone; {len(alarms)} false alarms,")
    print(
        f"{len(missed)} missed, {unsure} refused files in which lint says that it does not know a key or value"
    )
    lines = [
        f"ALARM {one.what}: {[(f.code, f.key, f.message) for f in one.errors]}" for one in alarms
    ]
    lines += [f"MISSED {one.what}: {one.why[:300]}" for one in missed]
    assert not alarms and agreed >= AGREE * count, "\n".join(lines[:60])
