"""Heads of every dialect become the same HeadSpec, and every silent trap in a head is reported."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.heads.convert import foreign_heads
from tests.heads.convert.foreign_heads import IDS, Change, changed_head, drop, set_key
from tests.json_files import read_json
from tests.tiny import make_head
from trtspec.checkpoint.headers import Checkpoint
from trtspec.checkpoint.heads.dialects import DIALECTS, ENGINES
from trtspec.checkpoint.heads.pairing import pair_problems, tensor_parallel_sizes, yarn_problems
from trtspec.checkpoint.heads.read import head_spec, head_spec_from_config, read_head
from trtspec.checkpoint.target_problems import target_spec
from trtspec.errors import TrtspecError
from trtspec.specs import ModelSpec


def target_model(path: Path) -> ModelSpec:
    return target_spec(Checkpoint.open(path))


def codes(path: Path) -> list[str]:
    return [problem.code for problem in read_head(Checkpoint.open(path))[1]]


@pytest.mark.parametrize("dialect", foreign_heads.DIALECTS)
def test_every_dialect_becomes_the_same_spec(
    tmp_path: Path, target_dir: Path, dialect: str
) -> None:
    """The layer ids [1, 3, 4] are stored as 1,3,4 or as 2,4,5, or not at all."""
    plain = head_spec(Checkpoint.open(make_head(tmp_path / "plain", target_dir)))
    spec = head_spec(
        Checkpoint.open(foreign_heads.write_head(tmp_path / dialect, target_dir, dialect))
    )
    assert spec.dialect == dialect
    assert spec.aux_layers == (None if dialect == "safeailab" else (1, 3, 4))
    storage = ("dialect", "layer_prefix", "has_embed_tokens", "has_d2t", "aux_layers")
    assert replace(spec, **{name: getattr(plain, name) for name in storage}) == plain


@pytest.mark.parametrize("attention", ["mha", "mla"])
@pytest.mark.parametrize("eagle", ["3", "3.1"])
@pytest.mark.parametrize("draft_vocab", [None, 128])
def test_spec_says_what_the_maker_made(
    tmp_path: Path, target_dir: Path, attention: str, eagle: str, draft_vocab: int | None
) -> None:
    path = changed_head(
        tmp_path, target_dir, attention=attention, eagle=eagle, draft_vocab=draft_vocab
    )
    spec, problems = read_head(Checkpoint.open(path))
    pruned_mla = (
        attention == "mla" and draft_vocab is not None
    )  # which TensorRT-LLM, whose layout this is, cannot load
    assert [problem.code for problem in problems] == ["TS-HEAD-PRUNED-MLA"] * pruned_mla
    assert (spec.attention, spec.eagle, spec.draft_vocab_size) == (
        attention,
        eagle,
        draft_vocab or 512,
    )
    assert (spec.fc_norm, spec.norm_output, spec.has_d2t) == (
        eagle == "3.1",
        eagle == "3.1",
        draft_vocab is not None,
    )
    assert (spec.hidden_size, spec.num_attention_heads, spec.num_aux) == (64, 4, 3)
    ranks = (
        spec.q_lora_rank,
        spec.kv_lora_rank,
        spec.qk_nope_head_dim,
        spec.qk_rope_head_dim,
        spec.v_head_dim,
    )
    assert ranks == ((48, 32, 16, 8, 16) if attention == "mla" else (0, 0, 0, 0, 0))


def test_tensors_win_where_the_config_is_silent(tmp_path: Path, target_dir: Path) -> None:
    path = changed_head(tmp_path, target_dir, change=drop("draft_vocab_size"), draft_vocab=128)
    spec, problems = read_head(Checkpoint.open(path))
    assert spec.draft_vocab_size == 128
    assert [problem.code for problem in problems] == ["TS-HEAD-CONFIG"]


def torchspec_for_vllm(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """TorchSpec's converter with its vLLM switch.

    Names begin with layers.0., and for kimi_k2 one is added to the nested ids.
    """
    config["eagle_config"] = {IDS: [2, 4, 5], "use_aux_hidden_state": True}
    config["_torchspec_version"] = "0.1.0"
    tensors["embed_tokens.weight"] = torch.zeros(
        config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16
    )


def test_ids_that_torchspec_shifted_for_vllm_are_shifted_back(
    tmp_path: Path, target_dir: Path
) -> None:
    mla = changed_head(tmp_path / "mla", target_dir, change=torchspec_for_vllm, attention="mla")
    mha = changed_head(tmp_path / "mha", target_dir, change=torchspec_for_vllm, attention="mha")
    assert head_spec(Checkpoint.open(mla)).aux_layers == (1, 3, 4)
    assert head_spec(Checkpoint.open(mha)).aux_layers == (
        2,
        4,
        5,
    )  # it adds nothing for a Llama head


def test_a_noted_dialect_wins_where_files_cannot_tell(tmp_path: Path, target_dir: Path) -> None:
    """[3, 4, 6] in ModelOpt's place alone is SGLang's way of writing the outputs 2, 3, 5."""
    path = changed_head(tmp_path, target_dir, change=set_key("eagle_config", {IDS: [3, 4, 6]}))
    assert head_spec(Checkpoint.open(path)).aux_layers == (2, 3, 5)
    (path / "provenance.json").write_text('{"command": "convert", "dialect": "modelopt"}')
    assert head_spec(Checkpoint.open(path)).aux_layers == (3, 4, 6)
    (path / "provenance.json").write_text(
        '{"command": "convert", "dialect": "torchspec"}'
    )  # names say otherwise
    assert head_spec(Checkpoint.open(path)).dialect == "sglang"
    assert read_head(Checkpoint.open(path), DIALECTS["modelopt"])[0].aux_layers == (3, 4, 6)


MLA = {"attention": "mla"}
GAIN = "layers.0.input_layernorm.weight"
NESTED_THETA = {"rope_type": "default", "rope_theta": 50000.0}
INJECTED = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}


def ids(*layers: int) -> Change:
    return lambda config, tensors: config["eagle_config"].update({IDS: list(layers)})


def gain(first: float, last: float) -> Change:
    return lambda config, tensors: tensors.update(
        {GAIN: torch.linspace(first, last, 64).to(torch.bfloat16)}
    )


def nested_theta(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del config["rope_theta"]
    config["rope_parameters"] = NESTED_THETA


def borrowed_lm_head(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    del tensors["lm_head.weight"]
    config["draft_vocab_size"] = config["vocab_size"]


def norm_at_top(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config["norm_before_fc"] = True
    tensors["input_norm.weight"] = tensors["fc.weight"][0].clone()


TRAPS: list[tuple[str, Change, dict[str, Any]]] = [  # beside those of faults.py
    ("TS-HEAD-NORM-OUTPUT", set_key("norm_output", True), {"dialect": "specforge"}),
    ("TS-HEAD-NORM-RESIDUAL", drop("norm_before_residual"), {"dialect": "speculators"}),
    ("TS-HEAD-LAYER-IDS", ids(2, 4, 5), {}),
    ("TS-HEAD-EMBED-OWN", drop(), {"dialect": "torchspec"}),
    ("TS-HEAD-ROPE-INJECTED", set_key("rope_scaling", INJECTED), {}),
    ("TS-HEAD-ROPE-THETA", nested_theta, {}),
    ("TS-HEAD-DOUBLE-NORM", gain(0.8, 1.2), {}),
    ("TS-HEAD-CONFIG", borrowed_lm_head, MLA),
    ("TS-HEAD-CONFIG", norm_at_top, {}),
]
# what engines compute wrongly is an error; what only some engine, or nobody, may notice is not
NO_ERROR = {
    "TS-HEAD-TENSOR-UNKNOWN",
    "TS-HEAD-NORM-OUTPUT",
    "TS-HEAD-LAYER-IDS",
    "TS-HEAD-EMBED-OWN",
    "TS-HEAD-ROPE-INJECTED",
    "TS-HEAD-DOUBLE-NORM",
    "TS-HEAD-CONFIG",
}


@pytest.mark.parametrize(
    ("code", "change", "options"), TRAPS, ids=[f"{i}-{trap[0]}" for i, trap in enumerate(TRAPS)]
)
def test_each_trap_is_found_and_nothing_else(
    tmp_path: Path, target_dir: Path, code: str, change: Change, options: dict[str, Any]
) -> None:
    problems = read_head(
        Checkpoint.open(changed_head(tmp_path, target_dir, change=change, **options))
    )[1]
    found = {problem.code for problem in problems}
    assert code in found
    assert found <= {code, "TS-HEAD-EMBED-OWN"}
    assert all(
        (problem.severity == "error") == (code not in NO_ERROR)
        for problem in problems
        if problem.code == code
    )


def told_everywhere(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    plain = {"rope_type": "default", "type": "default", "rope_theta": config["rope_theta"]}
    config["rope_parameters"] = (config["rope_scaling"] or plain) | {
        "rope_theta": config["rope_theta"]
    }


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (told_everywhere, {}),
        (told_everywhere, MLA),
        (drop("rope_theta"), {}),
        (gain(0.99, 1.01), {}),
        (set_key("hidden_act", "swish"), {}),
        (ids(-1, 1, 3), MLA),
    ],
)
def test_what_is_told_alike_or_does_no_harm_is_not_reported(
    tmp_path: Path, target_dir: Path, change: Change, options: dict[str, Any]
) -> None:
    assert codes(changed_head(tmp_path, target_dir, change=change, **options)) == []


def test_a_head_with_an_error_is_refused_as_a_spec(tmp_path: Path, target_dir: Path) -> None:
    with pytest.raises(TrtspecError, match="TS-HEAD-D2T-MISSING"):
        head_spec(
            Checkpoint.open(changed_head(tmp_path, target_dir, change=drop("d2t"), draft_vocab=128))
        )


def test_our_own_heads_have_no_double_norm(tmp_path: Path, target_dir: Path) -> None:
    path = changed_head(tmp_path, target_dir, change=gain(0.8, 1.2))
    (path / "provenance.json").write_text('{"command": "train"}')
    assert codes(path) == []


def pair(path: Path, target_dir: Path, **changes: Any) -> list[str]:
    spec = replace(head_spec(Checkpoint.open(path)), **changes)
    return [problem.code for problem in pair_problems(spec, target_model(target_dir))]


PAIRS: dict[
    str, dict[str, Any]
] = {  # what is wrong with a pair -> the fields of its head that make it so
    "WIDTH": {"target_hidden_size": 32},
    "VOCAB": {"vocab_size": 1024},
    "LM-HEAD": {"has_lm_head": False, "draft_vocab_size": 64},
    "LAYER-RANGE": {"aux_layers": (1, 3, 8)},
    "LAYERS-SHIFTED": {"aux_layers": (2, 4, 5)},
    "LAYERS-NOT-DEFAULT": {"aux_layers": (0, 3, 6)},
    "LAYERS-UNKNOWN": {"aux_layers": None},
    "MHA-CACHE": {"attention": "mha"},
    "CONTEXT": {"max_position_embeddings": 128},
}


def test_pairs(tmp_path: Path, target_dir: Path) -> None:
    path = changed_head(tmp_path, target_dir, attention="mla")
    assert pair(path, target_dir) == []
    for code, changes in PAIRS.items():
        assert pair(path, target_dir, **changes) == [f"TS-PAIR-{code}"]


def test_another_stretch_of_positions_is_a_warning(tmp_path: Path, target_dir: Path) -> None:
    """A factor or base other than the target's is a warning: it costs acceptance.

    Published heads differ in beta_fast alone.
    """
    spec, model = (
        head_spec(Checkpoint.open(changed_head(tmp_path, target_dir, attention="mla"))),
        target_model(target_dir),
    )

    def severities(**changes: Any) -> list[str]:
        other = replace(spec, rope=replace(spec.rope, **changes))
        return [
            problem.severity
            for problem in pair_problems(other, model) + yarn_problems(other, model)
        ]

    assert severities() == []
    assert severities(beta_fast=spec.rope.beta_fast + 1) == ["info"]
    assert severities(factor=spec.rope.factor * 2) == ["warning"]
    assert severities(theta=spec.rope.theta * 5) == ["warning"]


def test_tensor_parallel_sizes(tmp_path: Path, target_dir: Path) -> None:
    spec = head_spec(Checkpoint.open(changed_head(tmp_path, target_dir, attention="mla")))
    assert tensor_parallel_sizes(spec) == [1, 2, 4]
    assert [p.code for p in pair_problems(spec, target_model(target_dir), tp_size=8)] == [
        "TS-PAIR-TP"
    ]
    assert [
        p.code
        for p in pair_problems(
            spec,
            target_model(target_dir),
            head_id="nvidia/Kimi-K2.5-Eagle3",
            target_id="nvidia/Kimi-K2.6-NVFP4",
        )
    ] == ["TS-PAIR-OTHER-TARGET"]


def test_published_draft_configs(upstream_data: Path) -> None:
    """TorchSpec's own config files for Kimi-K2.5, as an outside witness for the config reader."""
    folder = upstream_data / "draft_configs"
    mla = head_spec_from_config(read_json(folder / "torchspec--kimi_k25_eagle3_mla.json"))
    mha = head_spec_from_config(read_json(folder / "torchspec--kimi_k25_eagle3.json"))
    assert (mla.attention, mla.aux_layers, mla.kv_elements_per_token) == ("mla", (1, 29, 57), 576)
    assert (mha.attention, mha.aux_layers, mha.kv_elements_per_token) == ("mha", None, 16384)
    assert (mla.rope.beta_fast, mha.rope.beta_fast) == (1, 32)


def test_rows_alone_know_dialects_and_engines_by_name() -> None:
    """Code that reads or rewrites heads has no comparison and no table with names of dialects."""
    package, names = Path(__file__).parents[3] / "trtspec", {*DIALECTS, *ENGINES}
    files = [*(package / "checkpoint").rglob("*.py"), *(package / "heads" / "convert").glob("*.py")]
    files += [
        package / "heads" / "card.py",
        package / "cli" / "convert.py",
        package / "cli" / "inspect.py",
    ]
    found = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            keys = node.keys if isinstance(node, ast.Dict) else []
            parts = (
                [node.left, *node.comparators]
                if isinstance(node, ast.Compare)
                else [key for key in keys if key]
            )
            words = [
                leaf.value
                for part in parts
                for leaf in ast.walk(part)
                if isinstance(leaf, ast.Constant)
            ]
            found += [
                f"{path.name}:{node.lineno} {word}"  # type: ignore[attr-defined]
                for word in words
                if word in names
            ]
    assert found == []
