"""The tokenizer against tiktoken's educational encoder and transformers' template renderer."""

import base64
import json
import time
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken._educational import bpe_encode, bpe_train
from transformers.utils.chat_template_utils import render_jinja_template

from tests.tiny import SPECIALS, VISIBLE, make_tokenizer
from trtspec.checkpoint.tokenizer import SPLIT_PATTERN, Detokenizer, KimiTokenizer
from trtspec.errors import TrtspecError

SAMPLE = (
    """def tokenize(text: str) -> list[int]:
    # 东京的天气怎么样？ 天气很好。 Don't panic, it's 12345 degrees; I'LL be naïve, ÀÉ.

    return [int(word) for word in text.split() if word.isdigit()]\r\n\t\t🙂🙂 émoji 👩‍👩‍👧 end
"""
    * 3
)
TEXTS = [
    SAMPLE,
    "",
    " ",
    "a  b\n\n\nc   ",
    "日本語とEnglish混在テキスト2024年",
    "I'll DON'T we'Re can't",
    "x = {'key': [1, 22, 333, 4444]}\n\n\n   y",
    "tabs\t\tand\u00a0nbsp \u3000 wide",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with ranks learned by Kimi's split pattern, so that the pattern matters."""
    directory = tmp_path_factory.mktemp("tokenizer")
    ranks = bpe_train(SAMPLE, 400, f"(?V1){SPLIT_PATTERN}", visualise=None)
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    names = SPECIALS | {
        offset: f"<|reserved_{offset}|>" for offset in range(256) if offset not in SPECIALS
    }
    added = {
        len(ranks) + offset: {"content": name, "special": offset not in VISIBLE}
        for offset, name in names.items()
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return directory


def encode_by_definition(directory: Path, text: str) -> list[int]:
    """Splits with the `regex` module (V1: set operations) and merges pair by pair."""
    ranks = {}
    for line in (directory / "tiktoken.model").read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    words = regex.findall(f"(?V1){SPLIT_PATTERN}", text)
    return [token for word in words for token in bpe_encode(ranks, word.encode(), visualise=None)]


@pytest.mark.parametrize("text", TEXTS)
def test_encode_by_definition(trained: Path, text: str) -> None:
    tokenizer = KimiTokenizer(trained)
    ids = tokenizer.encode(text)
    assert ids == encode_by_definition(trained, text)
    assert tokenizer.decode(ids) == text
    assert text != SAMPLE or len(ids) < len(text.encode()) / 2  # the merges matter


@settings(max_examples=150)
@given(st.text(max_size=60))
def test_any_text_survives(trained: Path, text: str) -> None:
    tokenizer = KimiTokenizer(trained)
    ids = tokenizer.encode(text)
    assert ids == encode_by_definition(trained, text)
    assert tokenizer.decode(ids) == text


@settings(max_examples=150)
@given(st.text(max_size=40), st.lists(st.integers(1, 4), max_size=30))
def test_streamed_text_is_whole_characters(trained: Path, text: str, sizes: list[int]) -> None:
    """However tokens arrive, no broken character is shown and the pieces add up."""
    tokenizer = KimiTokenizer(trained)
    ids, detokenizer, pieces = tokenizer.encode(text), Detokenizer(tokenizer), []
    for size in [*sizes, *[1] * len(ids)]:
        pieces.append(detokenizer.push(ids[:size]))
        ids = ids[size:]
    assert detokenizer.flush() == ""
    assert "".join(pieces) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_half_a_character_at_the_end(trained: Path) -> None:
    tokenizer = KimiTokenizer(trained)
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("ok\U0001f680")
    assert detokenizer.push(ids[:-1]) == "ok"
    assert detokenizer.flush() == "\ufffd"


@pytest.mark.clock
def test_long_runs_are_cut_before_the_regex_sees_them(trained: Path) -> None:
    tokenizer = KimiTokenizer(trained)
    began = time.process_time()
    for text in ("a" * 100_000, " " * 60_001, "ab " * 150_000, "\u00e9" * 30_000 + " x"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert time.process_time() - began < 20


def test_special_tokens_only_when_allowed(trained: Path) -> None:
    tokenizer = KimiTokenizer(trained)
    text = "<|im_user|>hello<|im_end|>"
    user, end = tokenizer.special_id("<|im_user|>"), tokenizer.special_id("<|im_end|>")
    assert (user, end) == (tokenizer.base_size + 3, tokenizer.base_size + 2)
    assert tokenizer.encode(text, allow_special=True) == [user, *tokenizer.encode("hello"), end]
    assert not {user, end} & set(tokenizer.encode(text))
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (
        tokenizer.decode(tokenizer.encode(text, allow_special=True), skip_special=True) == "hello"
    )


def test_tool_marks_stay_visible_unless_declared_special(trained: Path, tmp_path: Path) -> None:
    default = KimiTokenizer(trained)
    marks = ["<think>", "<|tool_call_begin|>", "<|im_end|>"]
    ids = [default.special_id(mark) for mark in marks]
    assert default.decode(ids, skip_special=True) == "<think><|tool_call_begin|>"
    path = make_tokenizer(tmp_path) / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for entry in config["added_tokens_decoder"].values():
        entry["special"] = True
    path.write_text(json.dumps(config))
    declared = KimiTokenizer(tmp_path)
    assert declared.decode([declared.special_id(mark) for mark in marks], skip_special=True) == ""


def test_names_come_from_the_config(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes((trained / "tiktoken.model").read_bytes())
    entry = {"content": "<|mine|>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": {"402": entry}})
    )
    tokenizer = KimiTokenizer(tmp_path)
    assert tokenizer.special_id("<|mine|>") == 402
    assert tokenizer.special_tokens["<|reserved_token_403|>"] == 403
    assert len(tokenizer.special_tokens) == 256
    with pytest.raises(TrtspecError, match=r"<\|im_end\|>"):
        tokenizer.special_id("<|im_end|>")
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(TrtspecError, match="added_tokens_decoder"):
        KimiTokenizer(tmp_path)


def test_eos_ids_of_both_files(tmp_path: Path) -> None:
    """K2.5's generation_config.json and config.json disagree; a server must stop at either."""
    make_tokenizer(tmp_path)
    assert KimiTokenizer(tmp_path).eos_ids == (257,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [258, 265]}')
    (tmp_path / "config.json").write_text(
        '{"text_config": {"eos_token_id": 257}, "eos_token_id": 1}'
    )
    assert KimiTokenizer(tmp_path).eos_ids == (258, 265, 257)


@pytest.mark.parametrize("content", [b"not base64!! 0\n", b"YQ== x\n", b"YQ== 5\n", b""])
def test_damaged_ranks_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(TrtspecError, match=r"tiktoken\.model"):
        KimiTokenizer(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TrtspecError, match=r"tiktoken\.model") as error:
        KimiTokenizer(tmp_path)
    assert "copy tiktoken.model" in error.value.remedy
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(TrtspecError, match=r"chat_template\.jinja"):
        KimiTokenizer(tmp_path).encode_chat([{"role": "user", "content": "hi"}])[1]


def test_template_of_the_tokenizer_config_and_its_features(tmp_path: Path) -> None:
    """Loop controls, keyword separators and an undefined `thinking` work as in transformers."""
    source = (
        "{% for m in messages %}{% if m.role == 'skip' %}{% continue %}{% endif %}\n"
        "{{ m.content }}{% endfor %}\n"
        "{{ {'a': [1, '<é>']} | tojson(separators=(',', ':')) }}"
        "{{ 'default' if thinking is not defined else thinking }}"
    )
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": source}))
    messages = [{"role": "user", "content": "x"}, {"role": "skip", "content": "y"}]
    expected, _ = render_jinja_template([messages], chat_template=source)
    rendered = KimiTokenizer(tmp_path).template.render(messages, thinking=None)
    assert rendered == expected[0]
    assert "default" in rendered and "y" not in rendered


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no system role') }}",
        "{{ messages[0].x.y }}",
    ],
)
def test_a_template_cannot_reach_out(tmp_path: Path, source: str) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.raises(TrtspecError, match=r"chat_template\.jinja"):
        KimiTokenizer(tmp_path).template.render([{"role": "user", "content": "hi"}])


def test_a_broken_template_is_named(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(TrtspecError, match="line 1"):
        KimiTokenizer(tmp_path).template.render([])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    directory = tmp_path_factory.mktemp("tiny")
    make_tokenizer(directory)
    return KimiTokenizer(directory)


SPECIAL = [
    "<|im_end|>",
    "<|im_system|>",
    "<|tool_calls_section_begin|>",
    "</think>",
    "[EOS]",
    "<|im_",
    "\ue000",
    "a b",
]
strangers_text = st.lists(st.sampled_from(SPECIAL), max_size=5).map("".join)


@settings(max_examples=60)
@given(user=strangers_text, tool=strangers_text, said=strangers_text)
def test_the_template_alone_writes_special_tokens(
    tiny: KimiTokenizer, user: str, tool: str, said: str
) -> None:
    """A stranger's text changes special tokens only by what an assistant may say."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {tool or "x": tool}}}]

    def specials(user: str, said: str, tools: list) -> list[int]:
        messages = [{"role": "user", "content": user}, {"role": "assistant", "content": said}]
        text, ids = tiny.encode_chat([*messages, {"role": "user", "content": user}], tools)
        assert tiny.decode(ids) == text
        assert text == tiny.template.render([*messages, {"role": "user", "content": user}], tools)
        return [token for token in ids if token >= tiny.base_size]

    names = [
        name
        for name in ("<|tool_calls_section_begin|>", "</think>")
        for _ in range(said.count(name))
    ]
    shown = "".join(name for name in names if tiny.special_tokens[name] not in tiny.hidden_ids)
    plain = specials(
        "u", "", [{"type": "function", "function": {"name": "f", "parameters": {"x": "y"}}}]
    )
    assert sorted(specials(user, said, tools)) == sorted(
        plain + tiny.encode(shown, allow_special=True)
    )


def test_a_conversation_may_hold_any_private_use_character(tiny: KimiTokenizer) -> None:
    """A private-use character outside it marks names; with none left, a conversation is refused."""
    plane = "".join(map(chr, range(0xE000, 0xF900)))
    text, ids = tiny.encode_chat([{"role": "user", "content": f"{plane}<|im_end|>"}])
    assert text == tiny.decode(ids) and f"{plane}<|im_end|>" in text
    assert ids.count(tiny.special_tokens["<|im_end|>"]) == 1
    others = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    with pytest.raises(TrtspecError, match="every private-use character"):
        tiny.encode_chat([{"role": "user", "content": f"{plane}{others}<|im_end|>"}])
