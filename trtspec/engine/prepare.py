"""Conversion of request bodies to engine requests.

Prompts are tokenized, chat templates are rendered, and all fields are checked. The server does this
in a thread, before it sends the first byte of a response.
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

LONGEST_ESCAPE = 6  # largest number of JSON characters per byte of text
SEEDS = 2**64  # number of different seeds


@dataclass(frozen=True)
class ApiCall:
    """A checked API request and the engine requests that answer it.

    body: validated body of the API request.
    tokenizer: tokenizer of the target.
    model: name of the served model.
    requests: engine request of each choice, `body.n` for every prompt.
    thinking: whether the prompt ends in an open think tag. The answer then begins with reasoning.
    created: time of the request in seconds since 1970.
    number: random part of the response's id.
    """

    body: CompletionBody | ChatBody
    tokenizer: KimiTokenizer
    model: str
    requests: list[GenerationRequest]
    thinking: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def id(self) -> str:
        """Id of the response, in OpenAI's format."""
        prefix = "chatcmpl" if self.body.chat else "cmpl"
        return f"{prefix}-{self.number}"

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts. Each prompt counts once, although it has `n` choices."""
        first_choices = self.requests[:: self.body.n]
        return sum(len(request.prompt_ids) for request in first_choices)

    def scores(self, max_seq_len: int) -> int:
        """Largest number of log-probabilities of the answers, of tokens and alternatives."""
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
    """Converter of request bodies to the requests of one engine.

    All methods raise ApiError or RequestRefused if the engine can never answer the body.
    """

    def __init__(self, engine: Engine, tokenizer: KimiTokenizer, model: str) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.model = model
        self.max_bytes = engine.max_seq_len * max(map(len, tokenizer.token_bytes), default=1)

    def call(self, body: CompletionBody | ChatBody, grammar: Grammar | None = None) -> ApiCall:
        """Returns the API call of a body. Each choice follows its own copy of `grammar`."""
        if isinstance(body, ChatBody):
            return self.chat(body, grammar)
        return self.completion(body, grammar)

    def completion(self, body: CompletionBody, grammar: Grammar | None) -> ApiCall:
        """Returns the API call of a completion body."""
        # Every prompt is measured before the first is tokenized, so that a too long one is refused
        # cheaply.
        for prompt in body.prompts:
            if isinstance(prompt, str):
                self._require_short(len(prompt.encode()), "prompt")
        requests = []
        scored = body.echo and body.top is not None
        for prompt in body.prompts:
            if isinstance(prompt, str):
                prompt = self.tokenizer.encode(prompt)
            # The engine generates at least one token. If only the echo is wanted, it is not shown.
            max_tokens = max(1, body.max_tokens)
            requests += self._choices(body, prompt, max_tokens, grammar, prompt_logprobs=scored)
        return ApiCall(body, self.tokenizer, self.model, requests)

    def chat(self, body: ChatBody, grammar: Grammar | None) -> ApiCall:
        """Returns the API call of a chat body."""
        text, prompt = self._rendered(body)
        room = max(1, self.engine.max_seq_len - len(prompt))
        limit = body.max_completion_tokens or body.max_tokens or room
        thinking = text.rstrip().endswith("<think>")
        special = self.tokenizer.special_tokens
        stop_marks = [END_OF_TURN]
        if body.ignore_eos:
            stop_marks = []
        if body.offered_tools and not body.parallel_tool_calls and not body.demanded_tools:
            # Without parallel calls, the answer ends after its first tool call. A demanded call
            # needs no stop, because its grammar allows only one.
            stop_marks.append("<|tool_call_end|>")
        mark_ids = [special[mark] for mark in stop_marks if mark in special]
        stops = body.stop_token_ids + mark_ids
        # The grammar applies after this special token, and from the first token on without one.
        opening_mark = ""
        if grammar is not None:
            if body.strict_tools:
                opening_mark = SECTION
            elif thinking:
                opening_mark = "</think>"
        grammar_after = special.get(opening_mark)
        requests = self._choices(
            body, prompt, limit, grammar, stop_token_ids=stops, grammar_after=grammar_after
        )
        return ApiCall(body, self.tokenizer, self.model, requests, thinking)

    def _rendered(self, body: ChatBody) -> tuple[str, list[int]]:
        """Returns the text and the token ids of a conversation, as the chat template writes it."""
        template = self.tokenizer.template
        variables = dict(body.chat_template_kwargs)
        unknown = variables.keys() - template.variables
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ApiError(
                f"the chat template has no {names} that could be set", param="chat_template_kwargs"
            )
        if body.reasoning_effort:
            if "thinking" not in template.variables:
                raise ApiError(
                    "the chat template cannot switch reasoning on or off", param="reasoning_effort"
                )
            variables["thinking"] = body.reasoning_effort != "none"
        messages = [message.to_dict() for message in body.messages]
        for index, message in enumerate(messages):
            unread = message.keys() - MESSAGE_FIELDS - template.names
            if unread:
                where = f"messages[{index}].{min(unread)}"
                raise ApiError(f"the chat template does not read {where}", param=where)
        tools = body.offered_tools
        try:
            # JSON is longer than the text. Divided by the longest escape, it is at most as long.
            json_chars = len(json.dumps([messages, tools]))
            self._require_short(json_chars // LONGEST_ESCAPE, "messages")
            return self.tokenizer.encode_chat(messages, tools, **{"thinking": None, **variables})
        except RecursionError:
            raise ApiError("a message or a tool is nested too deeply", param="messages") from None
        except PromptTooLong:
            raise
        except TrtspecError as error:
            # The path is cut off, because clients must not learn the server's paths.
            reason = error.message.removeprefix(f"{template.where}: ")
            if reason != error.message:
                reason = f"the chat template refuses the request: {reason}"
            raise ApiError(reason, param="messages") from None

    def _choices(
        self,
        body: CompletionBody | ChatBody,
        prompt: list[int],
        max_tokens: int,
        grammar: Grammar | None,
        **more: Any,
    ) -> list[GenerationRequest]:
        """Returns one checked engine request per choice of a prompt.

        Each further choice adds 1 to the body's seed, so that choices differ.

        Args:
            body: body of the API request.
            prompt: token ids of the prompt.
            max_tokens: largest number of tokens to generate per choice.
            grammar: grammar that the choices follow, None for any text.
            more: further fields of GenerationRequest.
        """
        fields = {name: getattr(body, name) for name in Sampling.model_fields} | more
        fields["logit_bias"] = {int(token): value for token, value in body.logit_bias.items()}
        logprobs = 0
        if body.top is not None:
            # The engine reports no log-probabilities at 0. With 0 alternatives, `scores` lists only
            # the chosen token.
            logprobs = max(1, body.top)
        fields["logprobs"] = logprobs
        common = GenerationRequest(
            "", prompt, max_tokens, stop=body.stops, grammar=grammar, **fields
        )
        self.engine.check(common)
        # An answer ends at the end of its grammar, also with ignore_eos. These tokens are added
        # after the check, because the check limits only what the client sent.
        stops = list(common.stop_token_ids)
        if grammar is not None:
            stops += grammar.end_ids
        requests = []
        for choice in range(body.n):
            seed = common.seed
            if seed is not None and choice:
                # The sum wraps around, so that it stays a signed 64-bit number.
                seed = (seed + choice + SEEDS // 2) % SEEDS - SEEDS // 2
            update = {"id": uuid.uuid4().hex, "seed": seed, "stop_token_ids": stops}
            requests.append(common.model_copy(update=update))
        return requests

    def _require_short(self, size: int, param: str) -> None:
        """Raises PromptTooLong if `size` bytes are too long even if every token is the longest.

        `param`: name of the body's field, for the error.
        """
        if size > self.max_bytes:
            raise PromptTooLong(f"{size} bytes of text cannot fit into the context", param=param)
