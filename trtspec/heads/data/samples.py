"""Training text: conversations answered by the target, as the token ids that the target saw and wrote.

Messages go through the target's chat template; a prompt with its completion is text that no template surrounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from trtspec.checkpoint.conversations import Conversation, read_conversations
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.errors import TrtspecError, UsageError


@dataclass(frozen=True)
class Sample:
    """One sequence. `answer[i]` is 1 where token i was written by the target, `prompt` counts the tokens before the
    last answer."""

    id: str
    tokens: tuple[int, ...]
    answer: tuple[int, ...]
    prompt: int
    category: str = ""


@dataclass
class BadRows:
    """Rows that cannot be read and are skipped, `limit` at most; `found` says of each where it is and what is wrong."""

    limit: int
    found: list[str] = field(default_factory=list)

    def skip(self, error: UsageError) -> None:
        """Counts a row. Raises its error where nothing may be skipped, or no more."""
        if not self.limit:
            raise error
        if len(self.found) >= self.limit:
            message = f"{error.message}; {self.limit} rows that cannot be read were skipped before it"
            raise UsageError(message, "repair the data, or allow more with --skip-bad-rows")
        self.found.append(error.message)


def read_samples(
    source: Path | str, tokenizer: KimiTokenizer, seq_len: int, min_len: int = 8, bad: BadRows | None = None
) -> list[Sample]:
    """All conversations of a source (see `read_conversations`), tokenized and cut to `seq_len`; shorter ones than
    `min_len` are left out, and rows that cannot be read while `bad` takes them.

    Raises UsageError naming the line of a row that is no conversation, TrtspecError when nothing is left.
    """
    samples, bad = [], bad or BadRows(0)
    for conversation in read_conversations(source, on_bad=bad.skip):
        try:
            sample = sample_of(conversation, tokenizer)
        except UsageError as error:
            bad.skip(error)
            continue
        if len(sample.tokens) >= min_len:
            samples.append(_cut(sample, seq_len))
    if not samples:
        message = f"TS-DATA-EMPTY {source} holds no conversation to train on"
        raise TrtspecError(message, "run `trtspec synthesize` first")
    return samples


def sample_of(conversation: Conversation, tokenizer: KimiTokenizer) -> Sample:
    """The whole conversation as ids; a row without an id is called by its line. Raises UsageError for text that nobody
    wrote as an answer."""
    name = conversation.id or str(conversation.line)
    if conversation.completion is not None:
        prompt = tokenizer.encode(conversation.text)
        tokens = prompt + tokenizer.encode(conversation.completion)
        answer = [0] * len(prompt) + [1] * (len(tokens) - len(prompt))
    elif conversation.messages:
        prompt, tokens = _render(conversation, tokenizer)
        answer = answer_mask(tokens, tokenizer)
    else:
        raise UsageError(
            f"TS-DATA-ROW {conversation.where} is raw text, which the target did not write",
            "make the data with `trtspec synthesize`",
        )
    return Sample(name, tuple(tokens), tuple(answer), len(prompt), conversation.category)


def _render(conversation: Conversation, tokenizer: KimiTokenizer) -> tuple[list[int], list[int]]:
    """(prompt ids, all ids). A plain last answer follows the generation prompt, exactly as it was generated."""
    *before, last = conversation.messages
    tools = list(conversation.tools) or None
    if last["role"] != "assistant":
        tokens = tokenizer.apply_chat_template(conversation.messages, tools, add_generation_prompt=False)
        return tokens, tokens
    prompt = tokenizer.apply_chat_template(before, tools)
    if last.get("tool_calls") or last.get("reasoning_content"):
        return prompt, tokenizer.apply_chat_template(conversation.messages, tools, add_generation_prompt=False)
    tokens = prompt + tokenizer.encode(last["content"], allow_special=True)
    if conversation.finish_reason != "length":
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
