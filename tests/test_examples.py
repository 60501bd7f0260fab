"""The scripts of examples/, run as a reader would."""

import sys
from pathlib import Path

import pytest

from tests.command_line import TRTSPEC, free_port, printed, ran, served

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def test_a_fleet_is_planned() -> None:
    lines = printed(sys.executable, EXAMPLES / "plan_fleet.py", "--users", "4").splitlines()
    assert [line.split(":")[0] for line in lines if " x " in line] == [
        "4 x b200", "8 x b200", "4 x gb200", "8 x h200"
    ]  # fmt: skip
    assert lines[1].startswith("  trtspec build-config ")


@pytest.mark.parametrize(
    ("text", "status"), [("max_batch_size: 8\n", 0), ("max_batchsize: 8\n", 3)]
)
def test_a_repository_is_linted(tmp_path: Path, text: str, status: int) -> None:
    (tmp_path / "engine.yml").write_text(text)
    done = ran(sys.executable, EXAMPLES / "lint_repository.py", tmp_path, "1.3.0rc20")
    assert done.status == status, done
    assert ("TS-LINT-UNKNOWN-KEY" in done.stdout) == bool(status)


@pytest.mark.slow
def test_an_endpoint_is_judged() -> None:
    serve = (*TRTSPEC, "serve", "kimi-nano", "--backend", "reference", "--port")
    port, plain_port = free_port(), free_port()
    head = ("--head", "kimi-nano-eagle3")
    with (
        served(port, *serve, port, *head) as (url, _),
        served(plain_port, *serve, plain_port) as (plain, _),
    ):
        options = ("--samples", "8", "--max-tokens", "64", "--accept-unmeasured", "acceptance")
        done = ran(sys.executable, EXAMPLES / "judge_endpoint.py", url, plain, *options)
    assert "pass       greedy" in done.stdout, done
