"""kimi-nano's vocabulary: byte-pair merges learned on the corpus, written in Kimi's form (tiktoken.model)."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from trtspec.checkpoint.tokenizer import DEFAULT_SPECIAL_TOKENS, RESERVED_SPECIAL_TOKENS, SPLIT_PATTERN
from trtspec.report import write_atomic, write_json

# Kimi's turns: <|im_user|>user<|im_middle|>text<|im_end|>; an answer without reasoning opens with an empty think pair.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}<|im_end|>
{%- else -%}
<|im_{{ message.role }}|>{{ message.name or message.role }}<|im_middle|>
{%- if message.role == 'assistant' -%}
<think>{{ message.reasoning_content or '' }}</think>
{%- endif -%}
{{ message.content or '' }}
{%- if message.tool_calls -%}
<|tool_calls_section_begin|>
{%- for call in message.tool_calls -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments }}<|tool_call_end|>
{%- endfor -%}
<|tool_calls_section_end|>
{%- endif -%}
<|im_end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_assistant|>assistant<|im_middle|><think>{% if not thinking %}</think>{% endif %}
{%- endif -%}
"""


def learn_ranks(texts: Iterable[str], size: int) -> list[bytes]:
    """`size` byte strings in rank order: the 256 bytes, then merges, learned with Kimi's split pattern."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    byte_of = {character: byte for byte, character in byte_characters().items()}
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merged = [bytes(byte_of[c] for c in token) for token, _ in learned if len(token) > 1]
    return [bytes([value]) for value in range(256)] + merged


def byte_characters() -> dict[int, str]:
    """The printable stand-ins for bytes that byte-level BPE libraries use (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [value for value in range(256) if value not in printable]
    table = {value: chr(value) for value in printable}
    table.update({value: chr(256 + offset) for offset, value in enumerate(others)})
    return table


# engines read it also where they serve text alone
MEDIA_SETTINGS = {
    "patch_size": 14,
    "merge_kernel_size": 2,
    "in_patch_limit": 256,
    "patch_limit_on_one_side": 64,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None,
    "max_num_frames_each_video": None,
    "fixed_output_tokens": None,
    "sample_fps": 2.0,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def write_tokenizer(directory: Path, ranks: list[bytes]) -> None:
    """Writes tiktoken.model, tokenizer_config.json, preprocessor_config.json, chat_template.jinja as published."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    write_atomic(directory / "tiktoken.model", "\n".join(lines) + "\n")
    base = len(ranks)
    names = {
        base + i: DEFAULT_SPECIAL_TOKENS.get(i, f"<|reserved_token_{base + i}|>")
        for i in range(RESERVED_SPECIAL_TOKENS)
    }
    added = {
        str(token): {"content": name, "special": "tool_call" not in name and "think" not in name}
        for token, name in names.items()
    }
    write_json(
        directory / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "bos_token": "[BOS]",
            "eos_token": "[EOS]",
            "pad_token": "[PAD]",
            "unk_token": "[UNK]",
            "model_max_length": 2048,
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    write_json(directory / "preprocessor_config.json", {"media_proc_cfg": MEDIA_SETTINGS})
    write_atomic(directory / "chat_template.jinja", CHAT_TEMPLATE)
