"""Constraints of a request beyond temperature, top_p and top_k: penalties, biases, grammar, length.

All constraints change the target's logits before a token is chosen. The logits of each drafted
position depend only on the text before it, so speculative decoding stays exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from trtspec.engine.grammars import Grammar
from trtspec.engine.request import GenerationRequest, RequestRefused


class Steering:
    """The constraints of one request, and the state of its output that they depend on.

    `end_ids`: ids of the tokens that end the output.
    """

    def __init__(self, request: GenerationRequest, end_ids: Iterable[int]) -> None:
        self.request = request
        self.end_ids = sorted(end_ids)
        self.counts: Counter[int] = Counter()
        self.biased = torch.tensor(list(request.logit_bias), dtype=torch.int64)
        self.biases = torch.tensor(list(request.logit_bias.values()), dtype=torch.float32)
        self.prompt = torch.tensor(sorted(set(request.prompt_ids)), dtype=torch.int64)
        self.length = 0
        self.guided = request.grammar is not None and request.grammar_after is None
        # If no token is allowed at a position: number of tokens of the step before it, and reason.
        self.dead_end: tuple[int, str] | None = None

    @cached_property
    def grammar(self) -> Grammar:
        """Copy of the request's grammar for this sequence, made at its first use."""
        grammar: Grammar = self.request.grammar.copy()
        return grammar

    def advance(self, tokens: Sequence[int]) -> None:
        """Adds emitted tokens to the state.

        Raises RequestRefused if no token was allowed at a position of this step, or if the grammar
        does not accept a token.
        """
        if self.dead_end is not None and len(tokens) > self.dead_end[0]:
            raise RequestRefused(f"no answer can continue here: {self.dead_end[1]}")
        request = self.request
        for token in tokens:
            if self.guided and token not in self.end_ids and not self.grammar.consume(token):
                raise RequestRefused(
                    f"the form of the answer cannot be followed: {self.grammar.fault}"
                )
            # The grammar applies from the token after `grammar_after` on.
            self.guided = self.guided or token == request.grammar_after
        self.length += len(tokens)
        self.counts.update(tokens)

    def apply(self, logits: Tensor, drafts: Sequence[int]) -> Tensor:
        """Applies the constraints to logits in place, and returns the logits.

        Rows after a forbidden draft stay unchanged, because the forbidden draft is rejected.

        Args:
            logits: float32 [T, V], after the last token and after each of the T-1 drafts.
            drafts: ids of the T-1 drafts.
        """
        request = self.request
        counts = Counter(self.counts)
        length = self.length
        guided = self.guided
        consumed = 0
        self.dead_end = None
        # No draft follows the last row.
        for index, (row, draft) in enumerate(zip(logits, [*drafts, None], strict=True)):
            if guided:
                self._keep_allowed(row)
            if length < request.min_tokens:
                row[self.end_ids] = -math.inf
            if request.logit_bias:
                row[self.biased] += self.biases.to(row.device)
            self._penalize(row, counts)
            if row.max() == -math.inf:
                reason = ""
                if request.grammar:
                    reason = self.grammar.fault
                self.dead_end = index, reason or "every token is forbidden"
                break
            # Rows after a rejected draft are never read.
            if draft is None or row[draft] == -math.inf:
                break
            if guided:
                if draft in self.end_ids or not self.grammar.consume(draft):
                    break
                consumed += 1
            guided = guided or draft == request.grammar_after
            length += 1
            counts[draft] += 1
        if consumed:
            # Drafts are only tried: `advance` takes the tokens that are emitted.
            self.grammar.rollback(consumed)
        return logits

    def _penalize(self, row: Tensor, counts: Counter[int]) -> None:
        """Applies the penalties to logits [V] in place.

        `counts`: number of occurrences of each token in the output so far.
        """
        request = self.request
        seen = torch.tensor(sorted(counts), dtype=torch.int64)
        if request.repetition_penalty != 1:
            repeated = torch.cat((self.prompt, seen)).unique()
            values = row[repeated]
            factor = request.repetition_penalty
            # With a factor above 1, both cases lower the logit.
            row[repeated] = torch.where(values > 0, values / factor, values * factor)
        if len(seen) and (request.frequency_penalty or request.presence_penalty):
            times = torch.tensor([counts[token] for token in sorted(counts)], dtype=row.dtype)
            penalties = request.frequency_penalty * times + request.presence_penalty
            row[seen] -= penalties.to(row.device)

    def _keep_allowed(self, row: Tensor) -> None:
        """Sets the logits [V] of all tokens that the grammar forbids to -inf."""
        mask = np.frombuffer(self.grammar.mask(), np.uint8)
        bits = np.unpackbits(mask, bitorder="little")
        allowed = torch.from_numpy(bits).bool()
        # The mask is padded to whole bytes, and lm_head may have more rows than the tokenizer has
        # tokens. These rows are forbidden too.
        size = min(len(allowed), len(row))
        row[:size][~allowed[:size].to(row.device)] = -math.inf
        row[size:] = -math.inf
