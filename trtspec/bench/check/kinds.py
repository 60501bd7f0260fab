"""The kinds of faults that check looks for. Probes, rows, the verdict and docs/fault-kinds.md read this table.

A probe is the `kind` of an exchange, its `run` where the same request is repeated, or what is looked at in all answers.
"""

from __future__ import annotations

from typing import NamedTuple


class FaultKind(NamedTuple):
    """`symptom`: what a user sees. `probe` shows the fault, and `row` names it."""

    name: str
    symptom: str
    probe: str
    row: str


TABLE = {
    "answers": (
        ("failures", "an error, or half an answer", "request"),
        ("held-back streams", "a text that comes all at once", "streams"),
    ),
    "prompts": (
        ("chat template", "another question is answered", "text"),
        ("system prompt, thinking mode", "instructions without effect", "prompt"),
        ("second user turn", "the first turn is forgotten", "turn-2"),
        ("tools", "a function that is offered is unknown", "call"),
        ("tool results", "the result of a call is unknown", "follow-up"),
        ("special names", "words of a user end the turn", "special"),
        ("white space", "leading blanks and line ends change", "blanks"),
        ("composed characters", "accents and wide letters change", "composed"),
        ("long chat", "the beginning is forgotten", "limit long"),
    ),
    "greedy": (
        ("short answers", "words that the model would not write", "text prompt stop"),
        ("long prompts", "the same with long documents", "long"),
        ("near the limit", "the same with the longest prompt", "limit"),
        ("long answer", "an answer that decays", "answer"),
        ("second turn", "the same in a conversation", "turn-2"),
        ("tool calls", "another function or argument", "call follow-up"),
        ("warm cache", "the same with a known prompt", "warm"),
        ("crowd", "the same among many requests", "crowd"),
        ("after the crowd", "the same after many requests", "later"),
    ),
    "sampled": (
        ("distribution", "too tame or too wild: temperature, rejected drafts", "places"),
        ("tail", "rare words never come: top_p, top_k or min_p that nobody asked for", "tail"),
        ("choices", "the choices of one n are equal, or fewer", "n"),
        ("seeds", "a seed does not repeat, or all give one answer", "seed"),
    ),
    "transport": (
        ("text", "a text other than its tokens, whole or streamed", "text"),
        ("system text", "the same behind a system prompt", "prompt"),
        ("second reply", "the same in a conversation", "turn-2"),
        ("reply to a long chat", "the same behind a long prompt", "limit long"),
        ("reasoning", "thoughts in the text, or text in the thoughts", "reasoning"),
        ("calls", "a call that is lost or altered", "call follow-up"),
        ("several calls", "text before calls, two at once, order and escapes", "calls"),
        ("arguments", "arguments other than their schema", "arguments"),
        ("characters", "emoji, accents or Han that break", "characters"),
        ("JSON", "an answer outside its schema", "json"),
        ("stop string", "a text that runs on, or ends early", "stop"),
        ("several stop strings", "a string after the first is ignored", "stops"),
        ("begun stop string", "the end of a text is lost", "begun"),
        ("finish reason", "length for stop, or stop for length", "finish"),
        ("usage", "a wrong bill", "usage"),
        ("ids of calls", "calls that cannot be told apart", "ids"),
        ("picture", "no answer to a picture", "picture"),
    ),
    "parameters": tuple(
        (name, "no effect", name) for name in (
            "max_tokens", "min_tokens", "logit_bias", "stop_token_ids", "frequency_penalty", "presence_penalty",
            "repetition_penalty", "top_k", "top_p", "min_p",
        )
    ),
    "acceptance": (
        ("floor", "slow answers", "floor"),
        ("forced acceptance", "the same number of tokens in each step", "forced"),
        ("warm drafts", "slower with a known prompt", "warm"),
        ("drafts in a crowd", "slower among many requests", "crowd"),
        ("drafts after it", "slower after many requests", "later"),
        ("drafts of long prompts", "no drafts behind a long prompt", "long"),
    ),
}  # fmt: skip
KINDS = [FaultKind(*kind, row) for row, kinds in TABLE.items() for kind in kinds]


def page() -> str:
    """docs/fault-kinds.md."""
    lines = [f"| {kind.row} | {kind.name} | {kind.symptom} | {kind.probe} |" for kind in KINDS]
    head = "# Kinds of faults\n\nWhat `trtspec check` looks for.\n\n| row | kind | what a user sees | probe |\n|---|---|---|---|"
    return "\n".join([head, *lines, ""])
