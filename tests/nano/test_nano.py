"""kimi-nano: its corpus, its vocabulary, and the file that ships."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.nano import corpus
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.data_files import kimi_nano_dir

MODULE = '''"""Adds things, one after the other, as described below in a few words."""

def add(first, second):
    """Return the sum of both arguments, whatever they are.

    Nothing else happens here.
    """
    total = first
    total += second
    return total


class T:
    def test_add(self):
        one = 1
        two = 2
        assert add(one, one) == two
        assert add(one, two) == 3
'''


def test_conversations_are_cut_out_of_a_module() -> None:
    found = {chat.category: chat for chat in corpus.conversations(corpus.Module("adding.py", MODULE, False))}
    assert set(found) == {"module", "completion", "docstring", "test"}
    assert '"""Return the sum' in found["completion"].question and "total += second" in found["completion"].answer
    assert "Return the sum" not in found["docstring"].question
    assert found["docstring"].answer.startswith("Return the sum of both")
    assert found["test"].answer.startswith("```python\ndef test_add")


def test_modules_split_by_name_and_held_out_ones_stay_out() -> None:
    modules = corpus.modules()
    heldout = {module.name for module in modules if module.heldout}
    assert 0.04 < len(heldout) / len(modules) < 0.15
    if not (kimi_nano_dir() / "prompts_train.jsonl").is_file():
        pytest.skip("kimi-nano is not in this installation")
    for file, outside in (("prompts_train.jsonl", True), ("prompts_heldout.jsonl", False)):
        rows = [json.loads(line) for line in (kimi_nano_dir() / file).read_text().splitlines()]
        names = {row["id"].split(":")[1] for row in rows}
        assert all((name not in heldout) == outside for name in names if name in {m.name for m in modules})


def test_learned_ranks_round_trip(tmp_path: Path) -> None:
    ranks = corpus.learn_ranks([MODULE * 3], 320)
    assert len(ranks) == len(set(ranks)) == 320 and ranks[:256] == [bytes([i]) for i in range(256)]
    corpus.write_tokenizer(tmp_path, ranks)
    settings = "preprocessor_config.json"  # engines do not start without it
    assert (tmp_path / settings).read_bytes() == (kimi_nano_dir() / settings).read_bytes()
    tokenizer = KimiTokenizer(tmp_path)
    ids = tokenizer.encode(MODULE)
    assert tokenizer.decode(ids) == MODULE and len(ids) < len(MODULE) / 2
    assert tokenizer.special_id("<|im_end|>") == 322


def test_template_has_kimis_turns(tmp_path: Path) -> None:
    corpus.write_tokenizer(tmp_path, corpus.learn_ranks([MODULE], 280))
    tokenizer = KimiTokenizer(tmp_path)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert tokenizer.render_chat(messages) == (
        "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>U<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><think></think>"
    )
    assert tokenizer.render_chat(messages, thinking=True).endswith("<|im_middle|><think>")
    chat = corpus.Exchange("x", "tool", "Look up `f`.", '{"name": "f"}', (corpus.LOOKUP,))
    text = tokenizer.render_chat(corpus.messages(chat), [corpus.LOOKUP], add_generation_prompt=False)
    assert "<|im_system|>tool_declare<|im_middle|>[{" in text
    assert '<|tool_call_begin|>functions.lookup:0<|tool_call_argument_begin|>{"name": "f"}<|tool_call_end|>' in text


def test_shipped_model_is_small_whole_and_has_learned() -> None:
    import torch

    from trtspec.models.figures import bits_per_byte, experts_touched, held_out
    from trtspec.models.weights import load_target

    if not (kimi_nano_dir() / "model.safetensors").is_file():
        pytest.skip("kimi-nano is not in this installation")
    assert (kimi_nano_dir() / "model.safetensors").stat().st_size < 32e6
    model = load_target(kimi_nano_dir(), dtype=torch.float32)
    texts = held_out(KimiTokenizer(kimi_nano_dir()), 20)
    with torch.inference_mode():
        figures = bits_per_byte(model, texts) | experts_touched(model, texts)
    print(f"{len(texts)} held-out answers: {figures}")
    assert figures["heldout_bits_per_byte"] < 2.0  # random weights need 3.5
    assert figures["experts_4_over_1"] >= 2.0
