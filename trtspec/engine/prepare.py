"""From a request body to engine requests.

Prompts are tokenized, templates rendered and everything checked, beside the event loop and before
an answer begins.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from trtspec.checkpoint.chat_parser import END_OF_TURN, SECTION
from trtspec.checkpoint.tokenizer import KimiTokenizer
from trtspec.engine.bodies import MESSAGE_FIELDS, ApiError, ChatBody, CompletionBody
from trtspec.engine.engine import Engine
from trtspec.engine.grammars import Grammar
from trtspec.engine.request import GenerationRequest, PromptTooLong, Sampling
from trtspec.errors import TrtspecError

LONGEST_ESCAPE = 6  # characters of JSON per byte of text
SEEDS = 2**64


@dataclass(frozen=True)
class ApiCall:
    """One API call.

    asked: the body of the call.
    requests: the engine request behind each choice, `asked.n` for every prompt.
    thinking: whether the prompt ends in an open think tag.
    """

    asked: CompletionBody | ChatBody
    tokenizer: KimiTokenizer
    model: str
    requests: list[GenerationRequest]
    thinking: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def id(self) -> str:
        prefix = "chatcmpl" if self.asked.chat else "cmpl"
        return f"{prefix}-{self.number}"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts. Each prompt counts once."""
        return sum(len(request.prompt_ids) for request in self.requests[:: self.asked.n])

    def scores(self, max_seq_len: int) -> int:
        """How many log-probabilities the answers may have: of each token and its alternatives."""
        total = 0
        for request in self.requests:
            if request.logprobs:
                prompt = len(request.prompt_ids)
                tokens = min(request.max_tokens, max_seq_len - prompt)
                if request.prompt_logprobs:
                    tokens += prompt
                total += tokens * (1 + request.logprobs)
        return total


class Preparation:
    """Makes the calls of one engine. Its methods raise ApiError or RequestRefused."""

    def __init__(self, engine: Engine, tokenizer: KimiTokenizer, model: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.max_bytes = engine.max_seq_len * max(map(len, tokenizer.token_bytes), default=1)

    def call(self, asked: CompletionBody | ChatBody, grammar: Grammar | None = None) -> ApiCall:
        """The call of a body. Each choice follows its own copy of the grammar."""
        if isinstance(asked, ChatBody):
            return self.chat(asked, grammar)
        return self.completion(asked, grammar)

    def completion(self, asked: CompletionBody, grammar: Grammar | None) -> ApiCall:
        # Every prompt is measured before the first is tokenized.
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                self._require_short(len(prompt.encode()), "prompt")
        requests = []
        scored = asked.echo and asked.top is not None
        for prompt in asked.prompts:
            if isinstance(prompt, str):
                prompt = self.tokenizer.encode(prompt)
            # For an echo alone (0 tokens) one token is generated and not shown.
            length = max(1, asked.max_tokens)
            requests += self._choices(asked, prompt, length, grammar, prompt_logprobs=scored)
        return ApiCall(asked, self.tokenizer, self.model, requests)

    def chat(self, asked: ChatBody, grammar: Grammar | None) -> ApiCall:
        text, prompt = self._rendered(asked)
        limit = (
            asked.max_completion_tokens
            or asked.max_tokens
            or max(1, self.engine.max_seq_len - len(prompt))
        )
        thinking = text.rstrip().endswith("<think>")
        special = self.tokenizer.special_tokens
        marks = [END_OF_TURN]
        if asked.ignore_eos:
            marks = []
        if asked.offered_tools and not asked.parallel_tool_calls and not asked.demanded_tools:
            marks.append("<|tool_call_end|>")  # a free answer ends after its first call
        stops = [*asked.stop_token_ids, *(special[mark] for mark in marks if mark in special)]
        mark = ""
        if grammar is not None:
            if asked.strict_tools:
                mark = SECTION
            elif thinking:
                mark = "</think>"
        requests = self._choices(
            asked, prompt, limit, grammar, stop_token_ids=stops, grammar_after=special.get(mark)
        )
        return ApiCall(asked, self.tokenizer, self.model, requests, thinking)

    def _rendered(self, asked: ChatBody) -> tuple[str, list[int]]:
        """Text and tokens of a conversation."""
        template = self.tokenizer.template
        variables = dict(asked.chat_template_kwargs)
        unknown = variables.keys() - template.variables
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ApiError(
                f"the chat template has no {names} that could be set", param="chat_template_kwargs"
            )
        if asked.reasoning_effort:
            if "thinking" not in template.variables:
                raise ApiError(
                    "the chat template cannot switch reasoning on or off", param="reasoning_effort"
                )
            variables["thinking"] = asked.reasoning_effort != "none"
        messages = [message.to_dict() for message in asked.messages]
        for index, message in enumerate(messages):
            unread = message.keys() - MESSAGE_FIELDS - template.names
            if unread:
                where = f"messages[{index}].{min(unread)}"
                raise ApiError(f"the chat template does not read {where}", param=where)
        tools = asked.offered_tools
        try:
            self._require_short(len(json.dumps([messages, tools])) // LONGEST_ESCAPE, "messages")
            return self.tokenizer.encode_chat(messages, tools, **{"thinking": None, **variables})
        except RecursionError:
            raise ApiError("a message or a tool is nested too deeply", param="messages") from None
        except PromptTooLong:
            raise
        except TrtspecError as error:
            # The path is cut off: a client does not learn the server's paths.
            reason = error.message.removeprefix(f"{template.where}: ")
            if reason != error.message:
                reason = f"the chat template refuses the request: {reason}"
            raise ApiError(reason, param="messages") from None

    def _choices(
        self,
        asked: CompletionBody | ChatBody,
        prompt: list[int],
        max_tokens: int,
        grammar: Grammar | None,
        **more: Any,
    ) -> list[GenerationRequest]:
        """The checked requests behind the choices for one prompt. A given seed grows with each."""
        fields = {name: getattr(asked, name) for name in Sampling.model_fields} | more
        fields["logit_bias"] = {int(token): value for token, value in asked.logit_bias.items()}
        logprobs = 0
        if asked.top is not None:
            # With 0 alternatives the answer lists the chosen token alone.
            logprobs = max(1, asked.top)
        fields["logprobs"] = logprobs
        common = GenerationRequest(
            "", prompt, max_tokens, stop=asked.stops, grammar=grammar, **fields
        )
        self.engine.check(common)
        # An answer ends where its grammar does, also with ignore_eos. These stops come after the
        # check, which judges the client's own.
        stops = list(common.stop_token_ids)
        if grammar is not None:
            stops += grammar.ends
        requests = []
        for choice in range(asked.n):
            seed = common.seed
            if seed is not None and choice:
                # The sum wraps, to stay a signed 64-bit number.
                seed = (seed + choice + SEEDS // 2) % SEEDS - SEEDS // 2
            update = {"id": uuid.uuid4().hex, "seed": seed, "stop_token_ids": stops}
            requests.append(common.model_copy(update=update))
        return requests

    def _require_short(self, size: int, param: str) -> None:
        """Raises PromptTooLong if a text of `size` bytes cannot fit, whatever its tokens are."""
        if size > self.max_bytes:
            raise PromptTooLong(f"{size} bytes of text cannot fit into the context", param=param)
