"""What the gate asks, beside the prompts of the data set: system prompts, thinking, long context, tools, forms, stops.

Everything is made from the prompts and from counts, so two servers are asked the same, and a recording is replayed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trtspec.bench.questions.datasets import Question, text_of
from trtspec.bench.transcript import AskedPrompt, Recording, Transcript

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Finds a name in the documentation.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
NAMES = (
    "parse_args", "open_file", "read_table", "sort_rows", "merge_keys", "find_path", "load_model", "save_state",
    "join_words", "split_lines", "count_items", "first_match", "send_mail", "list_users", "make_plan", "close_port",
)  # fmt: skip
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer in one short paragraph and never use lists.",
    "You are an engineer who reviews code. Name the most important fact first, then the reason for it.",
)
# the fields of chat templates that turn thinking off and on, as Kimi's template and its relatives read them
THINKING = ({"thinking": True}, {"thinking": False})
FORM_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
PIXEL = f"data:image/png;base64,{PNG}"
CHARACTERS_PER_TOKEN = 4  # of English prose; the server's own count is what is reported
FEW = 8  # of what is compared without being counted on for rare faults


@dataclass(frozen=True, kw_only=True)
class Battery:
    """What one server is asked. `each`: how many tool requests, follow-ups and the like; at most one per prompt."""

    prompts: list[AskedPrompt]
    long: list[AskedPrompt]
    max_tokens: int
    each: int


def make_battery(
    questions: Sequence[Question], max_tokens: int, contexts: Sequence[int] = (), per_context: int = 0
) -> Battery:
    """`contexts` are lengths in tokens of the long prompts, `per_context` how many of each."""
    plain = [AskedPrompt(question.id, question.category, question.first_request()[0]) for question in questions]
    few = plain[: max(1, min(FEW, len(plain) // 4))]
    bare = [prompt for prompt in few if prompt.messages[0]["role"] != "system"]
    variants = [
        AskedPrompt(f"system {index}: {prompt.question}", prompt.category, [_system(text), *prompt.messages], "system")
        for index, text in enumerate(SYSTEM_PROMPTS)
        for prompt in bare
    ]
    variants += [
        AskedPrompt(f"{_words(extra)}: {prompt.question}", prompt.category, prompt.messages, "thinking", _kwargs(extra))
        for extra in THINKING
        for prompt in few
    ]
    long = [
        AskedPrompt(f"{length} tokens: {index}", "long context", [_user(_document(plain, length, index))], str(length))
        for length in contexts
        for index in range(per_context)
    ]
    return Battery(prompts=plain + variants, long=long, max_tokens=max_tokens, each=len(plain))


def battery_of(recording: Recording) -> Battery:
    """What was asked when `recording` was made."""
    prompts = [transcript.prompt for transcript in recording.transcripts]
    return Battery(
        prompts=prompts,
        long=[transcript.prompt for transcript in recording.long_cold],
        max_tokens=recording.max_tokens,
        each=max(1, sum(prompt.group == "prompts" for prompt in prompts)),
    )


def tool_question(index: int) -> str:
    return f"Look up `{tool_name(index)}` in the documentation."


def tool_name(index: int) -> str:
    name = NAMES[index % len(NAMES)]
    return name if index < len(NAMES) else f"{name}_{index // len(NAMES)}"


def follow_up(index: int) -> list[dict[str, Any]]:
    """A conversation in which the tool was called with reasoning before it, and has answered: now the model writes."""
    name = tool_name(index)
    call = {"name": "lookup", "arguments": f'{{"name": "{name}"}}'}
    asked = {
        "role": "assistant",
        "content": "",
        "reasoning_content": f"The user wants the documentation of {name}, so I look it up.",
        "tool_calls": [{"id": "functions.lookup:0", "type": "function", "function": call}],
    }
    found = {"role": "tool", "tool_call_id": "functions.lookup:0", "name": "lookup",
             "content": f"{name}(source, limit=10): returns at most `limit` entries of `source` in order."}  # fmt: skip
    return [_user(tool_question(index)), asked, found]


def form_question(index: int) -> list[dict[str, Any]]:
    return [_user(f"Describe {tool_name(index)} as a JSON object with its name and the number of its letters.")]


def image_question() -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "Which colour has this picture?"}]
    return [{"role": "user", "content": [*parts, {"type": "image_url", "image_url": {"url": PIXEL}}]}]


def stop_word(answer: Transcript) -> str | None:
    """Three words from the middle of an answer that stand there for the first time, its reasoning included, where a
    stop string cuts too."""
    text, reasoning = answer.content, answer.text[: answer.reasoned]
    words = text.split(" ")
    for start in range(len(words) // 3, len(words) - 4):
        phrase = " ".join(words[start : start + 3])
        first = text.find(phrase) == len(" ".join(words[:start])) + 1 and phrase not in reasoning
        if len(phrase) >= 6 and phrase.strip() == phrase and first:
            return phrase
    return None


def _document(prompts: Sequence[AskedPrompt], length: int, index: int) -> str:
    """Prompts of the data set, one after another in an order of its own, as long as asked, and a question at the end.
    Its first words are its own, so that no two documents share a prefix."""
    texts = [text_of(prompt.messages[-1]) for prompt in prompts]
    order = sorted(texts, key=lambda text: hashlib.sha256(f"{length} {index} {text}".encode()).digest())
    room, found = length * CHARACTERS_PER_TOKEN, [f"Notes, part {index + 1} of the volume on {length}."]
    while room > 0 and order:
        for text in order:
            found.append(text)
            room -= len(text)
            if room <= 0:
                break
    return "\n\n".join(found)[: length * CHARACTERS_PER_TOKEN] + "\n\nSummarise these notes in a few sentences."


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _kwargs(extra: dict[str, Any]) -> dict[str, Any]:
    return {"chat_template_kwargs": dict(extra)}


def _words(extra: dict[str, Any]) -> str:
    return " ".join(f"{key} {'on' if value else 'off'}" for key, value in extra.items())
