"""build-config itself refuses what could not run or would be changed on the way."""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from tests.cases import slow, table
from trtspec.checkpoint.hub import find_target, load_head
from trtspec.cli.app import app
from trtspec.errors import CheckFailed, Problem, TrtspecError, UsageError
from trtspec.trtllm.build import build, build_named
from trtspec.trtllm.deployment import deployment_of
from trtspec.trtllm.document import Document
from trtspec.trtllm.intent import Intent, parse_intent
from trtspec.trtllm.lint import lint

CASES = table(__file__)

K26, HEAD = "nvidia/Kimi-K2.6-NVFP4", "nvidia/Kimi-K2.6-Eagle3"


def run(*words: str) -> str:
    """stdout of build-config; raises what it raises."""
    done = CliRunner().invoke(app, ["build-config", *words, "--trtllm-version", "1.3.0rc20"])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.mark.parametrize(
    ("words", "error", "message"), CASES["refused"], ids=lambda value: str(value)[:40]
)
def test_what_cannot_run_is_refused(words: list[str], error: str, message: str) -> None:
    with pytest.raises(TrtspecError) as refused:
        run(*words)
    assert type(refused.value).__name__ == error
    assert message in f"{refused.value.message} {refused.value.remedy}"


def test_hopper_gets_its_one_route() -> None:
    text = run("moonshotai/Kimi-K2-Instruct-0905", "--gpu", "h200", "--tp-size", "8")
    assert "The cache holds" in text and "moe_config" not in text


def test_a_target_that_a_job_makes_later(tmp_path: Path) -> None:
    target = str(tmp_path / "Kimi-K2.6-NVFP4")
    words = (target, "--like", K26, "--head", HEAD, "--gpu", "b200", "--trust-remote-code")
    values = yaml.safe_load(run(*words, "--format", "helm-values"))
    published = yaml.safe_load(run(K26, *words[3:], "--format", "helm-values"))
    assert values["model"] == {**published["model"], "target": target}
    ours, theirs = values["engineConfig"], published["engineConfig"]
    assert yaml.safe_load(ours) == yaml.safe_load(theirs)
    again = parse_intent(ours)
    assert again is not None and build_named(again).text == ours
    judged = deployment_of(Document.parse(ours))[0]
    assert judged.target_name == K26 and {item.severity for item in lint(ours, judged)} <= {"info"}


PRODUCT = CASES["product"]


@pytest.mark.parametrize("step", [23, slow(1)])
def test_what_is_written_carries_no_finding_of_our_own_linter(step: int) -> None:
    """Each combination is refused with a reason, or clean as `lint FILE` judges it.

    The product of version, pair, goal, role, GPU and length (every 11th by default). `lint FILE`
    knows no more than the file. Facts (severity info), and what is wrong with a head itself, are no
    finding about the file.
    """
    accepted, tried, found, specs = 0, 0, [], {}
    for version, (target, head), goal, role, (gpu, tp), length in list(
        itertools.product(*PRODUCT.values())
    )[::step]:
        tried += 1
        intent = Intent(
            target=target,
            version=version,
            head=head,
            goal=goal,
            role=role,
            gpu=gpu,
            tp_size=tp,
            max_seq_len=length,
            trust_remote_code=True,
        )
        for name, load in ((target, find_target), (head, load_head)):
            if name and name not in specs:
                specs[name] = load(name).spec
        try:
            config = build(intent, specs[target], specs[head] if head else None)
        except (CheckFailed, UsageError):
            continue
        accepted += 1
        found += [
            (intent.command(), item.code, item.message) for item in config.findings if warns(item)
        ]
        if (
            accepted % 40 == 0
        ):  # `lint` reads the first line of the file, which takes longer than all else
            judged = lint(
                config.text,
                deployment_of(Document.parse(config.text))[0],
            )
            found += [(intent.command(), item.code, item.message) for item in judged if warns(item)]
    assert not found, found[:3]
    assert accepted > tried // 3


def warns(finding: Problem) -> bool:
    return finding.severity != "info" and not finding.code.startswith("TS-PAIR-")


def test_a_head_under_its_other_name_is_the_same_head() -> None:
    """Dynamo's recipes name nvidia/Kimi-K2.5-Eagle3 as it was called at first."""
    other, text = (
        "nvidia/Kimi-K2.5-Thinking-Eagle3",
        run("nvidia/Kimi-K2.5-NVFP4", "--head", "nvidia/Kimi-K2.5-Eagle3"),
    )
    for head, wanted in (
        (other, set()),
        ("lightseekorg/kimi-k2.5-eagle3-mla", {"TS-LINT-HEAD-DIFFERS"}),
    ):
        found = lint(text, deployment_of(Document.parse(text), head=head)[0])
        assert {item.code for item in found if item.code == "TS-LINT-HEAD-DIFFERS"} == wanted


def test_json_names_what_is_written(tmp_path: Path) -> None:
    report = json.loads(run(K26, "--head", HEAD, "-o", str(tmp_path / "a.yml"), "--json"))
    assert (
        report["output"] == str(tmp_path / "a.yml")
        and report["config"]["speculative_config"]["max_draft_len"] == 3
    )
    assert report["argv"][-1] == "a.yml" and (tmp_path / "a.yml").read_text() == report["text"]
