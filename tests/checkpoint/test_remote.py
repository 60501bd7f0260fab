"""A checkpoint on a hub (here on a loopback socket) is judged by its headers, without weights."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.loopback_hub import COMMIT, LoopbackHub
from tests.command_line import Done, ran
from tests.json_files import read_json, write_json
from tests.tiny import make_head, make_target
from trtspec.checkpoint.headers import Checkpoint

NAME = "someone/Kimi-K2.5-tune"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(
        tmp_path_factory.mktemp("source") / "Kimi", format="int4", layers=4, hidden=512, shards=5
    )


def weight_bytes(source: Path) -> int:
    return sum(path.stat().st_size for path in source.glob("*.safetensors"))


@pytest.fixture
def hub(source: Path) -> Iterator[LoopbackHub]:
    server = LoopbackHub({NAME: source})
    yield server
    server.shutdown()
    server.server_close()


Run = Callable[..., Done]
UNSET = (
    "HF_TOKEN",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
)


@pytest.fixture
def run(hub: LoopbackHub, tmp_path: Path) -> Run:
    """Runs Python with an empty cache and this hub."""
    environment = {key: value for key, value in os.environ.items() if key not in UNSET} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "*",
    }
    return lambda *words, **more: ran(sys.executable, *words, env=environment | more, timeout=900)


@pytest.fixture
def trtspec(run: Run) -> Run:
    return lambda *words, **more: run("-m", "trtspec", *words, **more)


@pytest.fixture
def found(trtspec: Run) -> Callable[..., dict[str, Any]]:
    """The JSON of a command that succeeds."""

    def found(*words: object, **more: str) -> dict[str, Any]:
        done = trtspec(*words, "--json", **more)
        assert done.status == 0, done
        return done.json

    return found


def test_a_dry_run_reads_headers_only_and_says_what_the_run_would(
    hub, source, found, tmp_path, out
):
    dry = ["-o", out, "--policy", "k2.5", "--dry-run"]
    result = found("quantize", NAME, *dry)
    there = result.pop("hub")
    weights = weight_bytes(source)
    print(
        f"{hub.sent_of_weights():,} of {weights:,} bytes of weights were sent, "
        f"{sum(hub.sent.values()):,} in all"
    )
    assert hub.sent_of_weights() < weights / 5 and there["weight_bytes"] == weights
    assert (there["id"], there["revision"]) == (NAME, COMMIT)
    local = found("quantize", source, *dry)
    for both in (result, local):
        both.pop("free_bytes")
    assert result == local
    assert not out.exists() and not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.slow
def test_a_dry_run_from_the_hub_runs_the_checks_of_a_run(trtspec, tmp_path, out):
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for words, status, text in (
        (["-o", out], 2, "holds mine.txt, which `trtspec quantize` did not write"),
        (["-o", out, "--force"], 2, "holds mine.txt"),
        (
            ["-o", tmp_path / "new", "--input-scales", tmp_path / "none.json"],
            2,
            "none.json is not a file",
        ),
        (["-o", tmp_path / "new", "--policy", "k9"], 2, "is not one of"),
    ):
        done = trtspec("quantize", NAME, *words, "--dry-run")
        assert done.status == status and text in done.stderr, done


@pytest.mark.parametrize("head", [False, True])
def test_inspect_says_what_it_could_not_look_at(hub, source, found, tmp_path, head):
    name = "someone/head" if head else NAME
    path = make_head(tmp_path / "head", source, draft_vocab=128) if head else source
    hub.repositories[name] = path
    result = found("inspect", name)
    local = found("inspect", path)
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
        ("absent", "someone/other is not on the hub"),
        ("private", "someone/Kimi-K2.5-tune is not on the hub, or is private"),
        ("gated", "someone/Kimi-K2.5-tune is gated"),
        ("broken", "could not be fetched (HTTP 500)"),
        ("damaged", "holds a damaged shard"),
        ("shard missing", "model-00002-of-00005.safetensors is missing in someone/Kimi-K2.5-tune"),
    ],
)
def test_what_a_hub_can_refuse(hub, source, trtspec, tmp_path, case, text, out):
    name, more = NAME, {}
    if case == "absent":
        name = "someone/other"
    elif case == "private":
        hub.token, more = "hf_right", {"HF_TOKEN": "hf_wrong_and_secret"}
    elif case in ("gated", "broken"):
        hub.refuses = 403 if case == "gated" else 500
    else:
        copy = shutil.copytree(source, tmp_path / "copy")
        shard = copy / "model-00002-of-00005.safetensors"
        data = bytearray(shard.read_bytes())
        data[9:12] = b"???"
        shard.write_bytes(data)
        if case == "shard missing":
            shard.unlink()
        hub.repositories[name] = copy
    done = trtspec("quantize", name, "-o", out, "--dry-run", **more)
    assert done.status == 1 and text in done.stderr, done
    assert "secret" not in done.stderr and "unexpected" not in done.stderr
    assert hub.sent_of_weights() < weight_bytes(source) / 2


def test_a_token_opens_a_private_repository(hub, found, out):
    hub.token = "hf_right"
    words = ["quantize", NAME, "-o", out, "--dry-run"]
    assert found(*words, HF_TOKEN="hf_right")["quantized"]


def test_what_is_cached_whole_is_read_from_there(hub, source, found, tmp_path, out):
    repository = tmp_path / "cache/hub/models--someone--Kimi-K2.5-tune"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    (repository / "snapshots").mkdir()
    (repository / "snapshots/abc").symlink_to(source)
    words = ["quantize", NAME, "-o", out, "--dry-run"]
    assert "hub" not in found(*words) and not hub.sent
    assert len(Checkpoint.open(repository / "snapshots/abc").shards) == 5


OLDER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture
def older(hub: LoopbackHub, tmp_path: Path) -> Path:
    """The target of `hub` at an older commit, with other weights and shards."""
    path = make_target(tmp_path / "older", format="int4", layers=4, hidden=512, shards=2, seed=7)
    hub.older[NAME] = {OLDER: path}
    hub.tags["v1"] = OLDER
    return path


@pytest.mark.parametrize("revision", [OLDER, OLDER[:10], "v1"])
def test_a_commit_is_read_where_an_id_is(older, found, revision, out):
    name, dry = f"{NAME}@{revision}", ["-o", out, "--dry-run"]
    result = found("quantize", name, *dry)
    there = result.pop("hub")
    assert (there["id"], there["revision"]) == (NAME, OLDER)
    local = found("quantize", older, *dry)
    assert result["bytes_in"] == local["bytes_in"]
    assert found("inspect", name)["shards"] == 2


def test_an_absent_commit_and_a_hostile_one_are_refused_by_name(older, trtspec):
    for revision, status, text in (
        ("a" * 40, 1, f"{'a' * 40} is not a commit, tag or branch on the hub"),
        ("../../x", 2, "'../../x' is not a commit, tag or branch of someone/Kimi-K2.5-tune"),
    ):
        done = trtspec("inspect", f"{NAME}@{revision}")
        assert done.status == status and text in " ".join(done.stderr.split()), done


def test_the_commit_is_recorded_and_a_resume_with_another_is_refused(
    hub, older, source, trtspec, found, out
):
    """Weights of both commits are equal, so that the commit alone tells them apart."""
    hub.older[NAME] = {OLDER: source}
    words = ["-o", out, "--policy", "k2.5"]
    found("quantize", f"{NAME}@{OLDER}", *words)
    record = read_json(out / "provenance.json")
    made_from = {key: value for key, value in record["source"].items() if key != "path"}
    assert (made_from["hub_id"], made_from["commit"]) == (NAME, OLDER)
    journal = out / ".trtspec-quantize.jsonl"  # of a run that was killed before its first shard
    write_json(journal, {"header": {"source": made_from, "options": record["options"]}})
    done = trtspec("quantize", NAME, *words)
    said = " ".join(done.stderr.split())
    assert done.status == 2, said
    assert f'started with something else: source.commit was "{OLDER}", now "{COMMIT}" ->' in said
    found("quantize", f"{NAME}@{OLDER}", *words)


def test_a_commit_of_a_data_set_is_what_is_read(hub, run, tmp_path):
    for name in ("main", "older"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "train.jsonl", {"text": name})
    hub.repositories["org/rows"] = tmp_path / "main"
    hub.older["org/rows"] = {OLDER: tmp_path / "older"}
    script = "import sys; from trtspec.checkpoint.data_rows import read_rows\n"
    script += "for name in sys.argv[1:]: print(*[row.value['text'] for row in read_rows(name)])"
    done = run("-c", script, "org/rows", f"org/rows@{OLDER}")
    assert done.stdout.split() == ["main", "older"], done
