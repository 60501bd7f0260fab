"""Training text: conversations answered by the target, as the token ids that the target saw and wrote.

One JSON object per line: {conversation_id, conversations: [{role, content}, ...]} (ModelOpt's format; `messages` is
read too), or {prompt, completion} for text that no chat template surrounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError


@dataclass(frozen=True)
class Sample:
    """One sequence. `answer[i]` is 1 where token i was written by the target, `prompt` counts the tokens before the
    last answer."""

    id: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: int
    category: str = ""


def read_samples(path: Path, tokenizer: KimiTokenizer, seq_len: int, min_len: int = 8) -> list[Sample]:
    """All conversations of a jsonl file, tokenized and cut to `seq_len`; shorter ones than `min_len` are left out.

    Raises TrtspecError naming the line of a row that is no conversation, and when nothing is left.
    """
    samples = []
    for number, row in _rows(path):
        try:
            sample = _sample(row, tokenizer, str(row.get("conversation_id") or number))
        except (KeyError, TypeError, IndexError, AttributeError):
            raise TrtspecError(
                f"TS-DATA-ROW {path}:{number}: neither {{conversations: [{{role, content}}]}} nor "
                "{prompt, completion}",
                "make the data with `trtspec synthesize`",
            ) from None
        if len(sample.tokens) >= min_len:
            samples.append(_cut(sample, seq_len))
    if not samples:
        raise TrtspecError(f"TS-DATA-EMPTY {path} holds no conversation to train on", "run `trtspec synthesize` first")
    return samples


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TrtspecError(
            f"TS-DATA-ROW cannot read {path}: {error}", "pass the jsonl of `trtspec synthesize`"
        ) from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise TrtspecError(
                f"TS-DATA-ROW {path}:{number}: not JSON ({error})", "repair or remove the line"
            ) from None
        if not isinstance(row, dict):
            raise TrtspecError(f"TS-DATA-ROW {path}:{number}: not a JSON object", "repair or remove the line")
        yield number, row


def _sample(row: dict[str, Any], tokenizer: KimiTokenizer, name: str) -> Sample:
    category = str(row.get("category") or "")
    if "completion" in row:
        prompt = tokenizer.encode(row["prompt"])
        tokens = prompt + tokenizer.encode(row["completion"])
        answer = [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
        return Sample(name, tuple(tokens), tuple(answer), len(prompt), category)
    messages = row.get("conversations") or row["messages"]
    prompt, tokens = _render(messages, row, tokenizer)
    return Sample(name, tuple(tokens), tuple(answer_mask(tokens, tokenizer)), len(prompt), category)


def _render(
    messages: list[dict[str, Any]], row: dict[str, Any], tokenizer: KimiTokenizer
) -> tuple[list[int], list[int]]:
    """(prompt ids, all ids). A plain last answer follows the generation prompt, exactly as it was generated."""
    last = messages[-1]
    tools = row.get("tools")
    if last["role"] != "assistant":
        tokens = tokenizer.apply_chat_template(messages, tools, add_generation_prompt=False)
        return tokens, tokens
    prompt = tokenizer.apply_chat_template(messages[:-1], tools)
    if last.get("tool_calls") or last.get("reasoning_content") or not isinstance(last["content"], str):
        return prompt, tokenizer.apply_chat_template(messages, tools, add_generation_prompt=False)
    tokens = prompt + tokenizer.encode(last["content"], allow_special=True)
    if row.get("finish_reason") != "length":
        tokens.append(tokenizer.special_id("<|im_end|>"))
    return prompt, tokens


def answer_mask(tokens: list[int], tokenizer: KimiTokenizer) -> list[int]:
    """1 for what stands in an assistant turn between <|im_middle|> and <|im_end|>, the end mark included."""
    assistant, middle, end = (tokenizer.special_id(f"<|im_{name}|>") for name in ("assistant", "middle", "end"))
    mask, inside, speaking = [], False, False
    for token in tokens:
        mask.append(int(speaking))
        if token == assistant:
            inside = True
        elif token == middle:
            speaking = inside
        elif token == end:
            inside = speaking = False
    return mask


def _cut(sample: Sample, seq_len: int) -> Sample:
    if len(sample.tokens) <= seq_len:
        return sample
    return Sample(sample.id, sample.tokens[:seq_len], sample.answer[:seq_len], sample.prompt, sample.category)


def draft_vocabulary(samples: list[Sample], size: int, vocab_size: int) -> list[int]:
    """The `size` token ids that the target wrote most often (prompts break ties, then low ids), ascending."""
    written, seen = [0] * vocab_size, [0] * vocab_size
    for sample in samples:
        for token, mine in zip(sample.tokens, sample.answer, strict=True):
            seen[token] += 1
            written[token] += mine
    ranked = sorted(range(vocab_size), key=lambda token: (-written[token], -seen[token], token))
    return sorted(ranked[:size])


def coverage(samples: list[Sample], ids: list[int]) -> float:
    """Share of the target's written tokens that the draft vocabulary holds."""
    kept = set(ids)
    total = inside = 0
    for sample in samples:
        for token, mine in zip(sample.tokens, sample.answer, strict=True):
            total += mine
            inside += mine and token in kept
    return inside / max(total, 1)
