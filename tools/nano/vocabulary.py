"""kimi-nano's vocabulary: byte-pair merges of the exercises in Kimi's form (tiktoken.model)."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path

from trtspec.checkpoint.tokenizer import RESERVED_SPECIAL_TOKENS, SPLIT_PATTERN
from trtspec.report import write_atomic, write_json

COPIED = (
    "chat_template.jinja",
    "preprocessor_config.json",
)  # engines read the second one also for text alone
# offsets from the base vocabulary's size, as in Kimi's published tokenizer_config.json
SPECIAL_TOKENS = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}


def learn_ranks(texts: Iterable[str], size: int) -> list[bytes]:
    """`size` byte strings in rank order: 256 bytes, then merges by Kimi's split pattern.

    Digits are never merged: a number is copied, compared and computed digit by digit.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.Digits(individual_digits=True),
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


def write_tokenizer(directory: Path, ranks: list[bytes]) -> None:
    """Writes the tokenizer's files as published.

    They are tiktoken.model, tokenizer_config.json, preprocessor_config.json and
    chat_template.jinja.
    """
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ranks)]
    write_atomic(directory / "tiktoken.model", "\n".join(lines) + "\n")
    base = len(ranks)
    names = {
        base + i: SPECIAL_TOKENS.get(i, f"<|reserved_token_{base + i}|>")
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
    for name in COPIED:
        write_atomic(directory / name, (Path(__file__).parent / name).read_bytes())
