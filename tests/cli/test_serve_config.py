"""`serve --backend reference --config FILE`: what build-config writes runs here first, and nothing of it is ignored."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.command_line import trtspec
from trtspec.data_files import DATA, kimi_nano_dir
from trtspec.trtllm.document import Document
from trtspec.trtllm.reference import Executed, execute

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(path for path in CONFIGS.glob("*k2.[56]*.yml") if "front" not in path.name)
HEAD = DATA / "kimi-nano-eagle3"
SERVE = ("serve", kimi_nano_dir(), "--backend", "reference")
SPECULATING = (
    "speculative_config: {decoding_type: Eagle3, max_draft_len: 4, speculative_model: nvidia/Kimi-K2.5-Eagle3, "
)


def written(folder: Path, text: str, version: str = "1.3.0rc20") -> Executed:
    path = folder / "engine.yml"
    path.write_text(text)
    return execute(path, version)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recipe_runs_here(path: Path) -> None:
    """Sizes are lowered by name; each key of the file stands in the list, once."""
    speculates = Document.read(path).has("speculative_config")
    words = [*SERVE, "--config", path, "--max-batch-size", 4, "--max-seq-len", 1024]
    done = trtspec(*words, *(["--head", HEAD] if speculates else []), "--dry-run")
    assert done.status == 0, done.stderr
    listed = done.stdout.partition("  honoured:\n")[2]
    leaves = [key for key, entry in Document.read(path).entries.items() if not isinstance(entry.value, dict)]
    assert {key: listed.count(f"{key}:") + listed.count(f"{key},") for key in leaves} == dict.fromkeys(leaves, 1)
    assert "max_seq_len: 1024 (--max-seq-len; the file: " in listed


@pytest.mark.parametrize(
    ("version", "keys", "expected"),
    [
        ("1.2.1", "draft_len_schedule: {1: 4, 8: 2, 32: 1}", ((1, 4), (8, 2), (32, 1))),
        ("1.3.0rc20", "draft_len_schedule: {8: 4, 32: 1}", ((1, 4), (9, 1), (33, 0))),
        ("1.3.0rc20", "max_concurrency: 16", ((1, 4), (17, 0))),
        ("1.2.1", "max_concurrency: 16", ((1, 4), (17, 0))),
        ("1.3.0rc20", "", ()),
    ],
)
def test_a_schedule_means_what_the_release_means(
    version: str, keys: str, expected: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    executed = written(tmp_path, SPECULATING + keys + "}\n", version)
    assert [problem for problem in executed.problems if problem.severity == "error"] == []
    assert executed.settings.draft_schedule == expected
    assert executed.settings.draft_len == 4


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("kv_cache_config: {dtype: nvfp4}", "kv_cache_config.dtype"),
        ("lora_config: {max_lora_rank: 8}", "lora_config.max_lora_rank"),
        ("kv_cache_config: {block_reuse_policy: per_request}", "kv_cache_config.block_reuse_policy"),
        ("max_beam_width: 4", "max_beam_width"),
        ("speculative_config: {decoding_type: NGram, max_draft_len: 4}", "speculative_config.decoding_type"),
        (
            SPECULATING + "use_dynamic_tree: true, dynamic_tree_max_topK: 4, max_total_draft_tokens: 8}",
            "use_dynamic_tree",
        ),
        ("no_such_key: 1", "no_such_key"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(text: str, key: str, tmp_path: Path) -> None:
    path = tmp_path / "engine.yml"
    path.write_text(text + "\n")
    done = trtspec(*SERVE, "--config", path, "--trtllm-version", "1.3.0rc20", "--max-seq-len", 64, "--dry-run")
    assert done.status == 2
    assert f"{key}:" in done.stderr


def test_the_file_decides_and_the_command_line_lowers(tmp_path: Path) -> None:
    recipe = CONFIGS / "kimi-k2.6-nvfp4-eagle3-4xb200-latency.yml"
    plain = CONFIGS / "kimi-k2.6-nvfp4-no-head-4xb200-latency.yml"
    for words, message in (
        ([recipe, "--head", HEAD], "asks for max_seq_len 8192, and"),
        ([recipe, "--head", HEAD, "--draft-len", 2], "--draft-len is not used with --config"),
        ([plain, "--head", HEAD], "does not speculate"),
        ([CONFIGS / "kimi-k2.6-nvfp4-eagle3-4xgb200-disaggregated-front.yml"], "the front of several servers"),
    ):
        done = trtspec(*SERVE, "--config", *words, "--dry-run")
        assert (done.status, message in done.stderr) == (2, True), done.stderr
    assert "not used without --config" in trtspec(*SERVE, "--trtllm-version", "1.2.1", "--dry-run").stderr
    shown = trtspec(*SERVE, "--config", plain, "--max-seq-len", 99, "--prefix-reuse", "off", "--dry-run", "--json")
    answer = json.loads(shown.stdout)
    assert answer["config"]["honoured"]["kv_cache_config.enable_block_reuse"].startswith(
        "off (--prefix-reuse; the file: true"
    )
    assert answer["config"]["not_applicable"]["moe_config.backend"]
    key, file = "tensor_parallel_size", tmp_path / "engine.yml"
    file.write_text(f"{key}: 4\nmax_seq_len: 99\n")
    shared = (*SERVE, "--config", file, "--trtllm-version", "1.3.0rc20", "--dry-run", "--json")
    assert json.loads(trtspec(*shared).stdout)["config"]["not_applicable"][key].startswith("--tp-size alone decides")
    two = json.loads(trtspec(*shared, "--tp-size", 2).stdout)["config"]
    assert two["honoured"][key].startswith("2 (--tp-size") and key not in two["not_applicable"]


def test_reuse_and_cache_as_the_release_has_them(tmp_path: Path) -> None:
    """With a cache of its own the draft is blind in the 1.3 line; drafts are drawn where the file says so."""
    settings = written(tmp_path, SPECULATING + "max_concurrency: 4}\nkv_cache_config: {dtype: fp8}\n").settings
    assert (settings.prefix_reuse, settings.kv_cache_dtype, settings.draft_sampling) == ("blind", "fp8", "argmax")
    assert not settings.chunked_prefill
    text = "kv_cache_config: {host_cache_size: 1000000, tokens_per_block: 64}\nenable_chunked_prefill: true\n"
    settings = written(tmp_path, text).settings
    assert (settings.prefix_reuse, settings.prefix_bytes, settings.block_tokens) == ("warm", 1000000, 64)
    assert settings.chunked_prefill


def ask(url: str, path: str, body: object = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize(
    ("recipe", "reuse"),
    [
        ("kimi-k2.6-nvfp4-eagle3-8xb200-throughput.yml", "warm"),
        pytest.param("kimi-k2.6-nvfp4-eagle3-4xb200-latency.yml", None, marks=pytest.mark.slow),
    ],
)
def test_recipes_serve(recipe: str, reuse: str | None) -> None:
    """A prompt asked twice is answered alike, from the cache where the recipe reuses; drafts are accepted."""
    words = [*SERVE, "--head", HEAD, "--config", CONFIGS / recipe, "--max-batch-size", 4, "--max-seq-len", 1024]
    command = [sys.executable, "-m", "trtspec", *map(str, words), "--dtype", "float32", "--port", "0"]
    environment = {**os.environ, "TRTSPEC_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " on http" in line:
                    break
            url = lines[-1].split(" on ")[1].split()[0]
            body = {"prompt": "Tell me about the sea. " * 12, "max_tokens": 24, "temperature": 0, "model": "kimi-nano"}
            model = ask(url, "/v1/models")["data"][0]["id"]
            answers = [ask(url, "/v1/completions", body | {"model": model}) for _ in range(2)]
            stats = ask(url, "/metrics")[-1]
        finally:
            process.terminate()
        assert process.wait(60) == 0
    assert "  honoured:\n" in lines
    assert any("max_batch_size: 4 (--max-batch-size; the file: " in line for line in lines)
    first, second = (answer["choices"][0] for answer in answers)
    assert first["text"] == second["text"]
    assert first["spec_decode"]["accepted"] > 0
    assert (stats["kvCacheStats"]["cacheHitRate"] > 0.3) if reuse else "kvCacheStats" not in stats
