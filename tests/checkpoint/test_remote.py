"""A checkpoint on the hub is judged by its headers, without its weights; shown against a hub on a loopback socket."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.loopback_hub import COMMIT, LoopbackHub
from tests.json_files import read_json
from tests.tiny import make_head, make_target
from trtspec.checkpoint.headers import Checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(
        tmp_path_factory.mktemp("source") / "Kimi", format="int4", layers=4, hidden=512, shards=5
    )


@pytest.fixture
def hub(source: Path) -> Iterator[LoopbackHub]:
    server = LoopbackHub({"someone/Kimi-K2.5-tune": source})
    yield server
    server.shutdown()
    server.server_close()


def trtspec(
    hub: LoopbackHub, cache: Path, *words: object, **more: str
) -> subprocess.CompletedProcess[str]:
    names = (
        "HF_TOKEN",
        "HF_HUB_OFFLINE",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
    )
    environment = {key: value for key, value in os.environ.items() if key not in names}
    environment |= {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cache),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
        **more,
    }
    program = [] if words[0] == "-c" else ["-m", "trtspec"]
    command = [sys.executable, *program, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=120
    )


def found(run: subprocess.CompletedProcess[str], status: int = 0) -> dict[str, Any]:
    assert run.returncode == status, run.stderr + run.stdout
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def test_a_dry_run_reads_headers_only_and_says_what_the_run_would(hub, source, tmp_path):
    dry = ["-o", tmp_path / "out", "--policy", "k2.5", "--dry-run", "--json"]
    result = found(trtspec(hub, tmp_path / "cache", "quantize", "someone/Kimi-K2.5-tune", *dry))
    there = result.pop("hub")
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    print(
        f"{hub.sent_of_weights():,} of {weights:,} bytes of weights were sent, {sum(hub.sent.values()):,} in all"
    )
    assert hub.sent_of_weights() < weights / 5 and there["weight_bytes"] == weights
    assert (there["id"], there["revision"]) == ("someone/Kimi-K2.5-tune", COMMIT)
    local = found(trtspec(hub, tmp_path / "cache", "quantize", source, *dry))
    for both in (result, local):
        both.pop("free_bytes")
    assert result == local
    assert not (tmp_path / "out").exists() and not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_dry_run_from_the_hub_runs_the_checks_of_a_run(hub, source, tmp_path):
    out, target = tmp_path / "out", "someone/Kimi-K2.5-tune"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for words, status, text in (
        (["-o", out], 2, "already exists"),
        (["-o", out, "--force"], 2, "holds mine.txt, which `trtspec quantize` did not write"),
        (
            ["-o", tmp_path / "new", "--input-scales", tmp_path / "none.json"],
            2,
            "none.json is not a file",
        ),
        (["-o", tmp_path / "new", "--policy", "k9"], 2, "neither one of"),
    ):
        run = trtspec(hub, tmp_path / "cache", "quantize", target, *words, "--dry-run")
        assert run.returncode == status and text in run.stderr, run.stderr


@pytest.mark.parametrize("head", [False, True])
def test_inspect_says_what_it_could_not_look_at(hub, source, tmp_path, head):
    name = "someone/head" if head else "someone/Kimi-K2.5-tune"
    path = make_head(tmp_path / "head", source, draft_vocab=128) if head else source
    hub.repositories[name] = path
    result = found(trtspec(hub, tmp_path / "cache", "inspect", name, "--json"))
    local = found(trtspec(hub, tmp_path / "cache", "inspect", path, "--json"))
    there, unseen = result.pop("hub"), result["problems"].pop()
    assert unseen["code"] == "TS-HUB-HEADERS-ONLY" and unseen["severity"] == "info"
    assert result.pop("source") == "hub" and local.pop("source") == "files"
    for both in (result, local):
        both.pop("path")
    assert there["cache_free_bytes"] > 0
    assert result == local
    if not head:
        assert hub.sent_of_weights() < there["weight_bytes"] / 5


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("absent", "the hub has no someone/other"),
        ("private", "the hub has no someone/Kimi-K2.5-tune, or it is private"),
        ("gated", "someone/Kimi-K2.5-tune is gated"),
        ("broken", "could not be fetched (HTTP 500)"),
        ("damaged", "holds a damaged shard"),
        ("shard missing", "model-00002-of-00005.safetensors is missing in someone/Kimi-K2.5-tune"),
    ],
)
def test_what_a_hub_can_refuse(hub, source, tmp_path, case, text):
    name, more = "someone/Kimi-K2.5-tune", {}
    if case == "absent":
        name = "someone/other"
    elif case == "private":
        hub.token, more = "hf_right", {"HF_TOKEN": "hf_wrong_and_secret"}
    elif case in ("gated", "broken"):
        hub.refuses = 403 if case == "gated" else 500
    else:
        copy = tmp_path / "copy"
        copy.mkdir()
        for path in source.iterdir():
            (copy / path.name).write_bytes(path.read_bytes())
        shard = copy / "model-00002-of-00005.safetensors"
        data = bytearray(shard.read_bytes())
        data[9:12] = b"???"
        shard.write_bytes(data)
        if case == "shard missing":
            shard.unlink()
        hub.repositories[name] = copy
    run = trtspec(
        hub, tmp_path / "cache", "quantize", name, "-o", tmp_path / "out", "--dry-run", **more
    )
    assert run.returncode == 1 and text in run.stderr, run.stderr
    assert "secret" not in run.stderr and "unexpected" not in run.stderr
    assert (
        hub.sent_of_weights()
        < sum(path.stat().st_size for path in source.glob("*.safetensors")) / 2
    )


def test_a_token_opens_a_private_repository(hub, tmp_path):
    hub.token = "hf_right"
    words = ["quantize", "someone/Kimi-K2.5-tune", "-o", tmp_path / "out", "--dry-run", "--json"]
    assert found(trtspec(hub, tmp_path / "cache", *words, HF_TOKEN="hf_right"))["quantized"]


def test_what_is_cached_whole_is_read_from_there(hub, source, tmp_path):
    repository = tmp_path / "cache/hub/models--someone--Kimi-K2.5-tune"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots/abc").symlink_to(source)
    words = ["quantize", "someone/Kimi-K2.5-tune", "-o", tmp_path / "out", "--dry-run", "--json"]
    assert "hub" not in found(trtspec(hub, tmp_path / "cache", *words)) and not hub.sent
    assert len(Checkpoint.open(repository / "snapshots/abc").shards) == 5


OLDER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def older(hub: LoopbackHub, tmp_path: Path) -> Path:
    """The target of `hub` at an older commit, with other weights and shards."""
    path = make_target(tmp_path / "older", format="int4", layers=4, hidden=512, shards=2, seed=7)
    hub.older["someone/Kimi-K2.5-tune"] = {OLDER: path}
    hub.tags["v1"] = OLDER
    return path


@pytest.mark.parametrize("revision", [OLDER, OLDER[:10], "v1"])
def test_a_commit_is_read_where_an_id_is(hub, older, tmp_path, revision):
    name, dry = f"someone/Kimi-K2.5-tune@{revision}", ["-o", tmp_path / "out", "--dry-run"]
    result = found(trtspec(hub, tmp_path / "cache", "quantize", name, *dry, "--json"))
    there = result.pop("hub")
    assert (there["id"], there["revision"]) == ("someone/Kimi-K2.5-tune", OLDER)
    local = found(trtspec(hub, tmp_path / "cache", "quantize", older, *dry, "--json"))
    assert result["bytes_in"] == local["bytes_in"]
    assert found(trtspec(hub, tmp_path / "cache", "inspect", name, "--json"))["shards"] == 2


def test_an_absent_commit_and_a_hostile_one_are_refused_by_name(hub, older, tmp_path):
    for revision, status, text in (
        ("a" * 40, 1, f"someone/Kimi-K2.5-tune has no commit, tag or branch {'a' * 40}"),
        ("../../x", 2, "'../../x' is not a commit, tag or branch of someone/Kimi-K2.5-tune"),
    ):
        run = trtspec(hub, tmp_path / "cache", "inspect", f"someone/Kimi-K2.5-tune@{revision}")
        assert run.returncode == status and text in " ".join(run.stderr.split()), run.stderr


def test_the_commit_is_recorded_and_a_resume_with_another_is_refused(hub, older, source, tmp_path):
    """Weights of both commits are equal, so that the commit alone tells them apart."""
    name, out = "someone/Kimi-K2.5-tune", tmp_path / "out"
    hub.older[name] = {OLDER: source}
    words = ["-o", out, "--policy", "k2.5"]
    found(trtspec(hub, tmp_path / "cache", "quantize", f"{name}@{OLDER}", *words, "--json"))
    record = read_json(out / "provenance.json")
    made_from = {key: value for key, value in record["source"].items() if key != "path"}
    assert (made_from["hub_id"], made_from["commit"]) == (name, OLDER)
    journal = out / ".trtspec-quantize.jsonl"  # of a run that was killed before its first shard
    journal.write_text(
        json.dumps({"header": {"source": made_from, "options": record["options"]}}) + "\n"
    )
    run = trtspec(hub, tmp_path / "cache", "quantize", name, *words)
    said = " ".join(run.stderr.split())
    assert run.returncode == 2, said
    assert f'begun with something else: source.commit was "{OLDER}", now "{COMMIT}" ->' in said
    found(trtspec(hub, tmp_path / "cache", "quantize", f"{name}@{OLDER}", *words, "--json"))


def test_a_commit_of_a_data_set_is_what_is_read(hub, tmp_path):
    for name in ("main", "older"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"text": name}) + "\n")
    hub.repositories["org/rows"] = tmp_path / "main"
    hub.older["org/rows"] = {OLDER: tmp_path / "older"}
    script = "import sys; from trtspec.checkpoint.rows import read_rows\n"
    script += "for name in sys.argv[1:]: print(*[row.value['text'] for row in read_rows(name)])"
    run = trtspec(hub, tmp_path / "cache", "-c", script, "org/rows", f"org/rows@{OLDER}")
    assert run.stdout.split() == ["main", "older"], run.stderr
