"""What a request asks of its tokens beyond temperature, top_p and top_k: penalties, biases, bans, a grammar, a length.

All of it changes the target's logits before a token is chosen, so speculation stays exact: each drafted position is
steered by the text up to it.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trtspec.engine.request import RequestRefused, Wishes
from trtspec.errors import MissingDependency

if TYPE_CHECKING:
    from trtspec.checkpoint.tokenizer import KimiTokenizer

# Work of one grammar, in llguidance's own units (about 20 and 4 ms) and in seconds of the processor: a grammar that
# takes longer would hold up everybody else's tokens. (a{1000}){1000} took 124 s for one token without.
LEXER_FUEL = 50_000
GRAMMAR_SECONDS, GRAMMAR_SECONDS_PER_TOKEN = 1.0, 0.02


class Steering:
    """The wishes of one request on its way. `ends` are the tokens that end it."""

    def __init__(self, wishes: Wishes, prompt_ids: Sequence[int], ends: Iterable[int], temperature: float) -> None:
        self.wishes = wishes
        self.temperature = temperature
        self.ends = sorted(ends)
        self.counts: Counter[int] = Counter()
        self.biased = torch.tensor(list(wishes.logit_bias), dtype=torch.int64)
        self.biases = torch.tensor(list(wishes.logit_bias.values()), dtype=torch.float32)
        self.prompt = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64)
        self.produced: list[int] = []
        self.guided = wishes.grammar is not None and wishes.grammar_after is None
        self.grammar_seconds = 0.0
        self.dead_end: tuple[int, str] | None = None  # after so many tokens of the step nothing is allowed, and why

    def advance(self, tokens: Sequence[int]) -> None:
        """Takes the tokens that were emitted. Raises RequestRefused where the wishes leave no token to go on with, or
        where the grammar takes too long."""
        if self.dead_end is not None and len(tokens) > self.dead_end[0]:
            raise RequestRefused(f"no answer can continue here: {self.dead_end[1]}")
        allowed = GRAMMAR_SECONDS + GRAMMAR_SECONDS_PER_TOKEN * len(self.produced)
        if self.grammar_seconds > allowed:
            raise RequestRefused("the form of the answer takes too long to follow: simplify it")
        for token in tokens:
            if self.guided and token not in self.ends and not self._consume(token):
                raise RequestRefused(f"the form of the answer cannot be followed: {self._grammar_error()}")
            self.guided = self.guided or token == self.wishes.grammar_after
        self.produced += tokens
        self.counts.update(tokens)

    def apply(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Steers logits [T, V], float32, after the last token and after each of the T-1 drafts, in place; returns them.

        Rows behind a draft that is forbidden are left as they are: that draft is rejected.
        """
        wishes = self.wishes
        counts, produced = Counter(self.counts), list(self.produced)
        guided, consumed = self.guided, 0
        self.dead_end = None
        for index, (row, draft) in enumerate(zip(logits, [*drafts, None], strict=True)):
            if guided:
                self._keep_allowed(row)
            for *before, last in wishes.bad_words:
                if not before or produced[-len(before) :] == before:
                    row[last] = -math.inf
            if len(produced) < wishes.min_tokens:
                row[self.ends] = -math.inf
            if wishes.logit_bias:
                row[self.biased] += self.biases.to(row.device)
            self._penalize(row, counts)
            if wishes.min_p and self.temperature:
                row[row < row.max() + self.temperature * math.log(wishes.min_p)] = -math.inf
            if row.max() == -math.inf:
                self.dead_end = index, self._grammar_error() or "every token is forbidden"
                break
            if draft is None or row[draft] == -math.inf:
                break
            if guided:
                if draft in self.ends or not self._consume(draft):
                    break
                consumed += 1
            guided = guided or draft == wishes.grammar_after
            produced.append(draft)
            counts[draft] += 1
        if consumed:
            wishes.grammar.rollback(consumed)
        return logits

    def _penalize(self, row: Tensor, counts: Counter[int]) -> None:
        wishes = self.wishes
        seen = torch.tensor(sorted(counts), dtype=torch.int64)
        if wishes.repetition_penalty != 1:
            known = torch.cat((self.prompt, seen)).unique()
            values = row[known]
            factor = wishes.repetition_penalty
            row[known] = torch.where(values > 0, values / factor, values * factor)
        if len(seen) and (wishes.frequency_penalty or wishes.presence_penalty):
            times = torch.tensor([counts[token] for token in sorted(counts)], dtype=row.dtype)
            row[seen] -= (wishes.frequency_penalty * times + wishes.presence_penalty).to(row.device)

    def _grammar_error(self) -> str:
        """The first line of what is wrong with the grammar, "" where nothing is."""
        return "" if self.wishes.grammar is None else self.wishes.grammar.get_error().partition("\n")[0]

    def _consume(self, token: int) -> bool:
        began = time.thread_time()
        taken = self.wishes.grammar.try_consume_tokens([token])
        self.grammar_seconds += time.thread_time() - began
        return bool(taken)

    def _keep_allowed(self, row: Tensor) -> None:
        """Sets every token that the grammar forbids here to -inf."""
        began = time.thread_time()
        mask = self.wishes.grammar.compute_bitmask()
        self.grammar_seconds += time.thread_time() - began
        bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        allowed = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and(1).flatten().bool()
        size = min(len(allowed), len(row))
        row[:size][~allowed[:size].to(row.device)] = -math.inf
        row[size:] = -math.inf


class Grammars:
    """Compiles what an answer must look like, for one tokenizer; `ends` are the tokens that end an answer."""

    def __init__(self, tokenizer: KimiTokenizer, ends: Sequence[int]) -> None:
        self.tokenizer, self.ends = tokenizer, list(ends)
        self._vocabulary: Any = None

    def matcher(self, kind: str, grammar: str) -> Any:
        """A matcher of `grammar`: a JSON schema (kind "json"), a regular expression ("regex") or Lark ("lark").

        Raises ValueError with the reason for a grammar that cannot be, MissingDependency without llguidance.
        """
        try:
            import llguidance
            import llguidance.tiktoken
        except ModuleNotFoundError:
            raise MissingDependency("structured output needs llguidance", "pip install llguidance") from None
        if self._vocabulary is None:
            self._vocabulary = llguidance.tiktoken.lltokenizer_from_encoding(
                self.tokenizer.encoding, n_vocab=self.tokenizer.vocab_size, eos_token=self.ends
            )
        if kind == "json":
            grammar = _compact(grammar)
        from_text = {"json": "grammar_from_json_schema", "regex": "grammar_from_regex", "lark": "grammar_from_lark"}
        made = getattr(llguidance.LLMatcher, from_text[kind])(grammar)
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL, step_lexer_fuel=LEXER_FUEL, verbose_errors=False
        )
        matcher = llguidance.LLMatcher(self._vocabulary, made, log_level=0, limits=limits)
        began = time.thread_time()
        matcher.compute_bitmask()  # the first is the dearest, and shows what compiling does not
        if matcher.is_error():
            raise ValueError(matcher.get_error().splitlines()[0])
        if time.thread_time() - began > GRAMMAR_SECONDS:
            raise ValueError("it takes too long to follow: simplify it")
        return matcher


def _compact(schema: str) -> str:
    """The schema with one way to write each value: where any white space may stand, a small model writes nothing else.

    Raises ValueError for what is no JSON object.
    """
    try:
        value = json.loads(schema)
    except RecursionError:
        raise ValueError("the schema is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("the schema is not a JSON object")
    return json.dumps({**value, "x-guidance": {"whitespace_flexible": False}})


def tool_call_grammar(tools: Sequence[Mapping[str, Any]], several: bool, opened: bool = False) -> str:
    """Lark grammar of a Kimi tool-call section that calls these functions, one or several times; of what follows its
    first mark where that is already there (`opened`).

    Its marks are special tokens; a call's id is `functions.NAME:NUMBER`; arguments follow the function's own schema.
    """
    lines = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = _compact(json.dumps(function.get("parameters") or {"type": "object"}))
        lines += [
            f"call{index}: <|tool_call_begin|> name{index} <|tool_call_argument_begin|> args{index} <|tool_call_end|>",
            f"name{index}: {json.dumps('functions.' + function['name'] + ':')} /[0-9]{{1,3}}/",
            f"args{index}: %json {schema}",
        ]
    calls = " | ".join(f"call{index}" for index in range(len(tools)))
    begin = "" if opened else "<|tool_calls_section_begin|> "
    start = f"start: {begin}call{'+' if several else ''} <|tool_calls_section_end|>"
    return "\n".join([start, f"call: {calls}", *lines])
