"""Every command judges a tokenizer and a template by what its tokens mean to the model."""

import json
import shutil
from pathlib import Path

import pytest

from tests.command_line import trtspec
from tests.tiny import make_target
from trtspec.checkpoint.target_problems import read_target, require_target
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError

CONFIG, TEMPLATE, RANKS = "tokenizer_config.json", "chat_template.jinja", "tiktoken.model"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return make_target(
        tmp_path_factory.mktemp("whole") / "target", nested=False, layers=3, shards=1
    )


def without_gaps(path: Path) -> None:
    """As a tool writes them that numbers the tokens which have a name, one after the other."""
    config = json.loads((path / CONFIG).read_text())
    named = [e for e in config["added_tokens_decoder"].values() if "reserved" not in e["content"]]
    config["added_tokens_decoder"] = {
        str(256 + number): entry for number, entry in enumerate(named)
    }
    (path / CONFIG).write_text(json.dumps(config))


def fast(path: Path) -> None:
    added = [{"id": 272, "content": "<|im_middle|>"}]
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))


def added(path: Path) -> None:
    (path / "added_tokens.json").write_text(json.dumps({"<think>": 277}))


def generation(path: Path) -> None:
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 259]}))


def llama(path: Path) -> None:
    (path / TEMPLATE).write_text(
        "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    )


def replacing(old: str, new: str, file: str = TEMPLATE):
    def spoil(path: Path) -> None:
        text = (path / file).read_text()
        assert old in text
        (path / file).write_text(text.replace(old, new))

    return spoil


LAST_RANK = "/w== 255\n"
fewer_ranks = replacing(LAST_RANK, "", RANKS)
FAULTS = [
    (
        replacing(LAST_RANK, f"{LAST_RANK}enp6eg== 256\n", RANKS),
        "error",
        RANKS,
        "are 513, and the model has 512",
    ),
    (fewer_ranks, "error", RANKS, "are 511, and the model has 512"),
    (without_gaps, "error", CONFIG, "which is reserved in the model (18 tokens in all)"),
    (
        replacing("<|im_middle|>", "<|im_center|>", CONFIG),
        "error",
        CONFIG,
        "273, which is <|im_middle|> in the model",
    ),
    (
        replacing("</think>", "<|end_of_thought|>", CONFIG),
        "error",
        CONFIG,
        "279, which is </think> in the model",
    ),
    (
        replacing('"<think>"', '"</think>"', CONFIG),
        "error",
        CONFIG,
        "278, which is <think> in the model",
    ),
    (
        replacing('"eos_token": "[EOS]"', '"eos_token": "[PAD]"', CONFIG),
        "error",
        CONFIG,
        "eos_token is [PAD]",
    ),
    (fast, "error", "tokenizer.json", "<|im_middle|> is token 272, which is reserved in the model"),
    (
        added,
        "error",
        "added_tokens.json",
        "<think> is token 277, which is <|media_pad|> in the model",
    ),
    (generation, "error", "generation_config.json", "eos_token_id is 259, and [EOS] or <|im_end|>"),
    (llama, "error", TEMPLATE, "the family's marks"),
    (replacing("<|im_middle|>", "\n"), "error", TEMPLATE, "the family's marks"),
    (replacing("<|im_end|>\n{%- endfor -%}", "{%- endfor -%}"), "error", TEMPLATE, "marks"),
    (replacing("tools | tojson", "''"), "warning", TEMPLATE, "the tools of a request"),
    (
        replacing("'## Return of ' ~ message.tool_call_id ~ '\\n'", "'' if 0"),
        "warning",
        TEMPLATE,
        "tool calls",
    ),
    (replacing("message.reasoning_content or ''", "''"), "warning", TEMPLATE, "another form"),
    (replacing("<think>", "<|think|>"), "error", TEMPLATE, "answers between"),
    (
        replacing("thinking -%}<think>", "thinking -%}<|im_end|>"),
        "error",
        TEMPLATE,
        "the turn of the answer",
    ),
    (replacing("{%- endif -%}", "{%- end -%}"), "error", TEMPLATE, "innermost block"),
]


@pytest.mark.parametrize(("spoil", "severity", "where", "says"), FAULTS)
def test_a_fault_of_meaning_is_found_and_refused(tmp_path, whole, spoil, severity, where, says):
    path = shutil.copytree(whole, tmp_path / "target")
    assert not read_target(path).problems
    spoil(path)
    problems = [problem for problem in read_target(path).problems if says in problem.message]
    assert [problem.severity for problem in problems] == [severity], read_target(path).problems
    assert where in problems[0].where
    if severity == "error":
        with pytest.raises(TrtspecError, match=problems[0].code):
            require_target(path)


def test_check_reads_no_answer_with_a_foreign_tokenizer(tmp_path, whole):
    from trtspec.verbs.check import _tokenizer

    path = shutil.copytree(whole, tmp_path / "target")
    assert isinstance(_tokenizer(str(path)), KimiTokenizer)
    fewer_ranks(path)
    with pytest.raises(TrtspecError, match="the model has 512"):
        _tokenizer(str(path))
    done = trtspec("serve", path, "--backend", "reference", "--dry-run")
    assert done.status == 1 and "the model has 512" in done.stderr
