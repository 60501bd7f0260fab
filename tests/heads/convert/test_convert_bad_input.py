"""Mistakes, damage, and options that would lose something: each has a code and a remedy.

The catalogue of damaged heads is in tests/checkpoint/heads/faults.py; here is what needs more than
one head's files.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.command_line import Done, calls_of, killed_at, succeeded, trtspec
from tests.heads.convert.foreign_heads import (
    IDS,
    Change,
    changed_head,
    drop,
    set_key,
    target_embedding,
    write_head,
)
from tests.json_files import read_json, write_json
from tests.tiny import make_target, read_tensors, write_tensors
from trtspec import machine


def codes(done: Done, *, info: bool = False) -> set[str]:
    problems = json.loads(done.stdout)["problems"]
    return {problem["code"] for problem in problems if info or problem["severity"] != "info"}


def nan_embedding(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.full_like(tensors["embed_tokens.weight"], torch.nan)


def other_ids(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["eagle_config"][IDS] = [layer + 1 for layer in config["eagle_config"][IDS]]


def other_vocabulary(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["vocab_size"] = config["draft_vocab_size"] = 500
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:500].contiguous()


def rows_by_offset(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    full = torch.randn(512, 64).to(torch.bfloat16)
    tensors["lm_head.weight"] = full[tensors["d2t"]]


def leaked_quantization(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def llama_yarn(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
    }
    del config["rope_parameters"]


def random_embedding(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = torch.randn(512, 64).to(torch.bfloat16)


def trained_embedding(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"] * 1.05


INSPECTED = [
    ("TS-PAIR-LAYERS-SHIFTED", 3, "modelopt", other_ids, {}),
    ("TS-HEAD-LAYER-IDS", 3, "modelopt", other_ids, {}),
    ("TS-PAIR-VOCAB", 3, "modelopt", other_vocabulary, {}),
    ("TS-PAIR-EOS", 0, "modelopt", set_key("eos_token_id", 77), {}),
    ("TS-HEAD-LM-HEAD-ROWS", 3, "modelopt", rows_by_offset, {"draft_vocab": 400}),
    ("TS-HEAD-ROPE-MSCALE", 0, "vllm", llama_yarn, {}),
    ("TS-HEAD-ROPE-TORCHSPEC", 0, "torchspec", None, {"attention": "mla"}),
    ("TS-PAIR-EMBED-RANDOM", 3, "vllm", random_embedding, {}),
    ("TS-PAIR-EMBED-TRAINED", 0, "vllm", trained_embedding, {}),
]


@pytest.mark.parametrize(
    ("code", "status", "dialect", "change", "kind"), INSPECTED, ids=[row[0] for row in INSPECTED]
)
def test_inspect_names_it(
    room: Path,
    target_dir: Path,
    code: str,
    status: int,
    dialect: str,
    change: Change | None,
    kind: dict[str, Any],
) -> None:
    path = changed_head(room / f"inspect-{code}", target_dir, dialect, change, **kind)
    done = trtspec("inspect", path, "--against", target_dir, "--json")
    assert done.status == status
    assert code in codes(done, info=code == "TS-HEAD-ROPE-TORCHSPEC")
    assert all(problem["remedy"] for problem in done.json["problems"])


def medusa(room: Path) -> Path:
    path = room / "medusa"
    path.mkdir()
    write_json(
        path / "config.json", {"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 64}
    )
    weights = {
        f"{i}.{j}": torch.zeros(64, 64) for i in range(2) for j in ("0.linear.weight", "1.weight")
    }
    save_file(weights, path / "model.safetensors")
    return path


def eagle_1(room: Path) -> Path:
    path = room / "eagle1"
    path.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 64,
    }
    write_json(path / "config.json", config)
    weights = {
        "fc.weight": torch.zeros(64, 128),
        "layers.0.self_attn.q_proj.weight": torch.zeros(64, 64),
    }
    save_file(weights, path / "model.safetensors")
    return path


def test_other_drafts_and_whole_models_are_told_by_code(room: Path, target_dir: Path) -> None:
    for path, code in ((medusa(room), "TS-HEAD-MEDUSA"), (eagle_1(room), "TS-HEAD-EAGLE1")):
        inspected = trtspec("inspect", path, "--json")
        assert (inspected.status, codes(inspected)) == (3, {code})
        assert code in trtspec("inspect", path, "--against", target_dir).stdout
        refused = trtspec("convert", path, "-o", room / "none", "--to", "vllm", "--json")
        assert (refused.status, refused.json["error"]["code"]) == (3, code)
    whole = trtspec("convert", target_dir, "-o", room / "none", "--to", "trtllm", "--json")
    assert (whole.status, whole.json["error"]["code"]) == (3, "TS-HEAD-FULL-MODEL")
    assert not (room / "none").exists()


def test_what_conversion_mends(room: Path, target_dir: Path) -> None:
    """A null width, leaked quantization, `model.` names and a map in t2d alone are mended."""

    def spoil(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["target_hidden_size"] = None
        leaked_quantization(config, tensors)
        del tensors["d2t"], config["rope_theta"]
        for name in list(tensors):
            tensors[f"model.{name}"] = tensors.pop(name)

    good = changed_head(room / "mend-good", target_dir, "specforge", draft_vocab=128)
    bad = changed_head(room / "mend-bad", target_dir, "specforge", spoil, draft_vocab=128)
    for name in ("good", "bad"):
        source = {"good": good, "bad": bad}[name]
        succeeded("convert", source, "-o", room / f"mended-{name}", "--to", "trtllm")
    files = [
        (room / f"mended-{name}" / "model.safetensors").read_bytes() for name in ("good", "bad")
    ]
    assert files[0] == files[1]
    assert codes(trtspec("inspect", room / "mended-bad", "--json")) == set()


def test_convert_mends_words_that_the_tensors_contradict(room: Path, target_dir: Path) -> None:
    """convert mends words of the config that the tensors contradict.

    A tied lm_head although the file has its own, another kind's class, and a base that the user
    settles.
    """

    def spoil(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["rope_parameters"]["rope_theta"] *= 5
        config |= {"tie_word_embeddings": True, "architectures": ["Eagle3DeepseekV2ForCausalLM"]}

    path, good = (
        changed_head(room / "words", target_dir, "modelopt", spoil),
        changed_head(room / "right", target_dir, "modelopt"),
    )
    assert codes(trtspec("inspect", path, "--json")) == {"TS-HEAD-CONFIG", "TS-HEAD-ROPE-TWICE"}
    words = ("--to", "vllm", "--rope-theta", "10000")
    for source, output in ((path, "words-out"), (good, "right-out")):
        succeeded("convert", source, "-o", room / output, *words)
    assert (room / "words-out" / "config.json").read_text() == (
        room / "right-out" / "config.json"
    ).read_text()


@pytest.mark.parametrize("dialect", ["modelopt", "vllm", "sglang"])
def test_a_borrowed_lm_head_is_borrowed_by_every_engine(
    room: Path, target_dir: Path, dialect: str
) -> None:
    """With draft_vocab_size and without lm_head SGLang keeps a random one."""
    path = changed_head(
        room / f"borrowed-{dialect}", target_dir, dialect, drop("lm_head.weight"), attention="mla"
    )
    assert "TS-HEAD-CONFIG" in codes(trtspec("inspect", path, "--json"))
    for to in ("trtllm", "vllm", "sglang"):
        output = room / f"borrowed-{dialect}-{to}"
        succeeded("convert", path, "-o", output, "--to", to)
        assert read_json(output / "config.json").get("draft_vocab_size") is None
        assert codes(trtspec("inspect", output, "--json")) == set()


def test_an_embedding_is_never_lost_silently(room: Path, target_dir: Path) -> None:
    trained = changed_head(room / "trained", target_dir, "vllm", trained_embedding)
    words = ("convert", trained, "-o", room / "trained-out", "--target", target_dir, "--to")
    assert codes(trtspec(*words, "trtllm", "--json")) == {"TS-CONVERT-EMBED"}
    succeeded(*words, "trtllm", "--embed-tokens", "target")
    borrowed = read_tensors(room / "trained-out")["embed_tokens.weight"]
    assert torch.equal(borrowed, target_embedding(target_dir))
    alone = trtspec("convert", trained, "-o", room / "trained-alone", "--to", "sglang", "--json")
    assert (alone.status, codes(alone)) == (0, {"TS-CONVERT-EMBED"})
    assert "embed_tokens.weight" in read_tensors(room / "trained-alone")


def test_lm_head_is_borrowed_where_it_must_be(room: Path, target_dir: Path) -> None:
    bare = changed_head(room / "bare", target_dir, "modelopt", drop("lm_head.weight"))
    output = room / "bare-out"
    assert codes(trtspec("convert", bare, "-o", output, "--to", "torchspec", "--json")) == {
        "TS-CONVERT-LM-HEAD"
    }
    succeeded("convert", bare, "-o", output, "--to", "torchspec", "--target", target_dir)
    assert read_tensors(output)["lm_head.weight"].shape == (512, 64)
    succeeded("convert", bare, "-o", room / "bare-sglang", "--to", "sglang")
    assert read_json(room / "bare-sglang" / "config.json")["draft_vocab_size"] is None


def test_unknown_tensors_and_bad_values_stop_a_conversion(room: Path, target_dir: Path) -> None:
    for name, code in (
        ("layers.0.self_attn.o_proj.bias", "TS-HEAD-FUNCTION"),
        ("gate.weight", "TS-CONVERT-TENSORS"),
    ):

        def more(
            config: dict[str, Any], tensors: dict[str, torch.Tensor], name: str = name
        ) -> None:
            tensors[name] = torch.ones(64, 1, dtype=torch.bfloat16)

        path = changed_head(room / f"more-{code}", target_dir, "modelopt", more)
        assert code in codes(trtspec("convert", path, "-o", room / "no", "--to", "vllm", "--json"))
    path = changed_head(room / "nan", target_dir, "torchspec", nan_embedding)
    assert codes(trtspec("convert", path, "-o", room / "no", "--to", "vllm", "--json")) == {
        "TS-HEAD-NOT-FINITE"
    }
    words = (
        "convert",
        path,
        "-o",
        room / "cured",
        "--to",
        "vllm",
        "--target",
        target_dir,
        "--embed-tokens",
        "target",
    )
    succeeded(*words)
    assert not (room / "no").exists()


def test_a_dry_run_checks_what_the_run_checks(
    room: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value in 21 MB, which a sample misses; the room on the disk."""

    def wide(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        config["vocab_size"] = config["draft_vocab_size"] = 163_840
        rows = torch.ones(163_840, 64, dtype=torch.bfloat16)
        rows.view(-1)[3_000_001] = torch.nan
        tensors["lm_head.weight"] = rows

    path = changed_head(room / "wide", target_dir, "modelopt", wide)
    for words in (("--dry-run",), ()):
        done = trtspec("convert", path, "-o", room / "wide-out", "--to", "vllm", "--json", *words)
        assert (done.status, "TS-HEAD-NOT-FINITE" in done.stdout) == (3, True)
        assert not (room / "wide-out").exists()
    monkeypatch.setattr(machine, "free_disk", lambda _: 10**6)
    done = trtspec(
        "convert",
        changed_head(room / "narrow", target_dir, "modelopt"),
        "-o",
        room / "wide-out",
        "--to",
        "vllm",
        "--dry-run",
    )
    assert done.status == 1 and "bytes and its disk has 1,000,000 free" in done.stderr


def test_force_replaces_heads_only(room: Path, target_dir: Path) -> None:
    source = changed_head(room / "forced", target_dir, "modelopt")
    output = room / "forced-out"
    words = ("convert", source, "-o", output, "--to", "vllm")
    succeeded(*words)
    assert trtspec(*words).status == 1 or "already exists" in trtspec(*words).stderr
    succeeded(*words, "--force")
    for name in ("notes.txt", "adapter.safetensors"):
        (output / name).write_text("mine")
        assert "did not write" in trtspec(*words, "--force").stderr
        assert (output / name).read_text() == "mine"
        (output / name).unlink()
    assert (
        "the head that is converted"
        in trtspec("convert", source, "-o", source, "--to", "vllm").stderr
    )


def test_the_result_is_re_read_against_its_source(room: Path, target_dir: Path) -> None:
    source = changed_head(
        room / "reread", target_dir, "torchspec", attention="mla", eagle="3.1", draft_vocab=128
    )
    output = room / "reread-out"
    succeeded("convert", source, "-o", output, "--to", "vllm")
    done = succeeded("inspect", output, "--against", source, "--json")
    report = done.json
    assert (
        report["comparison"]["identical"]
        == report["comparison"]["compared"]
        == report["comparison"]["tensors"]
    )
    assert report["comparison"]["absent"] == ["t2d"]
    tensors = read_tensors(output)
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    write_tensors(output, tensors)
    assert codes(trtspec("inspect", output, "--against", source, "--json")) >= {"TS-HEAD-DIFFERS"}


def test_build_config_takes_the_layers_from_a_converted_head(room: Path) -> None:
    target = make_target(room / "deep", layers=12, hidden=64)
    source = write_head(
        room / "deep-head", target, "modelopt", attention="mla", aux_layers=(2, 6, 9)
    )
    for dialect in ("vllm", "sglang"):
        output = room / f"deep-{dialect}"
        done = trtspec("convert", source, "-o", output, "--to", dialect, "--target", target)
        assert "eagle3_layers_to_capture: [2, 6, 9]" in done.stdout
        built = trtspec(
            "build-config",
            target,
            "--head",
            output,
            "--trtllm-version",
            "1.3.0rc20",
            "--tp-size",
            4,
            "--json",
        )
        assert built.json["config"]["speculative_config"]["eagle3_layers_to_capture"] == [2, 6, 9]


@pytest.mark.slow
def test_a_killed_conversion_leaves_no_head(tmp_path: Path, target_dir: Path) -> None:
    """A killed conversion leaves no head, and the same command then writes the same bytes."""
    source = write_head(tmp_path / "head", target_dir, "vllm")
    words, out = ("convert", source, "--to", "trtllm", "-o"), tmp_path / "out"
    succeeded(*words, tmp_path / "first")
    calls = calls_of(lambda: trtspec(*words, tmp_path / "whole"))
    for share in (0.1, 0.3, 0.5, 0.7, 0.9, 0.95):
        assert killed_at(share * calls, lambda: trtspec(*words, out))
        assert not (out / "config.json").exists()
    succeeded(*words, out)
    for name in ("config.json", "model.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {file.name for file in out.iterdir()} >= {"README.md", "provenance.json"}


def damaged(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    leaked_quantization(config, tensors)
    config["tie_word_embeddings"] = True
    tensors["t2d"][0] = ~tensors["t2d"][0]


def test_each_repair_is_listed(room: Path, target_dir: Path) -> None:
    """In the output, in JSON, in provenance.json and in the card."""
    path = changed_head(room / "repaired", target_dir, "torchspec", damaged, draft_vocab=128)
    wanted = {"TS-HEAD-CONFIG", "TS-HEAD-T2D-VALUES"}
    done = succeeded("convert", path, "-o", room / "repaired out", "--to", "vllm", "--json")
    assert {one["code"] for one in done.json["repairs"]} == wanted
    output = room / "repaired out"
    assert {one["code"] for one in read_json(output / "provenance.json")["repairs"]} == wanted
    card = (output / "README.md").read_text()
    assert all(code in card for code in wanted)
    assert (
        f"--speculative-draft-model-path '{output}'" in card
    )  # quoted, since the path has a space
    shown = trtspec("convert", path, "-o", output, "--to", "vllm", "--force").stdout
    assert shown.count("repaired: ") == 3
