"""A user's words become a directory, a published model or a refusal, without a download."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import printed, succeeded
from tests.json_files import read_json
from tests.tiny import make_target
from trtspec.checkpoint.data_rows import from_hub
from trtspec.checkpoint.hub import (
    cached_snapshot,
    canonical_id,
    engine_name,
    engine_path,
    engine_revision,
    resolve,
    snapshot_id,
)
from trtspec.checkpoint.published import (
    catalogue,
    expand_patterns,
    known,
    known_target,
    real_pair,
    similar_id,
)
from trtspec.checkpoint.target_config import config_problems
from trtspec.data_files import gpu_names
from trtspec.errors import MissingDependency, TrtspecError, UsageError
from trtspec.foreign import HubId, parse_hub_id
from trtspec.specs import ModelSpec, gpu_spec

OLDER = "fedcba9876543210fedcba9876543210fedcba98"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, offline: whatever answers here, answers without the network."""
    cache = tmp_path / "hub"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return cache


def published(cache: Path, hub_id: str, source: Path, leave_out: str = "") -> Path:
    """Lays a checkpoint into the hub cache the way a download does."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    for file in source.iterdir():
        if file.name != leave_out:
            (snapshot / file.name).write_bytes(file.read_bytes())
    return snapshot


SHIPPED = [
    ("inspect", "kimi-nano-eagle3", "--against", "kimi-nano"),
    ("quantize", "kimi-nano", "-o", "OUT", "--dry-run"),
    (
        "convert",
        "kimi-nano-eagle3",
        "-o",
        "OUT",
        "--to",
        "vllm",
        "--target",
        "kimi-nano",
        "--dry-run",
    ),
    ("plan", "kimi-nano", "--head", "kimi-nano-eagle3"),
    ("serve", "kimi-nano", "--head", "kimi-nano-eagle3", "--backend", "reference", "--dry-run"),
]


@pytest.mark.parametrize("words", SHIPPED, ids=lambda words: words[0])
def test_the_shipped_models_are_called_by_name(words: tuple[str, ...], tmp_path: Path) -> None:
    succeeded(*[str(tmp_path / "out") if word == "OUT" else word for word in words])


def test_a_directory_of_the_user_comes_before_a_shipped_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_target(tmp_path / "kimi-nano")
    assert resolve("kimi-nano").target_spec().num_hidden_layers == 7


@pytest.mark.parametrize("hub_id", [name for name in catalogue().targets])
def test_every_published_target_answers_offline(hub_id: str) -> None:
    resolved = resolve(hub_id, weights=False)
    spec = resolved.target_spec()
    assert resolved.path is None
    assert (
        resolved.known == known_target(hub_id)
        and spec.quant.format == catalogue().targets[hub_id].format
    )
    assert (spec.num_hidden_layers, spec.hidden_size, spec.kv_elements_per_token) == (
        61,
        7168,
        35136,
    )
    assert spec.default_aux_layers == (1, 29, 57)


@pytest.mark.parametrize(
    "hub_id", [name for name, entry in catalogue().heads.items() if entry.config]
)
def test_every_published_head_answers_offline(hub_id: str) -> None:
    spec = resolve(hub_id, weights=False).head_spec()
    assert (spec.hidden_size, spec.vocab_size, spec.num_aux) == (7168, 163840, 3)
    assert spec.eagle == ("3.1" if "3.1" in hub_id else "3")


def test_a_head_without_a_known_config_says_so() -> None:
    with pytest.raises(TrtspecError, match="not known offline"):
        resolve("AQ-MedAI/Kimi-K25-eagle3", weights=False).head_spec()


def test_aliases_and_case() -> None:
    for name in ("nvidia/kimi-k2.5-eagle3", "nvidia/Kimi-K2.5-Thinking-Eagle3"):
        assert resolve(name, weights=False).hub_id == HubId("nvidia/Kimi-K2.5-Eagle3")
        pinned = resolve(f"{name}@v1", weights=False)
        assert pinned.hub_id == HubId("nvidia/Kimi-K2.5-Eagle3", "v1") and pinned.known


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("moonshotai/Kimi-K3", TrtspecError, "kimi_k3"),
        ("nvidia/Kimi-K2.5-Eagle", MissingDependency, "HF_HUB_OFFLINE"),
        ("nvidia/Kimi-K2.5-Eagle", MissingDependency, "nvidia/Kimi-K2.5-Eagle3"),
        *(
            (name, UsageError, "")
            for name in ("no such thing", "./missing", "a/b/c", "https://huggingface.co/x/y", "")
        ),
    ],
)
def test_what_cannot_be_resolved_is_refused(
    name: str, error: type[TrtspecError], says: str
) -> None:
    with pytest.raises(error) as refused:
        resolve(name, weights=False)
    assert says in f"{refused.value.message} {refused.value.remedy}"


def test_a_file_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UsageError, match="is a file"):
        resolve(str(tmp_path / "model.safetensors"))


def test_a_partly_cached_checkpoint_is_not_whole(tmp_path: Path, empty_cache: Path) -> None:
    """With one shard missing, only a command that needs no weights gets the checkpoint."""
    model = make_target(tmp_path / "model")
    published(empty_cache, "someone/kimi-tune", model, leave_out="model-00002-of-00002.safetensors")
    with pytest.raises(MissingDependency):
        resolve("someone/kimi-tune", weights=True)
    assert resolve("someone/kimi-tune", weights=False).config()["model_type"] == "kimi_k25"


def test_messages_never_hold_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Online, with a proxy that refuses: whatever the transport says stays out of the message."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9/secret-endpoint")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/secret-endpoint")
    monkeypatch.setenv("HF_TOKEN", "hf_secret_token")
    with pytest.raises(TrtspecError) as caught:
        resolve("someone/private-thing", weights=False)
    assert "secret" not in caught.value.message + caught.value.remedy


def test_real_pairs() -> None:
    assert real_pair("nvidia/Kimi-K2.5-Eagle3", "nvidia/Kimi-K2.5-NVFP4") is True
    assert real_pair("nvidia/Kimi-K2.5-Eagle3", "nvidia/Kimi-K2.6-NVFP4") is False
    assert real_pair("someone/else", "nvidia/Kimi-K2.6-NVFP4") is None
    for name, entry in catalogue().heads.items():
        assert all(target in catalogue().targets for target in entry.targets), name


def test_published_exclude_lists_have_their_published_length() -> None:
    lengths = {
        "nvidia/Kimi-K2.5-NVFP4": 64,
        "nvidia/Kimi-K2.6-NVFP4": 124,
        "nvidia/Kimi-K2.7-Code-NVFP4": 125,
    }
    for hub_id, length in lengths.items():
        assert len(resolve(hub_id, weights=False).target_spec().quant.exclude) == length
    assert expand_patterns(["a.{0..11}*", "b"])[:4] == ["a.0*", "a.1*", "a.10*", "a.11*"]


def test_every_figure_has_a_source() -> None:
    for record in (*catalogue().targets.values(), *catalogue().heads.values()):
        assert record.sources, record.id
        for figure in ("parameters", "bytes", "shards"):
            stated = getattr(record, figure) is not None
            assert not stated or figure in record.sources or figure in record.unverified, (
                f"{record.id} {figure}"
            )


def differing(known_value: Any, published_value: Any, where: str) -> list[str]:
    """Keys of ours that the published config states differently or lacks."""
    if isinstance(known_value, dict) and isinstance(published_value, dict):
        return [
            line
            for key in known_value
            for line in differing(known_value[key], published_value.get(key), f"{where}.{key}")
        ]
    return (
        []
        if known_value == published_value
        else [f"{where}: {known_value!r} is published as {published_value!r}"]
    )


@pytest.mark.parametrize(
    "hub_id", ["moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2.5", "nvidia/Kimi-K2.5-NVFP4"]
)
def test_the_catalogue_repeats_the_published_config(upstream_data: Path, hub_id: str) -> None:
    published_config = read_json(
        upstream_data / "model_configs" / f"{hub_id.replace('/', '--')}_config.json"
    )
    record = catalogue().targets[hub_id]
    lines = differing(record.config, published_config, "config")
    assert [
        line for line in lines if line.split(":")[0].split(".")[-1] not in record.unverified
    ] == []
    assert not config_problems(published_config, ModelSpec.from_config(published_config))


def test_the_published_config_of_kimi_k3_is_refused_by_name(upstream_data: Path) -> None:
    config = read_json(upstream_data / "model_configs/moonshotai--Kimi-K3_config.json")
    with pytest.raises(TrtspecError, match="'kimi_k3' is not a Kimi-K2 model"):
        ModelSpec.from_config(config)


def test_gpus() -> None:
    assert gpu_spec("b200").memory_bytes == 183359 * 2**20
    assert "h200" in gpu_names()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HF_HOME": "/somewhere/hf"},
        {"XDG_CACHE_HOME": "/var/cache"},
        {"HF_HOME": "~/hf", "XDG_CACHE_HOME": "/var/cache"},
        {"HF_HUB_CACHE": "$HOME/hub", "HF_HOME": "/a"},
        {"HF_HOME": "~/$USER/x", "USER": "me"},
        {"HUGGINGFACE_HUB_CACHE": "/old/name"},
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(variables: dict[str, str]) -> None:
    """In fresh processes, because the library reads the environment once."""
    names = ("HF_HOME", "XDG_CACHE_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE")
    environment = {key: value for key, value in os.environ.items() if key not in names} | variables
    script = (
        "from huggingface_hub.constants import HF_HUB_CACHE\n"
        "from trtspec.checkpoint.remote import cache_directory\n"
        "assert str(cache_directory()) == HF_HUB_CACHE, (str(cache_directory()), HF_HUB_CACHE)\n"
    )
    printed(sys.executable, "-c", script, env=environment)


def test_a_snapshot_is_found_as_huggingface_hub_finds_it(empty_cache: Path, tmp_path: Path) -> None:
    from huggingface_hub import try_to_load_from_cache

    source = make_target(tmp_path / "source")
    snapshot = published(empty_cache, "someone/some-kimi", source)
    theirs = try_to_load_from_cache("someone/some-kimi", "config.json", cache_dir=str(empty_cache))
    assert (
        cached_snapshot(HubId("someone/some-kimi"), complete=True)
        == snapshot
        == Path(str(theirs)).parent
    )
    assert cached_snapshot(HubId("someone/other"), complete=True) is None


def test_a_revision_names_a_commit_a_short_one_or_a_ref(empty_cache: Path, tmp_path: Path) -> None:
    repository = published(empty_cache, "someone/kimi", make_target(tmp_path / "source")).parents[1]
    (repository / "snapshots" / "abc123").rename(repository / "snapshots" / OLDER)
    twin = f"{OLDER[:8]}{'9' * 32}"
    (repository / "snapshots" / twin).mkdir()
    (repository / "refs" / "pull").mkdir()
    (repository / "refs" / "pull" / "7").write_text(OLDER)
    (repository / "refs" / "hostile").write_text("../../outside")
    for revision, here in (
        (OLDER, True),
        (OLDER[:9], True),
        ("pull/7", True),
        (OLDER[:8], False),  # of two commits
        (OLDER[:6], False),
        ("hostile", False),
        ("main", False),
        (twin, False),  # no config
    ):
        snapshot = cached_snapshot(HubId("someone/kimi", revision), complete=True)
        assert (snapshot is not None) is here, revision
        if snapshot is not None:
            assert snapshot_id(snapshot) == HubId("someone/kimi", OLDER)
    assert resolve(f"someone/kimi@{OLDER}").path == repository / "snapshots" / OLDER
    with pytest.raises(MissingDependency, match="someone/kimi@v2 is not in the hub cache"):
        resolve("someone/kimi@v2", weights=False)


HOSTILE = [
    "",
    "-x",
    "--force",
    "../../etc",
    "a/../b",
    "/etc",
    "a//b",
    "a\\b",
    "a\nb",
    "a\x1b[2J",
    ".",
    "a b",
    "a;b",
    "a@b",
    "$(id)",
    "v" * 256,
    "ａ",
    "a%2e%2e",
    "refs/",
]


@pytest.mark.parametrize("revision", HOSTILE, ids=ascii)
def test_a_hostile_revision_is_refused_with_what_to_write(revision: str) -> None:
    for ask in (parse_hub_id, known, resolve, from_hub, engine_name, engine_path):
        with pytest.raises(
            UsageError, match="is not a commit, tag or branch of org/name"
        ) as refused:
            ask(f"org/name@{revision}")
        assert refused.value.remedy == "write org/name@COMMIT"
        assert "\x1b" not in refused.value.message and len(refused.value.message) < 160


def test_what_is_known_of_a_published_id_is_known_of_its_commits() -> None:
    pinned = f"nvidia/Kimi-K2.6-NVFP4@{OLDER}"
    assert known(pinned) == known("nvidia/Kimi-K2.6-NVFP4")
    assert real_pair("nvidia/Kimi-K2.6-Eagle3@v1", pinned) and not real_pair(
        "nvidia/Kimi-K2.5-Eagle3@v1", pinned
    )
    with pytest.raises(TrtspecError, match="kimi_k3"):
        known("moonshotai/Kimi-K3@v1")
    assert similar_id("nvidia/Kimi-K2.6-NVFP@v1") == "nvidia/Kimi-K2.6-NVFP4"


def test_engines_are_given_a_name_and_a_revision_or_the_snapshot(
    empty_cache: Path, tmp_path: Path
) -> None:
    head = f"someone/head@{OLDER}"
    assert (engine_name(head), engine_revision(head)) == ("someone/head", OLDER)
    with pytest.raises(UsageError) as refused:
        engine_path(head)
    assert refused.value.remedy == f"run `hf download someone/head --revision {OLDER}`"
    elsewhere = engine_path(head, "/models/hub")
    assert elsewhere == f"/models/hub/models--someone--head/snapshots/{OLDER}"
    with pytest.raises(UsageError, match="v1 is not a whole commit"):
        engine_path("someone/head@v1", "/models/hub")
    snapshot = published(empty_cache, "someone/head", make_target(tmp_path / "source"))
    assert engine_path("someone/head@main") == str(snapshot)
    canonical = canonical_id("someone/head@main")
    assert canonical == canonical_id(str(snapshot))
    assert canonical != canonical_id(head)
